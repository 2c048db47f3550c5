"""Keeper: what torchrun's agent knows of a rollout rank that may be lost, while the ranks that train go on.

The agent ends all ranks when one of them ends. So its process only waits, and the rank is a fork of it. When a rank that
samples is lost, all of them end, and start again as the next *incarnation* of their role; training/roles.py connects to it.
Keepers agree by files in the launcher's folder: of one machine. After MAX_INCARNATIONS a loss is the launcher's (cli/healing.py),
as is that of an incarnation that has not joined: the ranks that train may await it where they notice no loss.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

from grpo_megatron.cli.ranks import launcher_folder
from grpo_megatron.parallel.control import INCARNATION, JOINED_FILE
from grpo_megatron.parallel.heartbeat import STOPPED_S, is_stopped
from grpo_megatron.processes.process import die_with_parent

MAX_INCARNATIONS = 3
WAIT_S = 0.05
PATIENCE_S = 2.0  # for another keeper to say that its rank was lost, which this one's rank has failed of
FOR_THE_RANK = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # a terminal sends them to the keeper, too


def keep_rank() -> None:
    """Returns in a fork of this process, which is the rank; this process starts it again, and ends as the last one does."""
    folder, number, keeper = launcher_folder(), 0, os.getpid()
    assert folder is not None
    before = {name: signal.signal(name, signal.SIG_IGN) for name in FOR_THE_RANK}
    while True:
        if (pid := os.fork()) == 0:
            for name, handler in before.items():
                signal.signal(name, handler)
            os.environ |= {INCARNATION: str(number), JOINED_FILE: str(folder / f"joined_{number}")}
            die_with_parent(keeper)
            return
        code = _wait(pid, folder, number)
        if number == (number := _newest(folder)):
            _end_as(code)
        report = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        for file in (report, report.with_name("pid")):
            file.unlink(missing_ok=True)


def _wait(pid: int, folder: Path, number: int) -> int:
    """Waits for the end of the rank: its exit code, or -signal. Announces the next incarnation if it was lost."""
    ending, stopped_since, joined = False, None, folder / f"joined_{number}"

    def pass_on(name: int, frame: object) -> None:
        nonlocal ending
        ending = True
        os.kill(pid, name)

    signal.signal(signal.SIGTERM, pass_on)
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        stopped_since = (stopped_since or time.monotonic()) if is_stopped(pid) else None
        if _newest(folder) > number or (stopped_since and time.monotonic() - stopped_since > STOPPED_S):
            os.kill(pid, signal.SIGKILL)
        time.sleep(WAIT_S)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = os.waitstatus_to_exitcode(ended[1])
    if code and not ending and number < MAX_INCARNATIONS and joined.exists():
        if code < 0 or _has_reported_loss():
            (folder / f"rollout_{number + 1}").touch()
        until = time.monotonic() + PATIENCE_S
        while _newest(folder) == number and time.monotonic() < until:
            time.sleep(WAIT_S)
    return code


def _newest(folder: Path) -> int:
    return max((int(file.name.partition("_")[2]) for file in folder.glob("rollout_*")), default=0)


def _has_reported_loss() -> bool:
    """Says if a loss was the first that a rank of this machine has reported: others of an exception are its symptoms."""
    reports = []
    for file in Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1].glob("*/error.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            reports.append(json.loads(file.read_text())["report"])
    return bool(reports and min(reports, key=lambda report: report["time_ns"])["is_loss"])


def _end_as(code: int) -> None:
    """Ends this process as its rank has ended."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
