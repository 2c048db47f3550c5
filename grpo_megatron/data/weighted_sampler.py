"""WeightedSampler: items in proportion to their weights. As Sampler, a pure function of (seed, step).

Kimi k1.5 (arXiv 2501.12599, "Sampling Strategies") samples problems "proportional to 1 - s_i", s_i being the success rate: with
replacement. So an epoch of N items is N draws, in which an item comes N * w_i / sum(w) times on average, several times
or not at all. Departure: the N draws are not independent. They are a systematic sample (Madow 1949), which has the same
averages and less noise: the number of times is that average, rounded up or down. With equal weights every item comes
exactly once.

Systematic sampling lays the items, in a random order, along a line, each as long as N times its weight. Points at
distance W = sum(w), the first at a random place below W, each draw the item on which they lie. Weights are integers here,
so that all of it is exact. Epoch e is drawn from (seed, e), then shuffled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from grpo_megatron.data.sampler import Sampler

T = TypeVar("T")
RESOLUTION = 1 << 24  # of the largest weight: smaller ones are rounded to a multiple of 1 / RESOLUTION of it


class WeightedSampler(Sampler[T]):
    """`weights`: one finite number >= 0 per item, not all 0. Raises ValueError for other weights."""

    def __init__(self, items: Sequence[T], weights: Sequence[float], batch_size: int, seed: int = 0) -> None:
        super().__init__(items, batch_size, shuffle=True, seed=seed)
        self.weights = integer_weights(weights)
        assert len(self.weights) == len(items)

    def _order_of(self, epoch: int) -> list[int]:
        return _draw_epoch(self.weights, self.seed, epoch)


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Proportional integers, the largest RESOLUTION. A weight above 0 stays above 0. Raises ValueError."""
    largest = max(weights, default=0.0)
    if not 0 < largest < float("inf") or not all(weight >= 0 for weight in weights):  # NaN fails both
        raise ValueError("weights must be finite numbers of 0 or more, and one of them above 0")
    return [max(1, round(weight / largest * RESOLUTION)) if weight else 0 for weight in weights]


def systematic_counts(weights: Sequence[int], start: int) -> list[int]:
    """How often each of N items is drawn by the N points start, start + W, ... with W = sum(weights) > start >= 0.

    Over all W values of `start`, the counts of item i sum to exactly N * weights[i]. So with a random `start` its count
    is N * weights[i] / W on average.
    """
    size, total = len(weights), sum(weights)
    counts, end, points = [], 0, 0
    for weight in weights:
        end += size * weight
        points_before, points = points, -((start - end) // total)  # points k * total + start below `end`
        counts.append(points - points_before)
    return counts


def _draw_epoch(weights: Sequence[int], seed: int | str, epoch: int) -> list[int]:
    # Of Python's random numbers, only the sequence of random() after seed(str) is promised to stay over versions
    keys = random.Random(f"{seed}/{epoch}/weighted")
    line = [index for _, index in sorted((keys.random(), index) for index in range(len(weights)))]
    total = sum(weights)
    counts = systematic_counts([weights[index] for index in line], min(int(keys.random() * total), total - 1))
    drawn = [index for index, count in zip(line, counts, strict=True) for _ in range(count)]
    return [index for _, _, index in sorted((keys.random(), place, index) for place, index in enumerate(drawn))]
