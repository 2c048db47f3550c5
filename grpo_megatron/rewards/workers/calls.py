"""CallPlan: which items of a batch share one call of their reward, and what of them a worker gets."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import cached_property, reduce
from typing import Any

from grpo_megatron.rewards.composite import COMPOSITE
from grpo_megatron.rewards.item import ITEM_FIELDS, ItemFields, RewardItem
from grpo_megatron.rewards.reward import Kwargs, rewards
from grpo_megatron.rewards.signature import Reads, RewardSignature, read_signature


class CallPlan:
    """For the rewards of one batch: `kwargs` go to every function, `composite` to the sum of components."""

    def __init__(self, kwargs: Kwargs, composite: Kwargs) -> None:
        self._kwargs, self._composite = kwargs, composite
        self._rewards: dict[str, PlannedReward] = {}

    def kwargs(self, name: str) -> Kwargs:
        """The keyword arguments of a reward."""
        return self._composite if name == COMPOSITE else self._kwargs

    def shares_calls(self, name: str) -> bool:
        """Whether a call may have several items."""
        return self._of(name).size > 1 or self.compares(name)

    def compares(self, name: str) -> bool:
        """Whether one call has all items."""
        return self._of(name).facts.compares

    def call_size(self, name: str, num_items: int, num_free: int) -> int:
        """How many of `num_items` items the next of `num_free` free workers gets in one call."""
        if self.compares(name):
            return num_items
        return min(self._of(name).size, -(-num_items // max(1, num_free)))

    def sample(self, item: RewardItem) -> ItemFields:
        """What the worker gets of an item: completion, answer, and what the function reads."""
        reads = self._of(item.name).reads
        sample: ItemFields = {"completion": item.completion, "answer": item.answer}
        sample |= {name: getattr(item, name) for name in sorted(reads.fields)}
        columns = item.columns
        if reads.columns is not None:
            columns = {name: columns[name] for name in sorted(reads.columns) if name in columns}
        if columns:
            sample["columns"] = dict(columns)
        return sample

    def _of(self, name: str) -> PlannedReward:
        if name not in self._rewards:
            self._rewards[name] = PlannedReward(name, self.kwargs(name))
        return self._rewards[name]


class PlannedReward:
    """One reward, as its signature tells. This process imports no module for it, since an import may do anything.

    `check_reward` has imported it where a run was validated. Otherwise the function is called for one item at a time, with
    all that is known of it.
    """

    def __init__(self, name: str, kwargs: Kwargs) -> None:
        self.name, self.kwargs = name, kwargs
        self.facts = rewards.facts(name) if _is_imported(name) else rewards.defaults

    @cached_property
    def size(self) -> int:
        """The most items of one call."""
        signature = _signature(self.name)
        if signature is None:
            return 1
        is_shared = signature.takes_lists or inspect.iscoroutinefunction(rewards.get(self.name))
        return self.facts.batch_size if is_shared else 1

    @cached_property
    def reads(self) -> Reads:
        """What the function, or those of the components, read."""
        if self.name != COMPOSITE:
            return _reads(self.name, self.kwargs)
        parts: list[Mapping[str, Any]] = self.kwargs["components"]
        return reduce(Reads.joined, (_reads(part["function"], part["kwargs"]) for part in parts), Reads())


def _is_imported(name: str) -> bool:
    return ":" not in name or name.partition(":")[0] in sys.modules


def _signature(name: str) -> RewardSignature | None:
    try:
        return read_signature(rewards.get(name), batch=rewards.facts(name).batch) if _is_imported(name) else None
    except ValueError:  # its worker says why it cannot be called
        return None


def _reads(name: str, kwargs: Kwargs) -> Reads:
    signature = _signature(name)
    if signature is None:
        return Reads(frozenset(ITEM_FIELDS) - {"columns"}, None)
    facts = rewards.facts(name)
    reads = signature.reads(kwargs)
    fields = reads.fields | ({"prompt"} if facts.reads_prompt else set())
    return Reads(fields, reads.columns if facts.takes_columns else reads.columns or frozenset())
