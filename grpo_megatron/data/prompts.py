"""Prompts: rows of a task's files -> prompts, through the tokenizer's chat template or as plain text.

All rows are checked, and all prompts are tokenised, before the run (survey.py). Their lengths are held in memory and their
ids are kept on disk (token_cache.py). A prompt itself is made when it is read (item_table.py). Rows with responses are
rendered in the same way (written_groups.py), so the supervised warmup sees the same prompts.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.conversation import TurnRenderer
from grpo_megatron.data.item_table import ITEM_BITS, ItemTable, kept_items
from grpo_megatron.data.rendering import encode_prompts, render_chat
from grpo_megatron.data.row_prompt import RowPrompt
from grpo_megatron.data.row_set import RowSet
from grpo_megatron.data.rows import Messages, Question
from grpo_megatron.data.survey import Numbers, Survey
from grpo_megatron.data.survey_key import survey_key
from grpo_megatron.data.task import Task
from grpo_megatron.data.tasks import get_task
from grpo_megatron.data.token_cache import TokenCache
from grpo_megatron.types import BY_MODEL, Prompt

logger = logging.getLogger(__name__)

SAMPLED_FROM = 200_000  # rows from which on a plan measures a sample
SAMPLED_PER_CHUNK = 8  # prompts of each chunk of the survey
UNMEASURED = -1

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
    `source`: the name in data.sources, instead of the task's. `is_plan`: nothing is drawn, so of SAMPLED_FROM rows and more
    only a sample of the lengths is measured, and no prompt is dropped.
    """
    task = get_task(data.task)
    if reward_override is None and task.reward is None and not task.rewards:
        raise ConfigError(f"data.task={data.task!r} has no reward of its own; set reward.function")
    rows = RowSet(files, source or task.name)
    used = min(len(rows), max_samples or len(rows))
    per_chunk = SAMPLED_PER_CHUNK if is_plan and len(rows) >= SAMPLED_FROM else None
    kind = ["prompts", reward_override, used, per_chunk]
    key = survey_key(kind, rows.paths, task, data, tokenizer, renderer)
    tokens = TokenCache.of(key, len(rows)) if per_chunk is None else None
    reader = PromptReader(data, task, rows, tokenizer, reward_override, renderer, source, used, per_chunk, tokens)
    lengths, kinds = Survey(rows, reader.parse, reader.measure, key).run()[:used].T
    measured = int((lengths != UNMEASURED).sum())
    what = f"prompts are longer than {data.max_prompt_length} tokens"
    kept = kept_items(data, lengths <= data.max_prompt_length, what, rows.uid, measured)
    if kept is None or per_chunk is not None:
        return ItemTable(rows, reader.make, None, used, first_of_each(kinds))
    return ItemTable(rows, reader.make, kept << ITEM_BITS, len(kept), first_of_each(kinds[kept]))


@dataclass(frozen=True)
class PromptReader:
    """Makes the prompts of a RowSet: the arguments of `load_prompts`, with what was read for them."""

    data: DataConfig
    task: Task
    rows: RowSet
    tokenizer: Any
    reward: str | None
    renderer: TurnRenderer | None
    source: str | None
    used: int  # rows of which prompts are made; all are checked
    per_chunk: int | None  # prompts of a chunk that are measured; None: all
    tokens: TokenCache | None  # keeps the ids of those that are measured; None: they are made again for a draw

    def parse(self, row: dict[str, Any]) -> ParsedRow:
        """Raises ValueError for a row that the task cannot read, or that no reward can grade."""
        return parsed_row(self.task, self.reward, row)

    def measure(self, parsed: list[tuple[int, ParsedRow]]) -> Numbers:
        """[rows, 2]: the prompt's length in tokens, or UNMEASURED; the number of its reward."""
        numbers = np.full((len(parsed), 2), UNMEASURED, np.int32)
        kinds = {name: kind for kind, name in enumerate(self.task.reward_names)}
        numbers[:, 1] = [kinds.get(reward, 0) for _, (_, _, reward, _) in parsed]
        measured = [(number, row[0]) for number, row in parsed[: self.per_chunk] if number < self.used]
        texts = [self.text(number, question) for number, question in measured]
        if measured and measured[0][0] == 0:
            check_round_trip(texts[0], self.tokenizer)
        encoded = encode_prompts(texts, self.tokenizer, is_chat=self.data.apply_chat_template)
        numbers[: len(encoded), 0] = [len(ids) for ids in encoded]
        if self.tokens and measured:
            self.tokens.store(measured[0][0], encoded)
        return numbers

    def make(self, number: int, row: dict[str, Any], item: int) -> Prompt:
        question, answer, reward, row = self.parse(row)
        named = source_of_row(row) if self.task.rewards else ""
        return RowPrompt.of(
            partial(self.find, number),
            partial(self.text, number, question),
            self.encode,
            uid=self.rows.uid(number),
            answer=answer,
            source=self.source or named or self.task.name,
            reward=reward,
            extra=_extra(self.data, self.task, question, row) if self.renderer else {},
            question=question,
            columns=row,
            data_source=source_of_row(row),
            messages=chat_of(self.data, self.task, question),
        )

    def text(self, number: int, question: Question) -> str:
        tools = self.renderer.tools if self.renderer else ()
        return render_prompt(self.data, self.task, question, self.tokenizer, self.rows.uid(number), tools)

    def find(self, number: int) -> tuple[int, ...] | None:
        return self.tokens.find(number) if self.tokens else None

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(encode_prompts([text], self.tokenizer, is_chat=self.data.apply_chat_template)[0])


def parsed_row(task: Task, reward: str | None, row: dict[str, Any]) -> ParsedRow:
    """`reward` replaces that of the task. Raises ValueError."""
    question, answer = task.read_unanswered(row) if reward == BY_MODEL else task.read_row(row)
    return question, answer, task.reward_of(row, answer) if reward is None else reward, row


def first_of_each(kinds: Numbers) -> list[int]:
    """The place of the first of each number from 0 on, in order. Without a copy: there may be millions."""
    return sorted(int(np.argmax(kinds == kind)) for kind in range(int(kinds.max()) + 1) if (kinds == kind).any())


def chat_of(data: DataConfig, task: Task, question: Question) -> Messages | None:
    """The messages that the chat template renders; None for a plain text prompt."""
    return task.messages(question, system_prompt=data.system_prompt) if data.apply_chat_template else None


def source_of_row(row: Mapping[str, Any]) -> str:
    """The row's "data_source", verl's name of the data set; "" where it has none."""
    source = row.get("data_source")
    return source if isinstance(source, str) else ""


def _extra(data: DataConfig, task: Task, question: Question, row: dict[str, Any]) -> dict[str, Any]:
    """What an environment's reset reads."""
    return {"row": {**row, "messages": task.messages(question, system_prompt=data.system_prompt)}}


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


def check_round_trip(text: str, tokenizer: Any) -> None:
    """Warn when the tokenizer loses text. A tokenizer class that does not fit its files loses some without an error."""
    back = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
    if "".join(unicodedata.normalize("NFKC", back).split()) != "".join(unicodedata.normalize("NFKC", text).split()):
        logger.warning("the tokenizer (%s) turns %r into %r", type(tokenizer).__name__, text[:120], back[:120])
