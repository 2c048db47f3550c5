"""Sampler: which items step number s sees. A pure function of (seed, step), so a checkpoint needs only the step.

The items form an endless sequence of epochs. Epoch e has its own permutation, drawn from (seed, e). Step s takes the
items at cursors s * batch_size ... (s + 1) * batch_size - 1. A batch may span two epochs. Every item comes
exactly once per epoch; a batch holds an item twice only where two epochs meet in it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")


class Sampler(Generic[T]):
    """Batches of `batch_size` items; without `shuffle`, every epoch in file order. Raises ValueError without items."""

    def __init__(self, items: Sequence[T], batch_size: int, shuffle: bool = True, seed: int | str = 0) -> None:
        if not len(items) or batch_size < 1:
            raise ValueError(f"cannot draw batches of {batch_size} from {len(items)} items")
        self.items = items
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self._orders: dict[int, Sequence[int]] = {}  # epoch -> the indices of its items, in order

    def batch(self, step: int) -> list[T]:
        """The items of step number `step`, counted from 0."""
        if step < 0:
            raise ValueError(f"step {step} is negative")
        return self.items_from(step * self.batch_size, self.batch_size)

    def items_from(self, start: int, count: int) -> list[T]:
        """The items at cursors `start` ... `start + count - 1` of the endless sequence."""
        return [self.items[self.index_at(cursor)] for cursor in range(start, start + count)]

    def index_at(self, cursor: int) -> int:
        """The number of the item at a cursor of the endless sequence."""
        epoch, index = divmod(cursor, len(self.items))
        if not self.shuffle:
            return index
        if epoch not in self._orders:
            recent = {e: order for e, order in self._orders.items() if e == epoch - 1}  # a batch may span two epochs
            self._orders = {**recent, epoch: self._order_of(epoch)}
        return int(self._orders[epoch][index])

    def epoch(self, step: int) -> float:
        """Epochs that are complete when step number `step` begins, with the fraction of the current one."""
        return step * self.batch_size / len(self.items)

    def _order_of(self, epoch: int) -> Any:
        # Python keeps the sequence of random() after seed(str) over its versions; it does not promise that of shuffle()
        keys = random.Random(f"{self.seed}/{epoch}")
        drawn = np.fromiter((keys.random() for _ in range(len(self.items))), np.float64, len(self.items))
        return np.argsort(drawn, kind="stable").astype(np.uint32)  # 40 MB for 10 million items
