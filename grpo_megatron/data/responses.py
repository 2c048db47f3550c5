"""Rows with responses: for supervised training, preferences, and models with a scalar head.

A response is a text, or chat messages of several turns. Turns are made of the same pieces as a rollout (TurnRenderer): the
assistant's texts, each with its end-of-turn token, and between them the observations. So the same texts give the same tokens,
written or generated. Only the assistant's own tokens are in the loss.

A row of plain text, for continued pre-training, has no prompt: all its tokens but the first are in the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.images import flat_message, has_images
from grpo_megatron.data.prompts import Decode, RowRenderer, image_format, most_tokens, step_ends
from grpo_megatron.data.rows import Messages, Question, RowSet, missing_field, read_question, text_field, type_name
from grpo_megatron.data.sampler import keep_fitting
from grpo_megatron.data.task import get_task
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.types import Prompt, Turn
from grpo_megatron.untrusted import cut, shown


class Tokens(tuple[int, ...]):
    """The token ids of a part of a plain text, as they are: no template, no further end token."""


Written = str | Messages | Tokens  # a response in a data file


@dataclass(frozen=True)
class WrittenResponse:
    """A response as token ids, with the end-of-sequence token. `turns` is empty if the assistant wrote all of it.

    `labels`: (token, label) where a scalar head is trained (below). Then only these tokens are in the loss.
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
        """The number of tokens in the loss."""
        return sum(end - start for start, end in self.loss_spans)

    def loss_mask(self) -> list[int]:
        """Make the mask: one number per token, 1 for one in the loss."""
        mask = [0] * len(self.ids)
        for start, end in self.loss_spans:
            mask[start:end] = [1] * (end - start)
        return mask


def read_written(row: dict[str, Any], fields: Sequence[str]) -> tuple[Question, list[Written]]:
    """Read the question and the responses of a row.

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
        raise missing_field(["prompt", "messages", "text"], row)
    question = read_question(row)
    return question, [
        _check_turns(_read_messages(row, name), name) if isinstance(row.get(name), list) else text_field(row, name)
        for name in fields
    ]


def _render_turns(messages: Sequence[Mapping[str, Any]], renderer: TurnRenderer) -> WrittenResponse:
    """Tokenise turns that begin and end with the assistant's. Raises ConfigError when the template fails."""
    ids: list[int] = []
    turns: list[Turn] = []
    for is_assistant, run in itertools.groupby(messages, key=lambda message: message["role"] == "assistant"):
        start, messages = len(ids), list(run)
        if is_assistant:
            ids += renderer.tokenizer(renderer.assistant_text(messages[0]), add_special_tokens=False)["input_ids"]
            ids += [renderer.end_of_turn] if ids[start:][-1:] != [renderer.end_of_turn] else []
        else:
            ids += renderer.observation(messages, ended_with_eos=True)
        turns.append(Turn(start, len(ids), "assistant" if is_assistant else "observation", version=0, clock=0))
    return WrittenResponse(ids, turns)


