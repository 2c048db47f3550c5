"""ItemQueue: the items of a batch that no worker has, in order, and which of them are next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from grpo_megatron.rewards.workers.calls import CallPlan


class ItemQueue:
    """Items are numbers. False when it is empty."""

    def __init__(self, plan: CallPlan) -> None:
        self._plan = plan
        self._waiting: deque[int] = deque()
        self._names: dict[int, str] = {}  # item -> its reward
        self._alone: set[int] = set()  # graded one by one, after a call of several that was not finished

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, number: int, name: str) -> None:
        """Behind all others."""
        self._waiting.append(number)
        self._names[number] = name

    def put_back(self, numbers: Sequence[int], *, one_by_one: bool = False) -> None:
        """In front of all others, in this order. `one_by_one`: each in a call of its own."""
        self._waiting.extendleft(reversed(numbers))
        if one_by_one:
            self._alone.update(numbers)

    def take(self, num_free: int, *, all_are_there: bool) -> list[int]:
        """The items of the next call; none where nothing is to be called now.

        `num_free`: workers without a call, of which the next one gets this. With none of them, the call is to wait in a
        worker's pipe: only one of a single item does. `all_are_there`: no more items will be added.
        """
        for place, number in enumerate(self._waiting):
            name = self._names[number]
            if number in self._alone or not self._plan.shares_calls(name):
                del self._waiting[place]
                return [number]
            if num_free and (all_are_there or not self._plan.compares(name)):
                return self._take_several(name, num_free)
        return []

    def _take_several(self, name: str, num_free: int) -> list[int]:
        same = [number for number in self._waiting if self._names[number] == name and number not in self._alone]
        taken = same[: self._plan.call_size(name, len(same), num_free)]
        gone = set(taken)
        self._waiting = deque(number for number in self._waiting if number not in gone)
        return taken
