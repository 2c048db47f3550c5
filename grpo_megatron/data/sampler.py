"""Sampler: which items step number s sees. A pure function of (seed, step), so a checkpoint needs only the step.

The items form an endless sequence of epochs. Epoch e has its own permutation, a function of (seed, e). Step s takes the
items at cursors s * batch_size ... (s + 1) * batch_size - 1. A batch may span two epochs. Every item comes
exactly once per epoch; a batch has an item twice only where two epochs meet in it.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Generic, TypeVar, overload

import numpy as np

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.types import Prompt

logger = logging.getLogger(__name__)
T = TypeVar("T")
KEPT = 8192  # items of a table that stay in memory; with their rows and tokens some 50 MB
Indices = np.ndarray[Any, np.dtype[np.int64]]

# -- Items that are made when they are read ----------------------------------------------------------------------------


class LazySequence(Sequence[T]):
    """`make(index)` for 0 <= index < `length`. `first`: an item of each kind, such as each reward, for checks."""

    def __init__(self, length: int, make: Callable[[int], T], first: Sequence[int] = (0,)) -> None:
        self._length, self._make, self.first = length, make, first

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(self._length)[index]
        return self._make(places) if isinstance(places, int) else [self._make(place) for place in places]


def one_of_each(items: Sequence[T]) -> Sequence[T]:
    """Pick the items for checks: one of each kind of a LazySequence, all of a list."""
    return [items[index] for index in items.first] if isinstance(items, LazySequence) else items


def rewards_of(prompts: Sequence[Prompt]) -> set[str]:
    """Name the reward functions of all prompts."""
    return {prompt.reward for prompt in one_of_each(prompts)}


def keep_fitting(
    data: DataConfig,
    fits: np.ndarray[Any, np.dtype[np.bool_]],
    kinds: np.ndarray[Any, np.dtype[np.int8]],
    make: Callable[[int], T],
    what: str,
    name: Callable[[int], str],
    measured: int,
) -> LazySequence[T]:
    """Make the items of the numbers that `fits`. The latest KEPT stay in memory, so a small data set is read once.

    `kinds` has the kind of each number. `name(number)` is for messages, `what` says what the others are. Raises ConfigError:
    none of the `measured` items fits, or some do not and data.filter_overlong_prompts is false.
    """
    make = lru_cache(KEPT)(make)
    dropped = len(fits) - int(fits.sum())
    if not dropped:
        return LazySequence(len(fits), make, _first_of_each(kinds))
    message = f"{dropped} of {measured} {what} (the first: {name(int(np.argmin(fits)))})"
    if dropped == measured:
        raise ConfigError(f"{message}: nothing is left; raise data.max_prompt_length")
    if not data.filter_overlong_prompts:
        raise ConfigError(f"{message}; raise data.max_prompt_length, or set data.filter_overlong_prompts=true")
    logger.warning("%s and are dropped (data.filter_overlong_prompts)", message)
    numbers = np.flatnonzero(fits)
    return LazySequence(len(numbers), lambda index: make(int(numbers[index])), _first_of_each(kinds[numbers]))


def _first_of_each(kinds: np.ndarray[Any, np.dtype[np.int8]]) -> list[int]:
    """Find the place of the first of each number from 0 on, in order. Without a copy: there may be millions."""
    return sorted(int(np.argmax(kinds == kind)) for kind in range(int(kinds.max()) + 1) if (kinds == kind).any())


# -- Sampler -----------------------------------------------------------------------------------------------------------


class Sampler(Generic[T]):
    """Batches of `batch_size` items; without `shuffle`, every epoch in file order. Raises ValueError without items."""

    def __init__(self, items: Sequence[T], batch_size: int, shuffle: bool = True, seed: int | str = 0) -> None:
        if not len(items) or batch_size < 1:
            raise ValueError(f"cannot make batches of {batch_size} from {len(items)} items")
        self.items = items
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self._orders: dict[int, Sequence[int]] = {}  # epoch -> the indices of its items, in order

    def batch(self, step: int) -> list[T]:
        """Pick the items of step number `step`, counted from 0."""
        if step < 0:
            raise ValueError(f"step {step} is negative")
        return self.items_from(step * self.batch_size, self.batch_size)

    def items_from(self, start: int, count: int) -> list[T]:
        """Pick the items at cursors `start` ... `start + count - 1` of the endless sequence."""
        return [self.items[self.index_at(cursor)] for cursor in range(start, start + count)]

    def index_at(self, cursor: int) -> int:
        """Find the number of the item at a cursor of the endless sequence."""
        epoch, index = divmod(cursor, len(self.items))
        if not self.shuffle:
            return index
        if epoch not in self._orders:
            recent = {e: order for e, order in self._orders.items() if e == epoch - 1}  # a batch may span two epochs
            self._orders = {**recent, epoch: self._order_of(epoch)}
        return int(self._orders[epoch][index])

    def epoch(self, step: int) -> float:
        """Count the epochs that are complete when step number `step` begins, with the fraction of the current one."""
        return step * self.batch_size / len(self.items)

    def _order_of(self, epoch: int) -> Any:
        # Python keeps the sequence of random() after seed(str) over its versions; it does not promise that of shuffle()
        keys = random.Random(f"{self.seed}/{epoch}")
        numbers = np.fromiter((keys.random() for _ in range(len(self.items))), np.float64, len(self.items))
        return np.argsort(numbers, kind="stable").astype(np.uint32)  # 40 MB for 10 million items


# -- Sampling in proportion to weights ---------------------------------------------------------------------------------
# Kimi k1.5 (arXiv 2501.12599, "Sampling Strategies") samples problems "proportional to 1 - s_i", s_i being the success rate: with
# replacement. So an epoch of N items is N samples, in which an item comes N * w_i / sum(w) times on average, several times
# or not at all. Departure: the N samples are not independent. They are a systematic sample (Madow 1949), which has the same
# averages and less noise: the number of times is that average, rounded up or down. With equal weights every item comes
# exactly once.
#
# Systematic sampling lays the items, in a random order, along a line, each as long as N times its weight. Points at
# distance W = sum(w), the first at a random place below W, each pick the item on which they lie. Weights are integers here,
# so that all of it is exact. Epoch e depends on (seed, e) only, and is shuffled.

RESOLUTION = 1 << 24  # of the largest weight: smaller ones are rounded to a multiple of 1 / RESOLUTION of it


class WeightedSampler(Sampler[T]):
    """`weights`: one finite number >= 0 per item, not all 0. Raises ValueError for other weights."""

    def __init__(self, items: Sequence[T], weights: Sequence[float], batch_size: int, seed: int = 0) -> None:
        super().__init__(items, batch_size, shuffle=True, seed=seed)
        self.weights = integer_weights(weights)
        assert len(self.weights) == len(items)

    def _order_of(self, epoch: int) -> list[int]:
        return _sample_epoch(self.weights, self.seed, epoch)


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Scale to integers, the largest RESOLUTION. A weight above 0 stays above 0. Raises ValueError."""
    largest = max(weights, default=0.0)
    if not 0 < largest < float("inf") or not all(weight >= 0 for weight in weights):  # NaN fails both
        raise ValueError("weights must be finite numbers of 0 or more, and one of them above 0")
    return [max(1, round(weight / largest * RESOLUTION)) if weight else 0 for weight in weights]


