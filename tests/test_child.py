"""Forks of a process that is killed end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORK = """
import multiprocessing, time
from grpo_megatron.child import forks_end_with_this_process
with forks_end_with_this_process():
    multiprocessing.get_context("fork").Process(target=time.sleep, args=[600]).start()
print("forked", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_a_fork_ends_with_its_killed_parent() -> None:
    """The pipe of its output is closed when its last holder, the fork, has ended."""
    process = subprocess.Popen([sys.executable, "-c", FORK], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"forked\n"
        process.kill()
        process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
