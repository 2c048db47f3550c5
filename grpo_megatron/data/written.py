"""WrittenResponse: a response that a data file gives, of one turn (text) or of several (chat messages), as token ids.

Several turns are made of the same pieces as a rollout (data/conversation.py): the assistant's texts, each with its
end-of-turn token, and between them the observations. So the same texts give the same tokens, written or generated. Only
the assistant's own tokens are in the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.conversation import TurnRenderer
from grpo_megatron.data.fields import Messages, Question, missing_field, read_question, text_field, type_name
from grpo_megatron.data.items import ItemTable, MappedTable, kept_items
from grpo_megatron.data.prompts import RowRenderer
from grpo_megatron.data.rendering import most_tokens
from grpo_megatron.data.rows import RowSet
from grpo_megatron.data.tasks import get_task
from grpo_megatron.types import Prompt, Turn

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
        """How many tokens are in the loss."""
        return sum(end - start for start, end in self.loss_spans)

    def loss_mask(self) -> list[int]:
        """One number per token: 1 for one in the loss."""
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


# -- Written groups: rows with responses as token ids, for supervised training, pairs and scalar heads -----------------
# As prompts (prompts.py), all rows are checked and measured before the run, and a group is made when it is read.

SupervisedExample = tuple[list[int], WrittenResponse]  # prompt ids, response
WrittenGroup = tuple[Question, list[Written], Sequence[Any]]  # a question, its responses, a reward (or labels) of each
OfflineGroup = tuple[Prompt, list[WrittenResponse], list[float]]  # a prompt, its responses, their rewards
Label = Callable[[WrittenResponse, Any], WrittenResponse]


def load_supervised(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    renderer: TurnRenderer | None = None,
    end_token_ids: Sequence[int] = (),
) -> Sequence[SupervisedExample]:
    """(prompt ids, response) of rows {"prompt", "response"} or {"messages"}, in order.

    Rows over data.max_prompt_length or data.max_response_length tokens are dropped or refused as in `load_prompts`.
    `renderer` is that of the rollouts, if they have several turns; `end_token_ids` those of `EndTokens`. Raises ConfigError.
    """
    groups = load_offline_groups(data, files, tokenizer, {"response": 1.0}, renderer, end_token_ids)
    return MappedTable(groups, lambda _, group: (list(group[0].prompt_ids), group[1][0]))


def load_offline_groups(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    fields: Mapping[str, float],
    renderer: TurnRenderer | None = None,
    end_token_ids: Sequence[int] = (),
) -> ItemTable[OfflineGroup]:
    """Prompts with responses from the file. A row has "prompt" and one response in each of `fields` (name -> reward).

    `fields` is {"response": 1.0} for supervised training, {"chosen": 1.0, "rejected": 0.0} for preferences. Otherwise as
    `load_supervised`.
    """
    rewards = list(fields.values())

    def read(row: dict[str, Any]) -> list[WrittenGroup]:
        return [(*read_written(row, list(fields)), rewards)]

    return load_written_groups(data, files, tokenizer, read, None, renderer, end_token_ids)


def load_written_groups(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    read: Callable[[dict[str, Any]], list[WrittenGroup]],
    label: Label | None,
    renderer: TurnRenderer | None = None,
    end_token_ids: Sequence[int] = (),
) -> ItemTable[OfflineGroup]:
    """As `load_offline_groups`. `read` makes any number of groups of a row; `label(response, reward)` completes a response.

    `label` may raise ValueError. With `label` the reward in the file may be anything; that of the group is then the mean label.
    """
    rows = RowSet(files, get_task(data.task).name)
    ends = tuple(sorted({tokenizer.eos_token_id, *end_token_ids}))
    reader = GroupReader(data, get_task(data.task), rows, tokenizer, renderer, read, label, ends)
    places: list[tuple[int, int]] = []
    fits: list[bool] = []
    for chunk in rows.parsed(read):
        written = [(number, group) for number, groups in chunk for group in groups]
        places += [(number, item) for number, groups in chunk for item in range(len(groups))]
        fits += reader.fit(written)
    what = f"rows exceed {data.max_prompt_length} prompt or {data.max_response_length} response tokens"
    kept = kept_items(data, np.array(fits, np.bool_), what, lambda number: f"row {number}", len(fits))
    found = np.array(places, np.int64)
    return ItemTable(reader.make, found if kept is None else found[kept], [0])


@dataclass(frozen=True)
class GroupReader(RowRenderer):
    """Makes the groups of a RowSet: the arguments of `load_written_groups`."""

    where = "row "
    read: Callable[[dict[str, Any]], list[WrittenGroup]]
    label: Label | None
    ends: Sequence[int]  # the tokens that end a response

    def fit(self, written: list[tuple[int, WrittenGroup]]) -> list[bool]:
        """Whether the prompt and all responses of each (row number, group) have at most the configured lengths, in tokens."""
        self.check_first([(number, group[0]) for number, group in written[:1]])
        unsure = [place for place, (_, group) in enumerate(written) if not self._certainly_fits(group)]
        groups = self.groups([written[place] for place in unsure])
        fits = [True] * len(written)
        for place, (prompt, responses, _) in zip(unsure, groups, strict=True):
            is_short = len(prompt.prompt_ids) <= self.data.max_prompt_length
            fits[place] = is_short and max(map(len, responses), default=0) <= self.data.max_response_length
        return fits

    def make(self, place: tuple[int, int]) -> OfflineGroup:
        """The group at (row number, number of the group in the row)."""
        number, item = map(int, place)
        return self.groups([(number, self.read(self.rows.row(number))[item])])[0]

    def _certainly_fits(self, group: WrittenGroup) -> bool:
        """By the bytes of its texts. Labels are checked by their tokens, and turns by their rendering."""
        question, responses, _ = group
        longest = self.data.max_response_length - 1  # the end-of-sequence token
        are_short = all(isinstance(one, str) and most_tokens(one) <= longest for one in responses)
        return self.label is None and are_short and self.bound.fits(question)

    def groups(self, written: list[tuple[int, WrittenGroup]]) -> list[OfflineGroup]:
        """The groups of (row number, group as written), in order. Raises ConfigError."""
        uids = [self.rows.uid(number) for number, _ in written]
        texts = [self.text(number, group[0]) for number, group in written]
        encoded = self.encode(texts)
        responses = iter(self._render_responses([one for _, (_, ones, _) in written for one in ones]))
        groups: list[OfflineGroup] = []
        for uid, (_, (_, ones, rewards)), text, ids in zip(uids, written, texts, encoded, strict=True):
            own = [next(responses) for _ in ones]
            if self.label is not None:
                try:
                    own = [self.label(one, reward) for one, reward in zip(own, rewards, strict=True)]
                except ValueError as error:
                    raise ConfigError(f"row {uid}: {error}") from error
                rewards = [sum(value for _, value in one.labels) / len(one.labels) for one in own]
            groups.append((Prompt(uid, tuple(ids), text, "", self.task.name, ""), own, list(rewards)))
        return groups

    def _render_responses(self, written: list[Written]) -> list[WrittenResponse]:
        """The responses in order. Turns end with the template's end of turn.

        A text gets the tokenizer's end-of-sequence token, unless an end token is its last one already.
        """
        tokenizer, renderer = self.tokenizer, self.renderer
        texts = [one for one in written if isinstance(one, str)]
        encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
        if len(texts) < len(written):
            if not self.data.apply_chat_template:
                raise ConfigError(
                    "responses of several turns are rendered by a chat template; set data.apply_chat_template=true"
                )
            renderer = renderer or TurnRenderer(tokenizer, where="rows with messages", end_token_ids=self.ends)
            roles = {message["role"] for one in written if not isinstance(one, str) for message in one}
            for role in sorted(roles - {"assistant"}):
                renderer.check(role)
        responses = []
        for one in written:
            if isinstance(one, str):
                ids = next(encoded)
                is_ended = bool(ids) and ids[-1] in self.ends
                responses.append(WrittenResponse(ids if is_ended else [*ids, tokenizer.eos_token_id]))
            else:
                assert renderer is not None
                responses.append(render_written(one, renderer))
        return responses
