"""Mixture: the prompts of several sources in one run, drawn by weights that hold for every stretch of the run.

Source k gets the share w_k / sum(w) of the prompts. The draws at cursors 0, 1, 2, ... are dealt out in whole numbers: of the
first c draws, source 1 has floor(c w_1 / W); of the c' = c - floor(c w_1 / W) others, source 2 has floor(c' w_2 / (W - w_1));
and so on. So each source is spread evenly over every batch, and is never a whole draw per source away from its share. The
source of a draw and its place among the source's own draws follow from the cursor alone: no state, and the same in every
layout. Each source has its own epochs, shuffled by data.seed and its name.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import overload

from grpo_megatron.data.item_table import one_of_each
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.types import Prompt


@dataclass(frozen=True)
class SourcePrompts:
    """The prompts of one source. `weight`: relative to those of the others."""

    name: str
    prompts: Sequence[Prompt]
    weight: float


class Mixture(Sequence[Prompt]):
    """The prompts of all sources, one source after the other."""

    def __init__(self, sources: Sequence[SourcePrompts]) -> None:
        self.sources = list(sources)
        self._ends = list(itertools.accumulate(len(source.prompts) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        source = bisect.bisect_right(self._ends, index)
        prompts = self.sources[source].prompts
        return prompts[index - (self._ends[source] - len(prompts))]

    def first(self, source: int) -> int:
        """The index of the first prompt of a source."""
        return self._ends[source] - len(self.sources[source].prompts)

    def one_of_each(self) -> list[Prompt]:
        """As of each source's table."""
        return [prompt for source in self.sources for prompt in one_of_each(source.prompts)]


class MixedSampler(Sampler[Prompt]):
    """Draws from a Mixture: see the header."""

    def __init__(self, mixture: Mixture, batch_size: int, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(mixture, batch_size, shuffle, seed)
        self.mixture = mixture
        self.weights = whole_weights([source.weight for source in mixture.sources])
        self.samplers = [Sampler(s.prompts, batch_size, shuffle, f"{seed}/{s.name}") for s in mixture.sources]

    def index_at(self, cursor: int) -> int:
        source, place = self.source_at(cursor)
        return self.mixture.first(source) + self.samplers[source].index_at(place)

    def source_at(self, cursor: int) -> tuple[int, int]:
        """(source, place among its own draws) of a draw."""
        left = sum(self.weights)
        for source, weight in enumerate(self.weights):
            before = cursor * weight // left
            if (cursor + 1) * weight // left > before:
                return source, before
            cursor, left = cursor - before, left - weight
        raise AssertionError("the last source takes every draw that is left")


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Integers in exactly the same proportion as the decimals that were written: 0.1 is 1/10."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]
