"""Rows that a reward model learns from: pairs of responses, or responses with labelled steps.

    {"prompt", "chosen", "rejected"[, "margin"]}     one pair; margin >= 0: by how much the chosen response should score higher
    the same with lists of texts in all three        several pairs of one prompt: chosen[i] beats rejected[i]
    {"prompt", "completions": [...], "labels": [...]}    the steps of one response, and whether each is right (TRL's form)

A response is scored at the last token that is not padding, where transformers' sequence classification reads it. A step is
scored at its last token (`step_ends`). The steps of a row are joined by the separator. The response is tokenized as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_megatron.config import DataConfig
from grpo_megatron.data.conversation import TurnRenderer
from grpo_megatron.data.fields import Question, missing_field, read_question, text_field, type_name
from grpo_megatron.data.written import (
    OfflineGroup,
    Written,
    WrittenGroup,
    WrittenResponse,
    load_written_groups,
    read_written,
)
from grpo_megatron.reading import cut, shown

# -- Steps of a response: where they end, as response tokens -----------------------------------------------------------
# A step ends where the separator is complete in the decoded text, and at the end of the response. Its last token is the
# one that completes the separator: the last token of the shortest prefix of tokens whose text reaches that place. So a step
# ends on a token boundary, also where one token holds the end of a step, the separator and the beginning of the next step.
# Steps that end within one token are one step. Blank steps are none: of "a\n\nb\n" with the separator "\n" the steps are
# "a" and "b".
#
# The response is tokenized as a whole, as the policy draws it. TRL's PRMTrainer tokenizes every step by itself and puts a
# separator behind the last one, too. Here the last step ends with the end-of-sequence token, or where the response was cut off.

Decode = Callable[[Sequence[int]], str]


def step_ends(ids: Sequence[int], decode: Decode, separator: str) -> list[int]:
    """The last token of every step, increasing; at least one if there is a token. `decode` leaves special tokens out."""
    if not ids:
        return []
    text, ends, start = decode(ids), [], 0
    while (found := text.find(separator, start)) != -1:
        end = found + len(separator)
        if text[start:found].strip():
            ends.append(end)
        start = end
    tokens = tokens_at(ends, ids, decode)
    if text[start:].strip() or not tokens:
        tokens.append(len(ids) - 1)
    return list(dict.fromkeys(tokens))


def tokens_at(ends: Sequence[int], ids: Sequence[int], decode: Decode) -> list[int]:
    """For each place in the text, in increasing order: the last token of the shortest prefix whose text reaches it."""
    low, tokens = 0, []
    for end in ends:
        high = len(ids) - 1
        while low < high:
            middle = (low + high) // 2
            if len(decode(ids[: middle + 1])) >= end:
                high = middle
            else:
                low = middle + 1
        tokens.append(low)
    return tokens


def step_labels(ids: Sequence[int], labels: Sequence[bool], decode: Decode, separator: str) -> list[tuple[int, float]]:
    """(last token of a step, 1.0 if it is right, else 0.0). Raises ValueError unless there are as many steps as labels."""
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
    """One group per pair: chosen with reward 1 + margin, rejected with 0. `pad_token_id` is the model's. Raises ConfigError."""

    def label(response: WrittenResponse, reward: float) -> WrittenResponse:
        ends = [token for token, token_id in enumerate(response.ids) if token_id != pad_token_id]
        if not ends:
            raise ValueError(
                f"the response has no token but the padding token {pad_token_id}, so it has no score of its own"
            )
        return replace(response, labels=[(ends[-1], reward)])

    return load_written_groups(data, files, tokenizer, read_pairs, label, renderer)


def load_steps(data: DataConfig, files: Sequence[Path], tokenizer: Any, separator: str) -> Sequence[OfflineGroup]:
    """One group per response, whose reward is the share of right steps. Raises ConfigError."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    def label(response: WrittenResponse, labels: Sequence[bool]) -> WrittenResponse:
        return replace(response, labels=step_labels(response.ids, labels, decode, separator))

    return load_written_groups(data, files, tokenizer, lambda row: [read_steps(row, separator)], label)


def read_pairs(row: dict[str, Any]) -> list[WrittenGroup]:
    """The pairs of a row, with rewards [1 + margin, 0]. Raises ValueError."""
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
    """A row with labelled steps, as one response and its labels. Raises ValueError."""
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


def _pair(question: Question, responses: list[Written], margin: Any) -> WrittenGroup:
    if responses[0] == responses[1]:
        raise ValueError("chosen and rejected are the same, so neither is better; leave the pair out")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin <= MAX_MARGIN:
        raise ValueError(f"margin {shown(margin)} is not a number from 0 to {MAX_MARGIN:g}")
    return question, responses, [1.0 + margin, 0.0]
