"""Prompts: rows of a task's files -> prompts, through the tokenizer's chat template or as plain text.

All rows are checked before the run, and the numbers of those whose prompts fit are held. A prompt is made when it is read.
Every rank knows all prompts of a step by uid, reward and answer. Only the ranks that draw the responses render and tokenise
them (150 us, measured with GSM8K). Rows with responses are rendered in the same way (written.py), so the supervised warmup sees
the same prompts.
"""

from __future__ import annotations

import copy
import logging
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.conversation import TurnRenderer
from grpo_megatron.data.fields import Messages, Question
from grpo_megatron.data.items import ItemTable, first_of_each, kept_items
from grpo_megatron.data.rendering import LengthBound, encode_prompts, render_chat
from grpo_megatron.data.rows import RowSet
from grpo_megatron.data.task import Task
from grpo_megatron.data.tasks import get_task
from grpo_megatron.rewards.reward import RewardItem, opened_thought
from grpo_megatron.types import BY_MODEL, Prompt

logger = logging.getLogger(__name__)

SAMPLED_FROM = 200_000  # rows from which on a plan measures a sample
SAMPLED_PER_CHUNK = 8  # prompts of each chunk of rows

ParsedRow = tuple[Question, str, str, dict[str, Any]]  # question, answer, reward, row


def load_prompts(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    reward_override: str | None = None,
    max_samples: int | None = None,
    renderer: TurnRenderer | None = None,
    *,
    source: str | None = None,
    is_plan: bool = False,
) -> ItemTable[Prompt]:
    """The prompts of `files` (data.train_files, or data.val_files with `max_samples` = data.val_max_samples), in order.

    A prompt longer than data.max_prompt_length tokens is dropped and counted. With data.filter_overlong_prompts=false it
    is an error. `uid` is "source/file/row number"; row numbers start at 0 and count dropped rows. Only the first
    `max_samples` rows over all files are used. Raises ConfigError.

    `renderer`: the prompts are for an environment. Their template shows its tools, and `extra["row"]` has the data row, with
    the task's chat as "messages". `reward_override=""`: no reward function scores them. BY_MODEL: nor have they an answer.
    `source`: the name in data.sources, instead of the task's. `is_plan`: this process draws nothing, so of SAMPLED_FROM rows
    and more only a sample of the lengths is measured, and no prompt is dropped.
    """
    task = get_task(data.task)
    if reward_override is None and task.reward is None and not task.rewards:
        raise ConfigError(f"data.task={data.task!r} has no reward of its own; set reward.function")
    rows = RowSet(files, source or task.name)
    used = min(len(rows), max_samples or len(rows))
    reader = PromptReader(data, task, rows, tokenizer, renderer, reward_override, source)
    is_sampled = is_plan and len(rows) >= SAMPLED_FROM
    numbers = {name: number for number, name in enumerate(task.reward_names)}
    kinds, fits, measured = np.zeros(used, np.int8), np.ones(used, np.bool_), 0
    for chunk in rows.parsed(partial(parsed_row, task, reward_override)):
        own = [(number, parsed) for number, parsed in chunk if number < used]
        kinds[[number for number, _ in own]] = [numbers.get(reward, 0) for _, (_, _, reward, _) in own]
        own = own[:SAMPLED_PER_CHUNK] if is_sampled else own
        fits[[number for number, _ in own]] = reader.fit([(number, parsed[0]) for number, parsed in own])
        measured += len(own)
    what = f"prompts are longer than {data.max_prompt_length} tokens"
    kept = kept_items(data, fits, what, rows.uid, measured)
    if kept is None or is_sampled:
        return ItemTable(reader.make, range(used), first_of_each(kinds))
    return ItemTable(reader.make, kept, first_of_each(kinds[kept]))


