"""ItemTable: prompts or written groups of a RowSet, made from their row when they are read.

It holds numbers, and the KEPT items that were made last: the rows of a smaller data set are read once.

A row gives one item, or several (pairs of one prompt). Items that do not fit the configured lengths are not in the table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.row_set import RowSet
from grpo_megatron.types import Prompt

logger = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")
KEPT = 8192  # items; with their rows and tokens some 50 MB
ITEM_BITS = 20  # items per row: a million
Indices = np.ndarray[Any, np.dtype[np.int64]]
Make = Callable[[int, dict[str, Any], int], T]  # (row number, row, number of the item in the row) -> item


class ItemTable(Sequence[T]):
    """`places`: (row, item of the row) of each item as `row << ITEM_BITS | item`; None: one item for each of `count` rows.

    `first`: the number of an item of each kind, such as each reward, for checks that look at one of each.
    """

    def __init__(self, rows: RowSet, make: Make[T], places: Indices | None, count: int, first: Sequence[int]) -> None:
        self.rows, self._make, self._places, self._count, self._first = rows, make, places, count, first
        self._kept: dict[int, T] = {}  # oldest first

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        index %= self._count
        if index not in self._kept:
            row, item = (index, 0) if self._places is None else divmod(int(self._places[index]), 1 << ITEM_BITS)
            if len(self._kept) == KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[index] = self._make(row, self.rows.row(row), item)
        return self._kept[index]

    def one_of_each(self) -> list[T]:
        """An item of each kind, in the order of their first items."""
        return [self[index] for index in self._first]


class MappedTable(Sequence[U]):
    """`convert(number, item)` of each item of a table, when it is read."""

    def __init__(self, items: Sequence[T], convert: Callable[[int, T], U]) -> None:
        self._items, self._convert = items, convert

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> U: ...
    @overload
    def __getitem__(self, index: slice) -> list[U]: ...
    def __getitem__(self, index: int | slice) -> U | list[U]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._convert(index, self._items[index])


def kept_items(
    data: DataConfig, fits: np.ndarray[Any, np.dtype[np.bool_]], what: str, name: Callable[[int], str], measured: int
) -> Indices | None:
    """The numbers of the items that fit; None: all do. `name(number)` is for messages, `what` says what the others are.

    Raises ConfigError: none of the `measured` items fits, or some do not and data.filter_overlong_prompts is false.
    """
    dropped = len(fits) - int(fits.sum())
    if not dropped:
        return None
    message = f"{dropped} of {measured} {what} (the first: {name(int(np.argmin(fits)))})"
    if dropped == measured:
        raise ConfigError(f"{message}: nothing is left; raise data.max_prompt_length")
    if not data.filter_overlong_prompts:
        raise ConfigError(f"{message}; raise data.max_prompt_length, or set data.filter_overlong_prompts=true")
    logger.warning("%s and are dropped (data.filter_overlong_prompts)", message)
    return np.flatnonzero(fits)


def one_of_each(items: Sequence[T]) -> Sequence[T]:
    """The items that checks look at: one of each kind of an ItemTable or a Mixture, all of a list."""
    find = getattr(items, "one_of_each", None)
    found: Sequence[T] = items if find is None else find()
    return found


def rewards_of(prompts: Sequence[Prompt]) -> set[str]:
    """The names of the reward functions of all prompts."""
    return {prompt.reward for prompt in one_of_each(prompts)}
