"""Sampler: which items step number s sees. A pure function of (seed, step), so a checkpoint needs only the step.

The items form an endless sequence of epochs. Epoch e has its own permutation, a function of (seed, e). Step s takes the
items at cursors s * batch_size ... (s + 1) * batch_size - 1. A batch may span two epochs. Every item comes
exactly once per epoch; a batch has an item twice only where two epochs meet in it.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

from grpo_megatron.config import ConfigError, DataConfig, SamplingConfig
from grpo_megatron.data.rows import missing_field, problem_digest, read_question, read_rows, text_field, type_name
from grpo_megatron.types import Prompt

logger = logging.getLogger(__name__)
T = TypeVar("T")
SamplerState = dict[str, Any]
FirstRankShare = Callable[[Callable[[], Any]], Any]  # share(make): what `make` returns on rank 0, on every rank
KEPT = 8192  # items of a table that stay in memory; with their rows and tokens some 50 MB
Indices = np.ndarray[Any, np.dtype[np.int64]]


def alone(make: Callable[[], T]) -> T:
    """Return what `make` returns: the FirstRankShare of a process without other ranks."""
    return make()


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
        return self.items_from(step * self.batch_size, self.batch_size, step)

    def items_from(self, start: int, count: int, step: int = 0) -> list[T]:
        """Pick the items at cursors `start` ... `start + count - 1` of the endless sequence. `step`: that they are for."""
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
        return self.epoch_at(step * self.batch_size)

    def epoch_at(self, cursor: int) -> float:
        """Count the epochs before a cursor; 0 where a source has no end."""
        return cursor / len(self.items)

    def state(self) -> SamplerState:
        """Return what the cursor does not tell, as plain JSON: nothing here."""
        return {}

    def load_state(self, state: SamplerState) -> None:
        """Restore what `state` has returned."""

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
    """A sampler of a Mixture, by the weights of its sources. `streams`: the samplers of those that have no end, by name."""

    def __init__(
        self,
        mixture: Mixture,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        streams: Mapping[str, Sampler[Prompt]] | None = None,
    ) -> None:
        super().__init__(mixture, batch_size, shuffle, seed)
        self.mixture, self.streams = mixture, streams or {}
        self.weights = whole_weights([source.weight for source in mixture.sources])
        self.samplers = [
            self.streams.get(s.name) or Sampler(s.prompts, batch_size, shuffle, f"{seed}/{s.name}")
            for s in mixture.sources
        ]

    def items_from(self, start: int, count: int, step: int = 0) -> list[Prompt]:
        places = [self.source_at(cursor) for cursor in range(start, start + count)]
        taken = []
        for source, sampler in enumerate(self.samplers):  # the places of a source follow each other
            own = [place for k, place in places if k == source]
            taken.append(iter(sampler.items_from(own[0] if own else 0, len(own), step)))
        return [next(taken[source]) for source, _ in places]

    def epoch_at(self, cursor: int) -> float:
        return 0.0 if self.streams else super().epoch_at(cursor)

    def state(self) -> SamplerState:
        return {name: stream.state() for name, stream in self.streams.items()}

    def load_state(self, state: SamplerState) -> None:
        for name, stream in self.streams.items():
            stream.load_state(state[name])

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


# -- Pass rates: the share of right responses per problem, measured before training, and what they select --------------
# A file of pass rates has rows {"question", "answer", "rate"}, and "weight" for data.sampling.weight=file. Other fields are
# not read. `grpo-megatron curate` writes such a file. Problems are found by question and reference answer, and by the names
# of their "images" ({"name"}, data/images.py).

PROMPT_WEIGHTS: dict[str, Callable[[float], float]] = {
    "uniform": lambda p: 1.0,
    "1-p": lambda p: 1.0 - p,
    "p(1-p)": lambda p: p * (1.0 - p),
}


@dataclass(frozen=True)
class Measured:
    """A row of a file of pass rates."""

    rate: float
    weight: float | None = None


def read_pass_rates(path: Path) -> dict[str, Measured]:
    """Read the rows of the file by `problem_digest`. Raises ConfigError."""
    rates: dict[str, Measured] = {}

    def parse(row: dict[str, Any]) -> None:
        images = row.get("images") or []
        if not (isinstance(images, list) and all(isinstance(one, dict) and "name" in one for one in images)):
            raise ValueError("field 'images' is no list of objects with the name of an image")
        digest = problem_digest(read_question(row, "question"), text_field(row, "answer", empty=True), images)
        if digest in rates:
            raise ValueError("has the question and the answer of an earlier row; keep one of them")
        rate = _number(row, "rate")
        if rate > 1:
            raise ValueError(f"field 'rate' is {rate:g}, and a pass rate is 0 to 1")
        rates[digest] = Measured(rate, _number(row, "weight") if "weight" in row else None)

    read_rows(path, parse)
    return rates


def _number(row: dict[str, Any], field: str) -> float:
    if field not in row:
        raise missing_field([field], row)
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"field {field!r} is {type_name(value)}, not a number")
    if not 0 <= value < math.inf:
        raise ValueError(f"field {field!r} is {value}, not a number of 0 or more")
    return float(value)


def select_prompts(prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Prompt]:
    """Select the prompts with a pass rate in the configured range, in order, and set `pass_rate` and `weight`.

    Raises ConfigError: an unreadable file, prompts that it lacks, no prompt in the range, or no weight above 0.
    """
    assert sampling.pass_rates is not None
    prompts = list(prompts)
    key = f"data.sampling.pass_rates={str(sampling.pass_rates)!r}"
    measured = _measured(prompts, sampling, key)
    low, high = sampling.min_pass_rate, sampling.max_pass_rate
    chosen = [(prompt, one) for prompt, one in zip(prompts, measured, strict=True) if low <= one.rate <= high]
    if len(chosen) < len(prompts):
        below, above = (sum(test(one.rate) for one in measured) for test in (lambda p: p < low, lambda p: p > high))
        count = f"{below} of {len(prompts)} prompts have a pass rate below {low:g}, and {above} above {high:g}"
        if not chosen:
            raise ConfigError(f"{key}: {count}: nothing is left; widen data.sampling.min_pass_rate to max_pass_rate")
        logger.warning("%s: they are left out (data.sampling)", count)
    weights = [_weight(one, sampling.weight) for _, one in chosen]
    mean = sum(weights) / len(weights)
    if mean == 0:
        raise ConfigError(
            f"{key}: data.sampling.weight={sampling.weight} is 0 for all {len(chosen)} prompts; set another weight, or"
            " narrow data.sampling.min_pass_rate to max_pass_rate"
        )
    share, selected = sampling.uniform_share, []
    for (prompt, one), weight in zip(chosen, weights, strict=True):
        selected.append(copy.copy(prompt))  # makes neither text nor tokens of a RowPrompt
        selected[-1].__dict__.update(pass_rate=one.rate, weight=(1 - share) * weight / mean + share)
    return selected


def _measured(prompts: Sequence[Prompt], sampling: SamplingConfig, key: str) -> list[Measured]:
    assert sampling.pass_rates is not None
    rates, default = read_pass_rates(sampling.pass_rates), sampling.default_pass_rate
    facts: list[Any] = [prompt.columns.get("images") or () for prompt in prompts]
    digests = [problem_digest(one.question, one.answer, images) for one, images in zip(prompts, facts, strict=True)]
    measured = [rates.get(digest) for digest in digests]
    if missing := [prompt.uid for prompt, one in zip(prompts, measured, strict=True) if one is None]:
        count = f"{key} lacks {len(missing)} of the {len(prompts)} prompts (the first: {missing[0]})"
        if sampling.weight == "file":
            raise ConfigError(f"{count}, and data.sampling.weight=file needs a weight for each; add them")
        if default is None:
            raise ConfigError(
                f"{count}; measure them, leave them out of data.train_files, or set data.sampling.default_pass_rate=0.5"
            )
    if sampling.weight == "file" and any(one is not None and one.weight is None for one in measured):
        raise ConfigError(f'{key}: data.sampling.weight=file needs a number "weight" in every row, and some have none')
    return [Measured(default or 0.0) if one is None else one for one in measured]


def _weight(measured: Measured, name: str) -> float:
    if measured.weight is not None and name == "file":
        return measured.weight
    return PROMPT_WEIGHTS[name](measured.rate)


Z = 1.959963984540054  # 97.5 % quantile of the normal distribution


def wilson(share: float, n: int) -> tuple[float, float]:
    """Compute Wilson's 95 % interval (1927, JASA 22:209) of a share of n > 0 trials: (low, high).

    Its ends are the shares p from which the observed one is z standard errors sqrt(p (1 - p) / n) away. It has a width at 0
    and at 100 %, too.
    """
    center, root = share + Z * Z / (2 * n), Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    scale = 1 + Z * Z / n
    return max(0.0, (center - root) / scale), min(1.0, (center + root) / scale)
