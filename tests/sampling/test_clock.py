"""The clock of two roles: which weights draw which step, against the rules written out."""

from __future__ import annotations

import pytest

from grpo_megatron.sampling.collector import Clock

STEPS = 9


@pytest.mark.parametrize("lag", range(5))
@pytest.mark.parametrize(("first", "old_lag"), [(0, 0), (3, 0), (3, 1), (3, 4), (7, 3), (9, 2)])
def test_each_step_is_drawn_once_by_the_weights_of_lag_steps_before(lag: int, first: int, old_lag: int) -> None:
    """A run of 9 steps goes on after `first` of them, of which `old_lag` more had been drawn."""
    drawn = min(STEPS, first + old_lag)
    clock = Clock(lag, first, drawn, STEPS)
    seen, trained = [], first
    for version in range(first, STEPS + 1):
        steps = clock.steps(version)
        seen += steps
        assert all(clock.version(step) == version == max(first, step - lag) for step in steps)
        if trained < STEPS and version > first:
            assert drawn > trained or trained in seen  # the step before `version` could be trained on
            trained += 1
    assert seen == [*range(drawn, STEPS)]


def test_without_a_lag_each_step_is_drawn_by_its_own_weights() -> None:
    assert [Clock().version(step) for step in range(4)] == [0, 1, 2, 3]
