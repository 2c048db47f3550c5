"""Sources are drawn by weight: exactly in the long run, within one draw per source in every stretch, by the cursor alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.data.sampler import MixedSampler, Mixture, SourcePrompts, whole_weights


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


def test_a_mixture_is_a_sequence() -> None:
    mixture = sampler([2, 1], [1, 1]).mixture
    assert list(mixture) == [(0, 0), (0, 1), (1, 0)] == mixture[:]
    with pytest.raises(IndexError):
        mixture[3]
