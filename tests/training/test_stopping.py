"""What a signal does to a rank: the first one is a request, the second one ends it, also while it waits in C code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_megatron.config import TrainerConfig
from grpo_megatron.training.stopping import Cadence

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


def test_the_second_signal_ends_a_rank_that_waits() -> None:
    process = rank("collective")
    process.send_signal(signal.SIGUSR1)
    assert process.stderr is not None and process.stderr.readline().startswith("SIGUSR1: ")
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130
    process.communicate()


def test_a_signal_ends_a_rank_of_a_lost_run() -> None:
    """torchrun's agent sends SIGTERM to the other ranks when one has died."""
    process = rank("lost")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (143, "")


def test_under_slurm_sigterm_leaves_a_limited_time() -> None:
    """SIGTERM of a step that cannot be finished: the rank ends before Slurm kills the batch script, too."""
    process = rank("collective", GRPO_MEGATRON_TERM_SECONDS="0.1")
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 143
    process.communicate()


# -- The step numbers of outer iterations. What the trainer does at them is in test_trainer.py -------------------------


@pytest.mark.parametrize(
    ("iteration_steps", "starts", "renewals", "learning"),
    [
        (3, [0, 0, 0, 3, 3, 3], [3], [2, 5]),
        (1, [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        (None, [0] * 6, [], []),
    ],
)
def test_outer_iterations(
    iteration_steps: int | None, starts: list[int], renewals: list[int], learning: list[int]
) -> None:
    cadence = Cadence(TrainerConfig(), iteration_steps)
    assert [cadence.iteration_start(step) for step in range(6)] == starts
    assert [step for step in range(6) if cadence.renews_reference_before(step)] == renewals
    assert [step for step in range(6) if cadence.reward_model_learns_after(step)] == learning
