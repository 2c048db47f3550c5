"""What a reward leaves behind: processes that have left its session, and output that would control a terminal."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_megatron.processes.process import MARK, new_mark
from grpo_megatron.rewards.pool import RewardPool
from tests.processes.waiting import PATIENCE_S, wait_until

TIMEOUT_S = 3.0

MODULE = r"""
import os, sys, time

def reward(completion, answer):
    if completion == "escapes":
        print("\033[2J\033]0;title\007a\rb\tc\x9b5m", file=sys.stderr)
        raise ValueError("\033[31mred")
    if "daemon" in completion:
        environment = {} if completion == "naked daemon" else os.environ
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execve("/bin/sleep", ["sleep", "602.375"], environment)
            os._exit(0)
        os.wait()
        if completion == "daemon, then exit":
            os._exit(3)
        time.sleep(600)
    return 1.0
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    folder = tmp_path_factory.mktemp("user")
    (folder / "leaving_reward.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    with RewardPool(1, TIMEOUT_S) as pool:
        yield pool
    sys.path.remove(str(folder))


def _daemons() -> list[Path]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path] if path.read_bytes() == b"sleep\x00602.375\x00" else []
    return found


@pytest.mark.parametrize("completion", ["daemon", "naked daemon", "daemon, then exit"])
def test_a_daemon_ends_with_its_worker(pool: RewardPool, completion: str) -> None:
    """It has its own session and has lost its parent. "naked": it has an empty environment, too."""
    (result,) = pool.grade([("leaving_reward:reward", completion, "")])
    assert result.status == ("error" if completion == "daemon, then exit" else "timeout"), result
    wait_until(lambda: not _daemons())


def test_a_pool_ends_what_a_killed_run_has_left() -> None:
    """The run that owns the first process has ended. A process of a run that lives is left alone."""
    with subprocess.Popen(["true"]) as owner:
        pass
    marks = f"{owner.pid}.1.x", new_mark()
    left, kept = (subprocess.Popen(["sleep", "603"], env={MARK: mark}) for mark in marks)
    try:
        RewardPool(1).close()
        assert left.wait(PATIENCE_S) == -signal.SIGKILL
        assert kept.poll() is None
    finally:
        for process in (left, kept):
            process.kill()
            process.wait()


def test_output_does_not_control_the_terminal(pool: RewardPool, capfd: pytest.CaptureFixture[str]) -> None:
    (result,) = pool.grade([("leaving_reward:reward", "escapes", "")])
    assert "ValueError: red" in result.message
    shown = ""

    def is_shown() -> bool:
        nonlocal shown
        pool.grade([("leaving_reward:reward", "1", "")])
        shown += capfd.readouterr().err
        return "c5m" in shown

    wait_until(is_shown)
    assert "a\nb\tc5m\n" in shown and "\033" not in shown
