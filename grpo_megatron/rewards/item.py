"""RewardItem: one completion that a reward function is to grade, with all that the function may ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class RewardItem(NamedTuple):
    """`name` is the reward function's. Only what the function reads travels to its worker (signature.py)."""

    name: str
    completion: str  # with the `<think>` that the prompt has opened, if it has (format.py)
    answer: str  # the reference answer, as the task reads it from the row
    prompt: str = ""  # as the model reads it
    messages: Sequence[Mapping[str, Any]] | None = None  # the chat that was rendered; None: a plain text prompt
    columns: Mapping[str, Any] = {}  # the row of the data file
    data_source: str = ""
    completion_ids: Sequence[int] = ()  # tokens of the response
    step: int = 0  # the training step; validation: the step that follows; 0 where nothing is trained
    is_chat: bool = False  # TRL calls such a row conversational


ITEM_FIELDS = RewardItem._fields[1:]  # all but the name
ItemFields = dict[str, Any]  # the part of an item that a worker gets: field -> value


def as_item(item: RewardItem | tuple[Any, ...]) -> RewardItem:
    """`item`, which may be a shorter tuple: (name, completion, answer[, prompt ...])."""
    return item if isinstance(item, RewardItem) else RewardItem(*item)
