"""Faults inside a rank: at the n-th time that it reaches a point of the program, it does something bad.

SOAK_FAULT   {"point": "update_actor", "count": 3, "rank": 1, "action": "kill rank"} (soak.py), or a list of such (healing.py)
SOAK_USAGE   a folder: after each step every rank appends its memory, descriptors and threads to RANK.jsonl
SOAK_OUTPUT  the run's output folder
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import json
import os
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A point is a phase of a step (Metrics.phase), or the begin of one of these functions.
FUNCTIONS = {
    "join": ("grpo_megatron.run", "join_world"),  # before the first heartbeat
    "start": ("grpo_megatron.training.placement", "build_colocation"),
    "build": ("grpo_megatron.run", "build_critic"),  # just before the state is loaded
    "log": ("grpo_megatron.report.step", "StepReport.log"),
    "save: state": ("grpo_megatron.training.checkpoint", "save_sharded"),
    "save: files": ("grpo_megatron.models.weights.sharded_state", "ShardedWrite.write"),
    "save: manifest": ("grpo_megatron.training.checkpoint", "write_manifest"),
    "save: rename": ("grpo_megatron.training.checkpoint", "publish_folder"),
    "save: prune": ("grpo_megatron.training.checkpoint", "Checkpoints._prune"),
    "export": ("grpo_megatron.training.colocation", "save_hf"),
}
LIMIT = 4096  # bytes that a file may have on the "full disk"
_reached: collections.Counter[str] = collections.Counter()


def install() -> None:
    """Called in every rank before it begins."""
    from grpo_megatron.report.metrics import Metrics

    phase = Metrics.phase

    def watched(self: Metrics, name: str) -> Any:
        reach(name)
        return phase(self, name)

    Metrics.phase = watched  # type: ignore[method-assign]
    for point, (module, name) in FUNCTIONS.items():
        owner: Any = importlib.import_module(module)
        *classes, attribute = name.split(".")
        for part in classes:
            owner = getattr(owner, part)
        setattr(owner, attribute, _preceded(point, getattr(owner, attribute)))


def _preceded(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        reach(point)
        return function(*arguments, **named)

    return wrapper


def reach(point: str) -> None:
    _reached[point] += 1
    if point == "log" and "SOAK_USAGE" in os.environ:
        _record_usage(Path(os.environ["SOAK_USAGE"]))
    faults = json.loads(os.environ.get("SOAK_FAULT", "{}"))
    for fault in faults if isinstance(faults, list) else [faults]:
        size = int(os.environ["WORLD_SIZE"])
        mine = (point, _reached[point], int(os.environ["RANK"]))
        if fault and (fault["point"], fault["count"], fault["rank"] % size) == mine and _is_first(fault):
            ACTIONS[fault["action"]]()


def _is_first(fault: dict[str, Any]) -> bool:
    """Says if the fault is to happen: one with a file `once` happens in one process, though healing starts the rank again.

    The file then has the time, and the launcher's memory in KiB. One with a file `after` waits for another fault.
    """
    if "after" in fault and not Path(fault["after"]).exists():
        return False
    if "once" not in fault:
        return True
    try:
        with Path(fault["once"]).open("x") as file:
            json.dump({"time": time.time(), "rss_kib": _resident(_launcher())}, file)
    except FileExistsError:
        return False
    return True


def _resident(pid: int | str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


def _record_usage(folder: Path) -> None:
    usage = {
        "rss_kib": _resident("self"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }
    with (folder / f"{os.environ['RANK']}.jsonl").open("a") as file:
        file.write(json.dumps(usage) + "\n")


# -- actions -----------------------------------------------------------------------------------------------------------


def _launcher() -> int:
    return int(os.environ["SOAK_LAUNCHER"])


def _twice() -> None:
    os.kill(_launcher(), signal.SIGINT)
    time.sleep(1)  # two signals at once would be one
    os.kill(_launcher(), signal.SIGINT)


def _send_others(number: signal.Signals) -> None:
    """Sends a signal to the other ranks, whose processes are named in the launcher's folder."""
    folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1]
    for file in folder.glob("*/pid"):
        with contextlib.suppress(ProcessLookupError):
            if (pid := int(file.read_text())) != os.getpid():
                os.kill(pid, number)


def _all(number: signal.Signals) -> None:
    _send_others(number)
    os.kill(os.getpid(), number)


def _cut() -> None:
    """Shuts the connections of this process to others down."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.shutdown(socket.SHUT_RDWR)


ACTIONS: dict[str, Callable[[], None]] = {
    "kill rank": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop rank": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill all ranks": lambda: _all(signal.SIGKILL),
    "stop all ranks": lambda: _all(signal.SIGSTOP),
    "cut network": _cut,
    "kill launcher": lambda: os.kill(_launcher(), signal.SIGKILL),
    "kill all": lambda: os.killpg(os.getpgid(_launcher()), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(_launcher(), signal.SIGTERM),
    "SIGUSR1": lambda: os.kill(_launcher(), signal.SIGUSR1),
    "SIGINT": lambda: os.kill(_launcher(), signal.SIGINT),
    "SIGINT twice": _twice,
    "full disk": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT)),
    "delete folder": lambda: shutil.rmtree(os.environ["SOAK_OUTPUT"]),
}
