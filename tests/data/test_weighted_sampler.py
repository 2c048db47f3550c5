"""Draws in proportion to weights: exact averages, counts within one of them, and a pure function of seed and step."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.data.sampler import RESOLUTION, WeightedSampler, integer_weights, systematic_counts

some_weights = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


@given(weights=some_weights)
def test_over_all_starting_points_every_item_is_drawn_exactly_in_proportion(weights: list[int]) -> None:
    """Enumerated, not estimated: W starting points of N draws each, so item i comes N * w_i times in all."""
    size, total = len(weights), sum(weights)
    sums = [0] * size
    for start in range(total):
        counts = systematic_counts(weights, start)
        assert sum(counts) == size
        for item, (weight, count) in enumerate(zip(weights, counts, strict=True)):
            assert size * weight // total <= count <= -(-size * weight // total)  # the average, rounded down or up
            sums[item] += count
    assert sums == [size * weight for weight in weights]


@given(weights=some_weights, batch_size=st.integers(1, 12), seed=st.integers(0, 3))
def test_every_epoch_has_the_rounded_average_of_each_item(weights: list[int], batch_size: int, seed: int) -> None:
    size, total = len(weights), sum(weights)
    sampler = WeightedSampler(range(size), weights, batch_size, seed)
    stream = [item for step in range(-(-3 * size // batch_size)) for item in sampler.batch(step)]
    for epoch in range(3):
        counts = Counter(stream[epoch * size : (epoch + 1) * size])
        exact = [size * weight / total for weight in weights]
        assert all(abs(counts[item] - exact[item]) < 1 + 1e-6 for item in range(size))


def test_seeded_epochs_have_the_averages_of_the_weights() -> None:
    """4,000 epochs of 5 draws. A count's variance is below 1/4, so 0.04 is five standard errors of its mean."""
    weights = [0.0, 0.1, 0.2, 0.3, 0.4]
    drawn = Counter(WeightedSampler(range(5), weights, 5 * 4000, seed=7).batch(0))
    assert [drawn[item] / 4000 for item in range(5)] == pytest.approx([5 * weight for weight in weights], abs=0.04)
    assert drawn[0] == 0


def test_equal_weights_draw_every_item_once_per_epoch_in_new_orders() -> None:
    sampler = WeightedSampler(range(20), [0.3] * 20, 20, seed=1)
    epochs = [sampler.batch(step) for step in range(4)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


@given(steps=st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_a_weighted_batch_depends_only_on_the_step(steps: list[int]) -> None:
    """In any order of the steps, and over the borders of epochs: 3 draws of 7 items."""
    weights = [5, 1, 0, 2, 2, 9, 1]
    used = WeightedSampler(range(7), weights, 3, seed=1)
    assert [used.batch(step) for step in steps] == [
        WeightedSampler(range(7), weights, 3, seed=1).batch(step) for step in steps
    ]


def test_the_weighted_order_is_the_same_on_every_machine_and_python() -> None:
    """Recorded once; a change here changes every weighted run and breaks resuming across versions."""
    assert WeightedSampler(range(6), [0, 1, 1, 2, 4, 0.5], 12, seed=42).batch(0) == RECORDED


RECORDED = [3, 4, 4, 1, 2, 4, 5, 3, 1, 4, 2, 4]


def test_small_weights_stay_above_zero() -> None:
    assert integer_weights([1.0, 1e-30, 0.0, 0.5]) == [RESOLUTION, 1, 0, RESOLUTION // 2]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0], [1.0, float("nan")], [float("inf")]])
def test_weights_that_are_none(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be finite numbers of 0 or more, and one of them above 0"):
        integer_weights(weights)
