"""Prompts that a caller asks directly: a text, chat messages, or a row of the config's task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.config import DataConfig
from grpo_megatron.data.images import has_images
from grpo_megatron.data.prompts import chat_of, encode_prompts, parsed_row, render_prompt, source_of_row
from grpo_megatron.data.task import get_task
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.rollout.engine import stable_hash
from grpo_megatron.types import BY_MODEL, Prompt

AskedPrompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]


def prompt_of(
    question: AskedPrompt, data: DataConfig, tokenizer: Any, reward: str | None, renderer: TurnRenderer | None = None
) -> Prompt:
    """Render the prompt of a text, of chat messages (both without a reward), or of a row of `data.task`.

    Its uid, which seeds the sampling, is a hash of its text. `reward` replaces that of the task. `renderer`: of an
    environment's turns. Raises ValueError for a row that the task cannot read, for images, and for a prompt of more than
    `data.max_prompt_length` tokens.
    """
    if not isinstance(question, str | Mapping | Sequence):
        raise ValueError(f"a prompt is a text, a list of chat messages or a row, not {question!r}")
    task, where = get_task(data.task), "this prompt"
    row: dict[str, Any] = {}
    asked: Any = question if isinstance(question, str) else list(question)
    answer, graded_by = "", BY_MODEL
    if isinstance(question, Mapping):
        if has_images(question):
            raise ValueError(f"{where} has images, which are read from data files only; add it to data.train_files")
        asked, answer, graded_by, row = parsed_row(task, reward, dict(question))
    text = render_prompt(data, task, asked, tokenizer, where, tools=renderer.tools if renderer else ())
    messages = task.messages(asked, system_prompt=data.system_prompt) if renderer else None
    [ids] = encode_prompts([text], tokenizer, is_chat=data.apply_chat_template)
    if len(ids) > data.max_prompt_length:
        raise ValueError(f"{where} has {len(ids)} tokens: {text[:80]!r}...; set data.max_prompt_length={len(ids)}")
    return Prompt(
        uid=f"asked/{stable_hash(text)}",
        prompt_ids=tuple(ids),
        text=text,
        answer=answer,
        source=source_of_row(row) or task.name,
        reward=graded_by,
        extra={"row": {**row, "messages": messages}} if renderer else {},
        question=asked,
        columns=row,
        data_source=source_of_row(row),
        messages=chat_of(data, task, asked),
    )
