"""WrittenResponse: a response that a data file gives, of one turn (text) or of several (chat messages), as token ids.

Several turns are made of the same pieces as a rollout (data/conversation.py): the assistant's texts, each with its
end-of-turn token, and between them the observations. So the same texts give the same tokens, written or generated. Only
the assistant's own tokens are in the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.data.conversation import TurnRenderer
from grpo_megatron.data.rows import Messages, Question, missing_field, read_question, text_field, type_name
from grpo_megatron.types import Turn

Written = str | Messages  # a response in a data file


@dataclass(frozen=True)
class WrittenResponse:
    """Token ids with the end-of-sequence token. `turns` is empty if the assistant wrote all of it.

    `labels`: (token, label) where a scalar head is trained (data/scored.py). Then only these tokens are in the loss.
    """

    ids: list[int]
    turns: list[Turn] = field(default_factory=list)
    labels: list[tuple[int, float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def loss_spans(self) -> list[tuple[int, int]]:
        """The tokens [start, end) that the assistant wrote, or those with a label."""
        if self.labels:
            return [(token, token + 1) for token, _ in self.labels]
        if not self.turns:
            return [(0, len(self.ids))]
        return [(turn.start, turn.end) for turn in self.turns if turn.kind == "assistant"]

    @property
    def num_loss_tokens(self) -> int:
        return sum(end - start for start, end in self.loss_spans)

    def loss_mask(self) -> list[int]:
        mask = [0] * len(self.ids)
        for start, end in self.loss_spans:
            mask[start:end] = [1] * (end - start)
        return mask


def read_written(row: dict[str, Any], fields: Sequence[str]) -> tuple[Question, list[Written]]:
    """The question and the responses of a row.

    A row has "prompt" and the named fields, each a text or a list of messages that begins and ends with the assistant's
    turn. Where the only field is "response", it may have "messages" instead: the whole conversation. Raises ValueError.
    """
    if list(fields) == ["response"] and "messages" in row:
        messages = _read_messages(row, "messages")
        start = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
        if not start:
            raise ValueError("field 'messages' must have a question, and then a turn of the assistant")
        question = read_question({"messages": messages[:start]}, "messages")
        return question, [_check_turns(messages[start:], "messages")]
    if list(fields) == ["response"] and "response" not in row and "prompt" not in row:
        raise missing_field(["prompt", "messages"], row)
    question = read_question(row)
    return question, [
        _check_turns(_read_messages(row, name), name) if isinstance(row.get(name), list) else text_field(row, name)
        for name in fields
    ]


def render_written(messages: Sequence[Mapping[str, Any]], renderer: TurnRenderer) -> WrittenResponse:
    """The tokens of turns that begin and end with the assistant's. Raises ConfigError when the template fails."""
    ids: list[int] = []
    turns: list[Turn] = []
    for is_assistant, run in itertools.groupby(messages, key=lambda message: message["role"] == "assistant"):
        start, answers = len(ids), list(run)
        if is_assistant:
            ids += _generated(renderer, answers[0])
        else:
            ids += renderer.observation(answers, ended_with_eos=True)
        turns.append(Turn(start, len(ids), "assistant" if is_assistant else "observation", version=0, clock=0))
    return WrittenResponse(ids, turns)


def _generated(renderer: TurnRenderer, message: Mapping[str, Any]) -> list[int]:
    """The tokens that the model should generate for an assistant message."""
    text, end = renderer.assistant_text(message), renderer.end_of_turn
    ids: list[int] = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids if ids[-1:] == [end] else [*ids, end]


def _read_messages(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    messages = row[name]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"field {name!r} must be a list of messages, not {type_name(messages)}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"field {name!r}: message {number} must be an object with role and content")
        calls = message.get("tool_calls")
        if not isinstance(message.get("content"), str) and not (calls and message.get("content") is None):
            raise ValueError(f"field {name!r}: message {number} has no content (a text), nor tool_calls")
        if calls and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
            raise ValueError(
                f'field {name!r}: tool_calls of message {number} must be a list of {{"function": {{"name", "arguments"}}}}'
            )
    return messages


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function


def _check_turns(messages: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    roles = [message["role"] for message in messages]
    if roles[0] != "assistant" or roles[-1] != "assistant":
        raise ValueError(f"field {name!r}: the response begins or ends with a message of role {roles[-1]!r}")
    if any(first == second == "assistant" for first, second in itertools.pairwise(roles)):
        raise ValueError(f"field {name!r} has two turns of the assistant without a message between them")
    return messages