@dataclass(frozen=True)
class RowRenderer:
    """Renders and tokenises the questions of a RowSet. `where` is put before a row's uid in messages."""

    data: DataConfig
    task: Task
    rows: RowSet
    tokenizer: Any
    renderer: TurnRenderer | None
    where: ClassVar[str] = ""

    def text(self, number: int, question: Question) -> str:
        """The rendered prompt of a row. Raises ConfigError."""
        tools = self.renderer.tools if self.renderer else ()
        where = self.where + self.rows.uid(number)
        return render_prompt(self.data, self.task, question, self.tokenizer, where, tools)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of rendered prompts."""
        return encode_prompts(texts, self.tokenizer, is_chat=self.data.apply_chat_template)

    @cached_property
    def bound(self) -> LengthBound:
        """Tells prompts that certainly have at most data.max_prompt_length tokens."""
        return LengthBound(self.data.max_prompt_length, partial(self.text, 0), self.encode)

    def check_first(self, questions: Sequence[tuple[int, Question]]) -> None:
        """Warn if the tokenizer loses text of row 0, which is the first of the (row number, question) of the first chunk."""
        if questions and questions[0][0] == 0:
            text = self.text(*questions[0])
            back = self.tokenizer.decode(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            if _letters(back) != _letters(text):  # a tokenizer class that does not fit its files
                name = type(self.tokenizer).__name__
                logger.warning("the tokenizer (%s) turns %r into %r", name, text[:120], back[:120])


def _letters(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


@dataclass(frozen=True)
class PromptReader(RowRenderer):
    """Makes the prompts of a RowSet: the arguments of `load_prompts`, with what was read for them."""

    reward: str | None
    source: str | None

    def fit(self, questions: list[tuple[int, Question]]) -> list[bool]:
        """Whether the prompt of each (row number, question) has at most data.max_prompt_length tokens."""
        self.check_first(questions)
        unsure = [one for one in questions if not self.bound.fits(one[1])]
        encoded = self.encode([self.text(*one) for one in unsure])
        lengths = {number: len(ids) for (number, _), ids in zip(unsure, encoded, strict=True)}
        return [lengths.get(number, 0) <= self.data.max_prompt_length for number, _ in questions]

    def encode_one(self, text: str) -> tuple[int, ...]:
        """The token ids of a rendered prompt."""
        return tuple(self.encode([text])[0])

    def make(self, number: int) -> Prompt:
        """The prompt of a row. Raises ConfigError when the row cannot be read any more."""
        question, answer, reward, row = parsed_row(self.task, self.reward, self.rows.row(int(number)))
        named = source_of_row(row) if self.task.rewards else ""
        messages = self.task.messages(question, system_prompt=self.data.system_prompt) if self.renderer else None
        return RowPrompt.of(
            partial(self.text, number, question),
            self.encode_one,
            uid=self.rows.uid(number),
            answer=answer,
            source=self.source or named or self.task.name,
            reward=reward,
            extra={"row": {**row, "messages": messages}} if self.renderer else {},  # what an environment's reset reads
            question=question,
            columns=row,
            data_source=source_of_row(row),
            messages=chat_of(self.data, self.task, question),
        )


def parsed_row(task: Task, reward: str | None, row: dict[str, Any]) -> ParsedRow:
    """What a row says, by its task. `reward` replaces that of the task.

    Raises ValueError for a row that the task cannot read, or that no reward can grade.
    """
    question, answer = task.read_unanswered(row) if reward == BY_MODEL else task.read_row(row)
    return question, answer, task.reward_of(row, answer) if reward is None else reward, row


def chat_of(data: DataConfig, task: Task, question: Question) -> Messages | None:
    """The messages that the chat template renders; None for a plain text prompt."""
    return task.messages(question, system_prompt=data.system_prompt) if data.apply_chat_template else None


def source_of_row(row: Mapping[str, Any]) -> str:
    """The row's "data_source", verl's name of the data set; "" where it has none."""
    source = row.get("data_source")
    return source if isinstance(source, str) else ""


def render_prompt(
    data: DataConfig,
    task: Task,
    question: Question,
    tokenizer: Any,
    where: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The prompt's text, rendered as `data` says. Raises ConfigError when the template is missing or fails.

    `tools` are JSON schemas for the chat template.
    """
    if not data.apply_chat_template:
        if data.system_prompt is not None:
            raise ConfigError(
                "data.system_prompt needs a chat template, and data.apply_chat_template is false; unset one of them"
            )
        if not isinstance(question, str):
            raise ConfigError(f"{where} is a list of chat messages; set data.apply_chat_template=true")
        return task.plain_text(question)
    if task.user_prompt is None:
        raise ConfigError(f"task {task.name!r} has plain text prompts only; set data.apply_chat_template=false")
    if tokenizer.chat_template is None:
        raise ConfigError(
            "the tokenizer has no chat template; set data.chat_template to a Jinja file (ChatML:"
            " examples/templates/chatml.jinja), or data.apply_chat_template=false for plain text prompts"
        )
    try:
        return render_chat(task.messages(question, system_prompt=data.system_prompt), tokenizer, where, tools)
    except ConfigError as error:
        raise ConfigError(f'{error} (a template without system turns: set data.system_prompt="")') from error


class RowPrompt(Prompt):
    """A Prompt whose text and tokens are made when they are first read: `render()` and `encode(text)`. Made by `of`."""

    _render: Callable[[], str]
    _encode: Callable[[str], tuple[int, ...]]

    @classmethod
    def of(cls, render: Callable[[], str], encode: Callable[[str], tuple[int, ...]], **fields: Any) -> RowPrompt:
        """`fields` are those of Prompt, but `text` and `prompt_ids`."""
        prompt = cls.__new__(cls)
        prompt.__dict__.update({"_render": render, "_encode": encode, **fields})
        return prompt

    @cached_property
    def text(self) -> str:  # type: ignore[override]
        return self._render()

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._encode(self.text)

    def with_rate(self, rate: float, weight: float) -> RowPrompt:
        """A copy with `pass_rate` and `weight`, without making text and tokens."""
        prompt = copy.copy(self)
        prompt.__dict__.update(pass_rate=rate, weight=weight)
        return prompt


def reward_item(prompt: Prompt, response: str, response_ids: Sequence[int] = (), step: int = 0) -> RewardItem:
    """What a reward function may read of a prompt and one response.

    The function reads the whole turn: a `<think>` with which the prompt opens it comes first. TRL calls a row conversational
    whose prompt is a list of messages. A row without a text "prompt" is one here too, if the chat template is applied: with
    TRL it would have such a list.
    """
    return RewardItem(
        prompt.reward,
        opened_thought(prompt.text) + response,
        prompt.answer,
        prompt=prompt.text,
        messages=prompt.messages,
        columns=prompt.columns,
        data_source=prompt.data_source,
        completion_ids=response_ids,
        step=step,
        is_chat=prompt.messages is not None and not isinstance(prompt.columns.get("prompt"), str),
    )
