"""Sequences of prompts or of written groups whose items are made when they are read. Only numbers are held for each item."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.types import Prompt

logger = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")
KEPT = 8192  # items; with their rows and tokens some 50 MB
Indices = np.ndarray[Any, np.dtype[np.int64]]


class LazySequence(Sequence[T]):
    """`item(index)` makes an item, for 0 <= index < len(self)."""

    def item(self, index: int) -> T:
        """Make an item."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self.item(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.item(index % len(self))


class ItemTable(LazySequence[T]):
    """`make(place)` for each of `places`. The KEPT items that were made last are held, so a small data set is read once.

    `first`: the number of an item of each kind, such as each reward, for checks that look at one of each.
    """

    def __init__(self, make: Callable[[Any], T], places: Sequence[Any] | Indices, first: Sequence[int]) -> None:
        self._make, self._places, self._first = make, places, first
        self._kept: dict[int, T] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._places)

    def item(self, index: int) -> T:
        if index not in self._kept:
            if len(self._kept) == KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[index] = self._make(self._places[index])
        return self._kept[index]

    def one_of_each(self) -> list[T]:
        """An item of each kind, in the order of their first items."""
        return [self[index] for index in self._first]


class MappedTable(LazySequence[U]):
    """`convert(number, item)` of each item of a table, when it is read."""

    def __init__(self, items: Sequence[T], convert: Callable[[int, T], U]) -> None:
        self._items, self._convert = items, convert

    def __len__(self) -> int:
        return len(self._items)

    def item(self, index: int) -> U:
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


def first_of_each(kinds: np.ndarray[Any, np.dtype[np.int8]]) -> list[int]:
    """The place of the first of each number from 0 on, in order. Without a copy: there may be millions."""
    return sorted(int(np.argmax(kinds == kind)) for kind in range(int(kinds.max()) + 1) if (kinds == kind).any())


def one_of_each(items: Sequence[T]) -> Sequence[T]:
    """The items that checks look at: one of each kind of an ItemTable or a Mixture, all of a list."""
    find = getattr(items, "one_of_each", None)
    found: Sequence[T] = items if find is None else find()
    return found


def rewards_of(prompts: Sequence[Prompt]) -> set[str]:
    """The names of the reward functions of all prompts."""
    return {prompt.reward for prompt in one_of_each(prompts)}
