"""The host side of a step is linear: counted in calls, Python's and C's, and in bytes that are held at once; no clock.

`tools/benchmarks/scale.py` simulates what one rank of a large world computes. With 8 times the ranks a phase may take 8 times the
calls at most (the metrics, which every rank sends), and with 4 times the samples 4 times; 15 % are for the rest. An exchange that
loops over ranks x rows takes 64 times as many with 8 times both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tools.benchmarks.scale import PHASES, SimulatedStep

SIZES = [(64, 2048), (512, 2048), (64, 8192)]


@pytest.fixture(scope="module")
def steps() -> dict[tuple[int, int], Any]:
    return {size: SimulatedStep(*size) for size in SIZES}


def calls(action: Callable[[], object]) -> int:
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("phase", PHASES)
def test_calls_grow_no_faster_than_ranks_and_samples(phase: str, steps: dict[tuple[int, int], Any]) -> None:
    one, more_ranks, more_samples = (calls(getattr(steps[size], PHASES[phase])) for size in SIZES)
    assert more_ranks <= 8 * 1.15 * one
    assert more_samples <= 4 * 1.15 * one


def test_memory_grows_with_the_samples_and_is_small(steps: dict[tuple[int, int], Any]) -> None:
    """A row of the table and of the plan takes less than 1 KiB, on every rank."""
    for (_, samples), step in steps.items():
        for phase in ("gather", "plan", "exchange", "dynamic sampling"):
            assert step.measured(phase)[1] * 2**20 < 1024 * samples, phase