def systematic_counts(weights: Sequence[int], start: int) -> list[int]:
    """Count how often each of N items is sampled by the N points start, start + W, ... with W = sum(weights) > start >= 0.

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


def _sample_epoch(weights: Sequence[int], seed: int | str, epoch: int) -> list[int]:
    # Of Python's random numbers, only the sequence of random() after seed(str) is promised to stay over versions
    keys = random.Random(f"{seed}/{epoch}/weighted")
    line = [index for _, index in sorted((keys.random(), index) for index in range(len(weights)))]
    total = sum(weights)
    counts = systematic_counts([weights[index] for index in line], min(int(keys.random() * total), total - 1))
    chosen = [index for index, count in zip(line, counts, strict=True) for _ in range(count)]
    return [index for _, _, index in sorted((keys.random(), place, index) for place, index in enumerate(chosen))]


# -- Mixture of several sources ----------------------------------------------------------------------------------------
# Source k gets the share w_k / W, W = sum(w), of every stretch of the run. Cursors are dealt out in whole numbers: of the
# first c cursors, source 1 has floor(c w_1 / W); of the c' = c - floor(c w_1 / W) others, source 2 has floor(c' w_2 / (W - w_1));
# and so on. So each source is spread evenly over every batch, and is never a full prompt per source away from its share. The
# source of a cursor, and its place in the source, follow from the cursor alone: no state, and the same in every layout.
# Each source has its own epochs, shuffled by data.seed and its name.


@dataclass(frozen=True)
class SourcePrompts:
    """The prompts of one source. `weight`: relative to those of the others."""

    name: str
    prompts: Sequence[Prompt]
    weight: float


class Mixture(LazySequence[Prompt]):
    """The prompts of all sources, one source after the other. `starts`: the index of the first prompt of each."""

    def __init__(self, sources: Sequence[SourcePrompts]) -> None:
        self.sources = list(sources)
        *self.starts, length = itertools.accumulate((len(source.prompts) for source in sources), initial=0)
        tables = [source.prompts for source in sources]
        first = [
            start + index
            for start, table in zip(self.starts, tables, strict=True)
            for index in (table.first if isinstance(table, LazySequence) else range(len(table)))
        ]
        super().__init__(length, self._prompt, first)

    def _prompt(self, index: int) -> Prompt:
        source = bisect.bisect_right(self.starts, index) - 1
        return self.sources[source].prompts[index - self.starts[source]]


class MixedSampler(Sampler[Prompt]):
    """A sampler of a Mixture, by the weights of its sources."""

    def __init__(self, mixture: Mixture, batch_size: int, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(mixture, batch_size, shuffle, seed)
        self.mixture = mixture
        self.weights = whole_weights([source.weight for source in mixture.sources])
        self.samplers = [Sampler(s.prompts, batch_size, shuffle, f"{seed}/{s.name}") for s in mixture.sources]

    def index_at(self, cursor: int) -> int:
        source, place = self.source_at(cursor)
        return self.mixture.starts[source] + self.samplers[source].index_at(place)

    def source_at(self, cursor: int) -> tuple[int, int]:
        """Find (source, place among its samples) of a sample."""
        left = sum(self.weights)
        for source, weight in enumerate(self.weights):
            before = cursor * weight // left
            if (cursor + 1) * weight // left > before:
                return source, before
            cursor, left = cursor - before, left - weight
        raise AssertionError("the last source takes every cursor that is left")


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Scale to integers in exactly the same proportion as the decimals that were written: 0.1 is 1/10."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]
