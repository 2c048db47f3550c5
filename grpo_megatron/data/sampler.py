"""Sampler: which items step number s sees. A pure function of (seed, step), so a checkpoint needs the step only.

The items are passed over again and again; pass (epoch) e has its own permutation, drawn from (seed, e). Step s takes
positions s * batch_size ... (s + 1) * batch_size - 1 of that endless sequence: batches run across the borders of
epochs, every item comes exactly once an epoch, and twice in one batch only where two epochs meet in it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Generic, TypeVar

T = TypeVar("T")


class Sampler(Generic[T]):
    """Batches of `batch_size` items; every epoch in file order without `shuffle`. Raises ValueError without items."""

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
        """The items at positions `start` ... `start + count - 1` of the endless sequence."""
        return [self._item(position) for position in range(start, start + count)]

    def epoch(self, step: int) -> float:
        """Passes over the items that are complete when step number `step` begins."""
        return step * self.batch_size / len(self.items)

    def _item(self, position: int) -> T:
        epoch, offset = divmod(position, len(self.items))
        return self.items[_permutation(len(self.items), self.seed, epoch)[offset] if self.shuffle else offset]


@lru_cache(maxsize=4)  # two epochs meet in a batch, and training and the warm-up have a sampler each
def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    # random() after seed(str) is what the random module promises to keep over Python versions; shuffle() is not
    keys = random.Random(f"{seed}/{epoch}")
    return [index for _, index in sorted((keys.random(), index) for index in range(size))]