def _read_messages(row: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    if not isinstance(row[name], list) or not row[name]:
        raise ValueError(f"field {name!r} must be a list of messages, not {type_name(row[name])}")
    messages = [*map(flat_message, row[name])]
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


# -- Written groups ----------------------------------------------------------------------------------------------------
# As prompts, all rows are checked and measured before the run, and a group is made when it is read.

# A question, its responses, a reward (or labels) of each.
WrittenGroup = tuple[Question | Tokens, list[Written], Sequence[Any]]
OfflineGroup = tuple[Prompt, list[WrittenResponse], list[float]]  # a prompt, its responses, their rewards


def load_offline_groups(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    fields: Mapping[str, float],
    renderer: TurnRenderer | None = None,
    end_token_ids: Sequence[int] = (),
) -> Sequence[OfflineGroup]:
    """Load prompts with responses from the files. A row has "prompt" and one response in each of `fields` (name -> reward).

    `fields` is {"response": 1.0} for supervised training, with rows {"prompt", "response"}, {"messages"} or {"text"}, and
    {"chosen": 1.0, "rejected": 0.0} for preferences. Rows over data.max_prompt_length or data.max_response_length tokens are
    dropped or refused as in `load_prompts`. `renderer` is that of the rollouts, if they have several turns; `end_token_ids`
    those of `EndTokens`. Raises ConfigError.
    """
    rewards = list(fields.values())

    def read(row: dict[str, Any]) -> list[WrittenGroup]:
        if list(fields) == ["response"] and "text" in row and not row.keys() & {"prompt", "messages", "response"}:
            return [
                (*part, rewards) for part in text_parts(text_field(row, "text"), tokenizer, data.max_response_length)
            ]
        question, responses = read_written(row, list(fields))
        _check_pair(responses)
        return [(question, responses, rewards)]

    return _load_groups(data, files, tokenizer, read, None, renderer, end_token_ids)


def text_parts(text: str, tokenizer: Any, longest: int) -> list[tuple[Tokens, list[Written]]]:
    """Cut a plain text into parts of at most `longest` tokens, each after one token of context. Raises ValueError.

    Every token is in the loss of one part, the end-of-sequence token too, but for the first: the beginning-of-sequence
    token, or the text's own where the tokenizer has none. A part's context is its last token before.
    """
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = [*begin, *tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    if len(ids) < 2:
        raise ValueError("field 'text' has no tokens")
    starts = range(1, len(ids), longest)
    return [(Tokens(ids[start - 1 : start]), [Tokens(ids[start : start + longest])]) for start in starts]


def _load_groups(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    read: Callable[[dict[str, Any]], list[WrittenGroup]],
    label: Callable[[WrittenResponse, Any], WrittenResponse] | None,
    renderer: TurnRenderer | None = None,
    end_token_ids: Sequence[int] = (),
) -> Sequence[OfflineGroup]:
    """Load groups as `load_offline_groups`. `read` makes any number of groups of a row.

    `label(response, reward)` completes a response, or raises ValueError. With it the rewards in the file
    may be anything; that of the group is then the mean label.
    """
    task = get_task(data.task)
    rows = RowSet(files, task.name, image_format(tokenizer))
    reader = GroupReader(data, task, rows, tokenizer, renderer, label, {tokenizer.eos_token_id, *end_token_ids})
    parts: list[tuple[int, int]] = []  # row number, number of the group in the row
    fits: list[bool] = []

    def parse(row: dict[str, Any]) -> list[WrittenGroup]:
        groups = read(row)
        for question, responses, _ in groups:
            if not isinstance(question, Tokens):
                reader.check_images(question, row, responses)
            elif has_images(row):
                raise ValueError(
                    "has images, and a plain text has no prompt that shows them; write prompt and response"
                )
        return groups

    for chunk in rows.parsed(parse):
        parts += [(number, item) for number, groups in chunk for item in range(len(groups))]
        fits += reader.fit_groups([(number, group) for number, groups in chunk for group in groups])
    places = np.array(parts, np.int64)

    def make(index: int) -> OfflineGroup:
        number, item = map(int, places[index])
        return reader.group(number, read(rows.row(number))[item])

    what = f"rows exceed {data.max_prompt_length} prompt or {data.max_response_length} response tokens"
    kinds = np.zeros(len(fits), np.int8)
    return keep_fitting(data, np.array(fits, np.bool_), kinds, make, what, lambda index: f"row {index}", len(fits))


@dataclass(frozen=True)
class GroupReader(RowRenderer):
    """A maker of the groups of a RowSet, with the arguments of `_load_groups`. `ends`: the tokens that end a response."""

    where = "row "
    label: Callable[[WrittenResponse, Any], WrittenResponse] | None
    ends: Set[int]

    def fit_groups(self, written: list[tuple[int, WrittenGroup]]) -> list[bool]:
        """Tell for each (row number, group) whether no prompt and no response is too long."""
        longest = self.data.max_response_length
        measured = iter(self.fit([(number, group[0]) for number, group in written if not isinstance(group[0], Tokens)]))
        fits = [isinstance(group[0], Tokens) or next(measured) for _, group in written]
        unsure = [place for place, (_, group) in enumerate(written) if not self._certainly_short(group[1])]
        for place, responses in zip(unsure, self.responses([written[place] for place in unsure]), strict=True):
            fits[place] = fits[place] and max(map(len, responses), default=0) <= longest
        return fits

    def _certainly_short(self, responses: Sequence[Written]) -> bool:
        """Bound the lengths by the bytes of the texts. Labels are checked by their tokens, and turns by their rendering."""
        longest = self.data.max_response_length - 1  # the end-of-sequence token
        return self.label is None and all(
            isinstance(one, Tokens) or (isinstance(one, str) and most_tokens(one) <= longest) for one in responses
        )

    def group(self, number: int, written: WrittenGroup) -> OfflineGroup:
        """Make the group of a row. Raises ConfigError."""
        question, [responses] = written[0], self.responses([(number, written)])
        prompt = self._prompt(number, question)
        if self.label is None:
            return prompt, responses, list(written[2])
        return prompt, responses, [sum(value for _, value in one.labels) / len(one.labels) for one in responses]

    def _prompt(self, number: int, question: Question | Tokens) -> Prompt:
        named: dict[str, Any] = {"uid": self.rows.uid(number), "answer": "", "source": self.task.name, "reward": ""}
        if isinstance(question, Tokens):
            return Prompt(prompt_ids=tuple(question), text="", **named)
        return self.prompt(number, question, **named)

    def responses(self, written: list[tuple[int, WrittenGroup]]) -> list[list[WrittenResponse]]:
        """Tokenise the responses of each (row number, group). Raises ConfigError."""
        rendered = iter(self._rendered([one for _, (_, ones, _) in written for one in ones]))
        groups = []
        for number, (_, ones, rewards) in written:
            responses = [next(rendered) for _ in ones]
            if self.label is not None:
                try:
                    responses = [self.label(one, reward) for one, reward in zip(responses, rewards, strict=True)]
                except ValueError as error:
                    raise ConfigError(f"row {self.rows.uid(number)}: {error}") from error
            groups.append(responses)
        return groups

    def _rendered(self, written: list[Written]) -> list[WrittenResponse]:
        """Tokenise responses in order. Turns end with the template's end of turn.

        A text gets the tokenizer's end-of-sequence token, unless an end token is its last one already.
        """
        tokenizer = self.tokenizer
        texts = [one for one in written if isinstance(one, str)]
        chats = [one for one in written if not isinstance(one, str | Tokens)]
        encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
        if chats and not self.data.apply_chat_template:
            raise ConfigError(
                "responses of several turns are rendered by a chat template; set data.apply_chat_template=true"
            )
        where = "rows with messages"
        renderer = self.renderer or (TurnRenderer(tokenizer, (), where, (), list(self.ends)) if chats else None)
        for role in sorted({message["role"] for one in chats for message in one} - {"assistant"}):
            assert renderer is not None
            renderer.check(role)
        responses = []
        for one in written:
            if isinstance(one, Tokens):
                responses.append(WrittenResponse(list(one)))
            elif isinstance(one, str):
                ids = next(encoded)
                is_ended = bool(ids) and ids[-1] in self.ends
                responses.append(WrittenResponse(ids if is_ended else [*ids, tokenizer.eos_token_id]))
            else:
                assert renderer is not None
                responses.append(_render_turns(one, renderer))
        return responses


# -- Rows for reward models --------------------------------------------------------------------------------------------
# {"prompt", "chosen", "rejected"[, "margin"]}     one pair; margin >= 0: by how much the chosen response should score higher
# the same with lists of texts in all three        several pairs of one prompt: chosen[i] beats rejected[i]
# {"prompt", "completions": [...], "labels": [...]}    the steps of one response, and whether each is right (TRL's form)
#
# A response is scored at the last token that is not padding, where transformers' sequence classification reads it. A step is
# scored at its last token (`step_ends`). The steps of a row are joined by the separator. The response is tokenized as a whole.


def step_labels(ids: Sequence[int], labels: Sequence[bool], decode: Decode, separator: str) -> list[tuple[int, float]]:
    """Label each step: (its last token, 1.0 if it is right, else 0.0). Raises ValueError: other counts."""
    ends = step_ends(ids, decode, separator)
    if len(ends) != len(labels):
        raise ValueError(
            f"the response's tokens have {len(ends)} steps, and the row {len(labels)} labels; a step may not contain the"
            f" separator {separator!r}, be blank, or end within the token of the next one, and the tokenizer must keep the"
            f" separator (here the tokens read {cut(decode(ids), 80)!r})"
        )
    return [(end, float(label)) for end, label in zip(ends, labels, strict=True)]


PAIR_ROWS = '{"prompt", "chosen", "rejected"[, "margin"]}'
MAX_MARGIN = 1e4
STEP_ROWS = '{"prompt", "completions": [...], "labels": [true, false, ...]}'


def load_pairs(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    pad_token_id: int | None,
    renderer: TurnRenderer | None = None,
) -> Sequence[OfflineGroup]:
    """Load one group per pair: chosen with reward 1 + margin, rejected with 0. Raises ConfigError.

    `pad_token_id`: the model's.
    """

    def label(response: WrittenResponse, reward: float) -> WrittenResponse:
        ends = [token for token, token_id in enumerate(response.ids) if token_id != pad_token_id]
        if not ends:
            raise ValueError(
                f"the response has no token but the padding token {pad_token_id}, so it has no score of its own"
            )
        return replace(response, labels=[(ends[-1], reward)])

    return _load_groups(data, files, tokenizer, read_pairs, label, renderer)


def load_steps(data: DataConfig, files: Sequence[Path], tokenizer: Any, separator: str) -> Sequence[OfflineGroup]:
    """Load one group per response, with the share of right steps as its reward. Raises ConfigError."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    def label(response: WrittenResponse, labels: Sequence[bool]) -> WrittenResponse:
        return replace(response, labels=step_labels(response.ids, labels, decode, separator))

    return _load_groups(data, files, tokenizer, lambda row: [read_steps(row, separator)], label)


def read_pairs(row: dict[str, Any]) -> list[WrittenGroup]:
    """Read the pairs of a row, with rewards [1 + margin, 0]. Raises ValueError."""
    names = ("chosen", "rejected")
    lists = [name for name in names if isinstance(row.get(name), list) and not _are_messages(row[name])]
    if not lists:
        question, responses = read_written(row, names)
        return [_pair(question, responses, row.get("margin", 0.0))]
    question, chosen, rejected = read_question(row), *(_texts(row, name) for name in names)
    margins = row.get("margin", [0.0] * len(chosen))
    if not isinstance(margins, list) or not len(chosen) == len(rejected) == len(margins):
        sizes = [len(v) if isinstance(v, list) else type_name(v) for v in (chosen, rejected, margins)]
        raise ValueError(
            f"'chosen', 'rejected' and 'margin' (if there is one) must be lists of one length, here {sizes[0]}, {sizes[1]} and"
            f" {sizes[2]}; chosen[i] beats rejected[i]"
        )
    return [_pair(question, [c, r], m) for c, r, m in zip(chosen, rejected, margins, strict=True)]


def read_steps(row: dict[str, Any], separator: str) -> WrittenGroup:
    """Read a row with labelled steps, as one response and its labels. Raises ValueError."""
    question, steps = read_question(row), _texts(row, "completions")
    if "labels" not in row:
        raise missing_field(["labels"], row)
    labels = row["labels"]
    if not isinstance(labels, list) or not all(isinstance(label, bool) or label in (0, 1) for label in labels):
        raise ValueError("field 'labels' must be a list of true and false, one per step")
    if len(labels) != len(steps):
        raise ValueError(f"'completions' has {len(steps)} steps and 'labels' {len(labels)} labels; each step needs one")
    for number, step in enumerate(steps):
        if separator in step:
            raise ValueError(
                f"completions[{number}] contains the separator {separator!r}, which ends a step; split it, or set"
                " reward_model.step_separator"
            )
    return question, [separator.join(steps)], [[bool(label) for label in labels]]


def _are_messages(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(item, dict) for item in value)


def _texts(row: dict[str, Any], name: str) -> list[str]:
    if name not in row:
        raise missing_field([name], row)
    if not isinstance(row[name], list) or not row[name]:
        what = "empty" if row[name] == [] else type_name(row[name])
        raise ValueError(f"field {name!r} is {what}, not a list of texts")
    return [text_field({f"{name}[{i}]": text}, f"{name}[{i}]") for i, text in enumerate(row[name])]


def _check_pair(responses: list[Written]) -> None:
    if len(responses) == 2 and responses[0] == responses[1]:
        raise ValueError("chosen and rejected are the same, so neither is better; leave the pair out")


def _pair(question: Question, responses: list[Written], margin: Any) -> WrittenGroup:
    _check_pair(responses)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin <= MAX_MARGIN:
        raise ValueError(f"margin {shown(margin)} is not a number from 0 to {MAX_MARGIN:g}")
    return question, responses, [1.0 + margin, 0.0]
