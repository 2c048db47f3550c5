"""Prompts of the scripted evaluation: rendered as in training, with few-shot examples; and where a completion is cut."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_megatron.config import ConfigError
from grpo_megatron.data.rendering import encode_prompts, render_chat
from grpo_megatron.data.task import Example, Task
from grpo_megatron.evaluation.problems import Dataset
from grpo_megatron.types import Prompt

Format = Literal["chat", "text"]


@dataclass(frozen=True)
class PromptSet:
    """A task's prompts, in the order of its file.

    `asked_sha256` is of the prompts before a chat template: equal for all models. `prompts_sha256` is of the rendered
    texts: equal for all models with one chat template.
    """

    prompts: list[Prompt]
    format: Format
    num_fewshot: int
    stop: list[str]
    asked_sha256: str
    prompts_sha256: str


def choose_format(task: Task, wanted: str, num_fewshot: int, tokenizer: Any) -> Format:
    """`auto`: a chat, unless there are few-shot examples or the task has plain text only. Raises ConfigError."""
    if wanted == "text" or (wanted == "auto" and (num_fewshot or task.user_prompt is None)):
        return "text"
    if task.user_prompt is None:
        raise ConfigError(f"task {task.name!r} has plain text prompts only; set --format text")
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"task {task.name!r} needs a chat template, and the tokenizer has none; set --format text (for base models,"
            " best with --num-fewshot), or --chat-template FILE"
        )
    return "chat"


def build_prompts(
    dataset: Dataset,
    format: Format,
    num_fewshot: int,
    seed: int,
    tokenizer: Any,
    system_prompt: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptSet:
    """`system_prompt` replaces the task's own. Raises ConfigError: failing template, a prompt without tokens.

    `tools` are JSON schemas for the chat template. An environment reads a prompt's `extra["row"]`: the row of the data
    file, with the chat as "messages".
    """
    task, problems = dataset.task, dataset.problems
    examples = _draw_examples(dataset, num_fewshot, seed)
    extras: list[dict[str, Any]] = [{} for _ in problems]
    if format == "chat":
        chats = [task.messages(p.question, e, system_prompt) for p, e in zip(problems, examples, strict=True)]
        unrendered = [json.dumps(chat) for chat in chats]
        if task.multi_turn.environment is not None:
            extras = [{"row": {**p.row, "messages": chat}} for p, chat in zip(problems, chats, strict=True)]
        try:
            texts = [render_chat(chat, tokenizer, p.uid, tools) for chat, p in zip(chats, problems, strict=True)]
        except ConfigError as error:
            raise ConfigError(f"{error}; set --format text, or --chat-template") from error
    else:
        try:
            texts = [task.plain_text(p.question, e) for p, e in zip(problems, examples, strict=True)]
        except ValueError as error:
            raise ConfigError(f"task {task.name!r}: {error}; set --format chat") from error
        unrendered = texts
    encoded = encode_prompts(texts, tokenizer, is_chat=format == "chat")
    prompts = [
        Prompt(problem.uid, tuple(ids), text, problem.answer, task.name, task.reward or "", extra)
        for problem, ids, text, extra in zip(problems, encoded, texts, extras, strict=True)
    ]
    return PromptSet(
        prompts=prompts,
        format=format,
        num_fewshot=num_fewshot,
        stop=task.text.stop if format == "text" else [],
        asked_sha256=_texts_sha256(unrendered),
        prompts_sha256=_texts_sha256(texts),
    )


def _draw_examples(dataset: Dataset, num_fewshot: int, seed: int) -> list[list[Example]]:
    """The examples of every problem. `sample` depends only on the generator and the two sizes, not on the rows."""
    count = len(dataset.problems)
    if not num_fewshot:
        return [[] for _ in range(count)]
    fewshot = dataset.task.fewshot
    assert fewshot is not None, "read_datasets refuses this"
    if fewshot.examples:
        return [dataset.pool] * count  # in the task's order
    generator = random.Random(seed if fewshot.seed is None else fewshot.seed)
    if fewshot.rule == "per-problem":
        return [generator.sample(dataset.pool, num_fewshot) for _ in range(count)]
    return [generator.sample(dataset.pool, num_fewshot)] * count


def _texts_sha256(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def cut_at_stop(token_ids: list[int], stop: list[str], tokenizer: Any) -> tuple[str, int, bool]:
    """(text before the first stop text, tokens up to and with it, whether there was one)."""

    def decoded(length: int) -> str:
        return str(tokenizer.decode(token_ids[:length], skip_special_tokens=True))

    text = decoded(len(token_ids))
    places = [text.find(s) for s in stop if s in text]
    if not places:
        return text, len(token_ids), False
    low, high = 0, len(token_ids)  # bisection: the fewest tokens whose text holds a stop text
    while low < high:
        middle = (low + high) // 2
        part = decoded(middle)
        if any(s in part for s in stop):
            high = middle
        else:
            low = middle + 1
    return text[: min(places)], low, True
