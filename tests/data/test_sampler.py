"""The sampler's promises: every item once per epoch, over batch borders, as a pure function of seed and step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.data.sampler import (
    RESOLUTION,
    MixedSampler,
    Mixture,
    Sampler,
    SourcePrompts,
    WeightedSampler,
    integer_weights,
    systematic_counts,
    whole_weights,
)

sizes = st.integers(1, 40)


@given(size=sizes, batch_size=st.integers(1, 100), seed=st.integers(0, 5), shuffle=st.booleans())
def test_every_item_comes_once_per_epoch(size: int, batch_size: int, seed: int, shuffle: bool) -> None:
    sampler = Sampler(range(size), batch_size, shuffle, seed)
    steps = -(-3 * size // batch_size)  # the first three epochs
    stream = [item for step in range(steps) for item in sampler.batch(step)]
    epochs = [stream[start : start + size] for start in range(0, 3 * size, size)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(size))
    if not shuffle:
        assert epochs[0] == epochs[1] == list(range(size))


@given(steps=st.lists(st.integers(0, 1000), min_size=1, max_size=5), batch_size=st.integers(1, 12))
def test_a_batch_depends_only_on_the_step(steps: list[int], batch_size: int) -> None:
    """In any order of the steps, and over the borders of epochs."""
    weights = [5, 1, 0, 2, 2, 9, 1]
    for make in (
        lambda: Sampler(range(7), batch_size, seed=1),
        lambda: WeightedSampler(range(7), weights, batch_size, seed=1),
    ):
        used = make()
        assert [used.batch(step) for step in steps] == [make().batch(step) for step in steps]


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    """Equal weights draw every item once per epoch, too."""
    orders = {tuple(Sampler(range(50), 50, seed=seed).batch(epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    weighted = WeightedSampler(range(20), [0.3] * 20, 20, seed=1)
    orders = {tuple(weighted.batch(epoch)) for epoch in range(4)}
    assert len(orders) == 4 and all(sorted(order) == list(range(20)) for order in orders)


def test_the_order_is_the_same_on_every_machine_and_python() -> None:
    """Recorded once; a change here changes every run and breaks resuming across versions."""
    assert Sampler(range(10), 12, seed=42).batch(0) == [7, 8, 2, 5, 0, 6, 3, 4, 9, 1, 7, 1]
    weighted = WeightedSampler(range(6), [0, 1, 1, 2, 4, 0.5], 12, seed=42)
    assert weighted.batch(0) == [3, 4, 4, 1, 2, 4, 5, 3, 1, 4, 2, 4]


def test_progress_and_nothing_to_draw_from() -> None:
    with pytest.raises(ValueError, match="cannot make batches of 4 from 0 items"):
        Sampler([], 4)
    with pytest.raises(ValueError, match="step -1 is negative"):
        Sampler([1], 4).batch(-1)
    assert Sampler(range(10), 5).epoch(3) == 1.5


# -- Draws in proportion to weights: exact averages, counts within one of them, and a pure function of seed and step --


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


def test_small_weights_stay_above_zero() -> None:
    assert integer_weights([1.0, 1e-30, 0.0, 0.5]) == [RESOLUTION, 1, 0, RESOLUTION // 2]
    for wrong in ([0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0], [1.0, float("nan")], [float("inf")]):
        with pytest.raises(ValueError, match="weights must be finite numbers of 0 or more, and one of them above 0"):
            integer_weights(wrong)


# -- Sources are drawn by weight, and by the cursor alone --------------------------------------------------------------


def sampler(sizes: list[int], weights: list[float], **options: Any) -> MixedSampler:
    """The "prompts" are (source, number)."""
    sources = [
        SourcePrompts(f"s{k}", [(k, i) for i in range(size)], weight)  # type: ignore[misc]
        for k, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    return MixedSampler(Mixture(sources), 8, **options)


@settings(max_examples=30)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5), start=st.integers(0, 1000))
def test_each_stretch_has_the_share_of_each_source(weights: list[float], start: int) -> None:
    """floor of a share of what the sources before have left: at most one draw away per source before it, and one of its own."""
    drawn = sampler([7] * len(weights), weights)
    counts = Counter(drawn.source_at(cursor)[0] for cursor in range(start, start + 300))
    for source, weight in enumerate(weights):
        assert abs(counts[source] - 300 * weight / sum(weights)) <= 2 * (source + 1)


def test_each_source_has_epochs_of_its_own_and_nothing_depends_on_the_batches() -> None:
    drawn = sampler([5, 3, 40], [3, 1, 4])
    stream: list[Any] = drawn.items_from(0, 80)
    for source, size in ((0, 5), (1, 3), (2, 40)):
        own = [number for k, number in stream if k == source]
        assert len(own) == 80 * [3, 1, 4][source] // 8
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
    later = sampler([5, 3, 40], [3, 1, 4])  # a resumed run, with rounds of other sizes
    assert [item for start in range(50, 80, 5) for item in later.items_from(start, 5)] == stream[50:]
    assert sampler([5, 3, 40], [3, 1, 4], seed=1).items_from(0, 80) != stream
    # a source's own order stays when another source is added
    alone = [item for item in sampler([5, 9], [1, 1]).items_from(0, 20) if item[0] == 0]  # type: ignore[index]
    assert alone == [item for item in stream if item[0] == 0][:10]
    in_order = sampler([2, 2], [1, 1], shuffle=False).items_from(0, 6)
    assert in_order == [(1, 0), (0, 0), (1, 1), (0, 1), (1, 0), (0, 0)]


def test_shares_are_exact_for_decimals() -> None:
    """0.1 : 0.3 is 1 : 3, so every 4 draws have one of the first source; in binary fractions it would be late now and then."""
    assert whole_weights([0.1, 0.3, 2]) == [1, 3, 20]
    drawn = sampler([9, 9], [0.1, 0.3])
    assert all([k for k, _ in drawn.items_from(4 * n, 4)].count(0) == 1 for n in range(50))  # type: ignore[misc]
    mixture = sampler([2, 1], [1, 1]).mixture  # a mixture is a sequence
    assert list(mixture) == [(0, 0), (0, 1), (1, 0)] == mixture[:]
    with pytest.raises(IndexError):
        mixture[3]
