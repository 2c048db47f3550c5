"""Dynamic sampling and replay over real ranks that each hold half of every group."""

from __future__ import annotations

from typing import Any

import pytest

from tests import worlds
from tests.sampling import collecting

MIXED, EQUAL = (1.0, 0.0), (1.0, 1.0)  # rewards of an informative group, and of one that is not


def prompts(step: Any) -> list[int]:
    """The prompts of a step, in order of their places; every group is whole."""
    samples, _ = step
    places = sorted({place for place, *_ in samples})
    assert places == list(range(len(places)))
    assert all(sorted(i for p, _, i, _ in samples if p == place) == [0, 1] for place in places)
    return [next(prompt for p, prompt, _, _ in samples if p == place) for place in places]


@pytest.mark.parametrize("resume_at", [None, 1, 2])
def test_dynamic_sampling_fills_the_batch_and_loses_nothing(resume_at: int | None) -> None:
    # Of six prompts 0, 3 and 4 are informative. Rounds of three bring {0}, {3, 4}, {6}, {9, 10}, ... A batch of two takes
    # two rounds and leaves one group for the next step.
    script = [MIXED, EQUAL, EQUAL, MIXED, MIXED, EQUAL]
    results = worlds.run(collecting.collect, 2, kind="dynamic", script=script, counts=[2, 2, 2], resume_at=resume_at)
    steps = results[0]
    assert steps == results[1]
    assert [prompts(step) for step in steps] == [[0, 3], [4, 6], [9, 10]]
    assert [metrics["train/num_gen_batches"] for _, metrics in steps] == [2, 1, 1]
    assert [metrics["train/left_over_staleness_max"] for _, metrics in steps] == [0, 1, 0]
    assert {version for place, _, _, version in steps[1][0] if place == 0} == {0}  # left over from step 0


@pytest.mark.parametrize("resume_at", [None, 2])
def test_replay_is_bounded_in_share_size_and_age(resume_at: int | None) -> None:
    # Batches of four; groups 0, 2, 4, ... are informative. Half of a batch may be old, the oldest first, each once.
    script = [MIXED, EQUAL]
    steps = worlds.run(collecting.collect, 2, kind="replay", script=script, counts=[4] * 4, resume_at=resume_at)[0]
    assert [prompts(step) for step in steps] == [[0, 1, 2, 3], [0, 2, 4, 5], [4, 6, 7, 8], [6, 8, 9, 10]]
    assert [metrics["train/replayed_groups"] for _, metrics in steps] == [0, 2, 1, 2]
    assert all(metrics["train/replay_staleness_max"] <= 2 for _, metrics in steps)
