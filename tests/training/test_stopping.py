"""What a signal does to a rank: the first one is a request, the second one ends it, also while it waits in C code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import sys, threading
from grpo_megatron.training.stopping import listen, requested
listen(must_end=lambda: sys.argv[1] == "lost", announces=True)
print("ready", flush=True)
if sys.argv[1] == "step":  # ends when it has been asked to stop
    sys.stdin.readline()
    sys.exit(0 if requested() == sys.argv[2] else 1)
lock = threading.Lock()
lock.acquire()
lock.acquire()  # never returns, as a collective with a dead rank
"""


def rank(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    pipe, env = subprocess.PIPE, {**os.environ, **environment}
    command = [sys.executable, "-c", RANK, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_is_a_request(number: signal.Signals) -> None:
    process = rank("step", number.name)
    process.send_signal(number)
    _, err = process.communicate("\n", timeout=300)
    assert process.returncode == 0
    assert err == f"{number.name}: the run stops after this step and saves; a second signal ends it at once\n"


@pytest.mark.parametrize(
    ("second", "environment"), [(signal.SIGINT, {}), (None, {"GRPO_MEGATRON_TERM_SECONDS": "0.1"})]
)
def test_a_rank_that_waits_is_ended(second: signal.Signals | None, environment: dict[str, str]) -> None:
    """By the second signal; under Slurm before it kills the batch script, too."""
    process = rank("collective", **environment)
    first = signal.SIGTERM if environment else signal.SIGUSR1
    process.send_signal(first)
    assert process.stderr is not None and process.stderr.readline().startswith(f"{first.name}: ")
    if second is not None:
        process.send_signal(second)
    assert process.wait(300) == 128 + (second or first)
    process.communicate()


def test_a_signal_ends_a_rank_of_a_lost_run() -> None:
    """torchrun's agent sends SIGTERM to the other ranks when one has died."""
    process = rank("lost")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (143, "")
