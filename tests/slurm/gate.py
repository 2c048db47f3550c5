"""A reward that holds a run back, so that a test decides at which step it interrupts the run. For worker processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.e2e.rewards import length_reward


def gated_reward(completion: str, answer: str, heartbeat: str, allowed: str) -> float:
    """`length_reward`, once the number of steps in the file `heartbeat` is below the number in the file `allowed`.

    In the checks of a launcher that joins a run, which has no RANK: at once.
    """
    while "RANK" in os.environ and _number(heartbeat) >= _number(allowed):
        time.sleep(0.05)
    return length_reward(completion, answer)


def slow_reward(completion: str, answer: str, seconds: float) -> float:
    """`length_reward` after a pause."""
    time.sleep(seconds)
    return length_reward(completion, answer)


def _number(path: str) -> int:
    file = Path(path)
    return int(file.read_text() or 0) if file.exists() else 0
