"""Sampler: which items step number s sees. A pure function of (seed, step), so a checkpoint needs only the step.

The items form an endless sequence of epochs. Epoch e has its own permutation, drawn from (seed, e). Step s takes the
items at cursors s * batch_size ... (s + 1) * batch_size - 1. A batch may span two epochs. Every item comes
exactly once per epoch; a batch holds an item twice only where two epochs meet in it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Generic, TypeVar

T = TypeVar("T")


class Sampler(Generic[T]):
    """Batches of `batch_size` items; without `shuffle`, every epoch in file order. Raises ValueError without items."""

    def __init__(self, items: Sequence[T], batch_size: int, shuffle: bool = True, seed: int = 0) -> None:
        if not items or batch_size < 1:
            raise ValueError(f"cannot draw batches of {batch_size} from {len(items)} items")
        self.items = items
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed

    def batch(self, step: int) -> list[T]:
        """The items of step number `step`, counted from 0."""
        if step < 0:
            raise ValueError(f"step {step} is negative")
        return self.items_from(step * self.batch_size, self.batch_size)

    def items_from(self, start: int, count: int) -> list[T]:
        """The items at cursors `start` ... `start + count - 1` of the endless sequence."""
        return [self._item(cursor) for cursor in range(start, start + count)]

    def epoch(self, step: int) -> float:
        """Epochs that are complete when step number `step` begins, with the fraction of the current one."""
        return step * self.batch_size / len(self.items)

    def _item(self, cursor: int) -> T:
        epoch, index = divmod(cursor, len(self.items))
        if self.shuffle:
            index = _permutation(len(self.items), self.seed, epoch)[index]
        return self.items[index]


@lru_cache(maxsize=4)  # two epochs per batch at most, for two samplers: training and warmup
def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    # Python keeps the sequence of random() after seed(str) over its versions; it does not promise that of shuffle()
    keys = random.Random(f"{seed}/{epoch}")
    return [index for _, index in sorted((keys.random(), index) for index in range(size))]
