"""Everything that `generate` reads before an engine is started: model, tokenizer, prompts and their lengths."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.convert.source import Source
from grpo_megatron.data.prompts import render_prompt
from grpo_megatron.data.rendering import encode_prompts
from grpo_megatron.data.task import Task
from grpo_megatron.data.tasks import get_tasks
from grpo_megatron.data.tokenizer import EndTokens, read_end_tokens
from grpo_megatron.evaluation.engine import model_tokenizer
from grpo_megatron.evaluation.weights import engine_dtype, open_model
from grpo_megatron.generation.queries import read_queries
from grpo_megatron.generation.style import PromptStyle, read_style
from grpo_megatron.models.tensor_parallel import engine_split_problems, fitting_sizes
from grpo_megatron.types import Prompt

OPTION_OF_DATA_KEY = {
    "data.apply_chat_template=true": "--format chat",
    "data.apply_chat_template=false": "--format text",
    "data.apply_chat_template is false": "prompts are plain text here",
    "data.system_prompt": "--system-prompt",
    "data.chat_template": "--chat-template",
}


@dataclass(frozen=True)
class GenerationSettings:
    """`prompts` is empty for a chat. `max_model_len`: tokens of a prompt and its answer."""

    source: Source
    tokenizer: Any
    style: PromptStyle
    task: Task
    end_tokens: EndTokens
    prompts: list[Prompt]
    max_tokens: int
    max_model_len: int
    dtype: str


def prepare_generation(args: argparse.Namespace) -> GenerationSettings:
    """Read and check everything. Raises ConfigError; nothing was started."""
    source = open_model(args.model, args.hf, args.family)
    if split_problems := engine_split_problems(source.arch, args.tp):
        raise ConfigError(
            f"--tp {args.tp} cannot split the model {str(args.model)!r}: {', '.join(split_problems)}; set one of"
            f" {fitting_sizes(source.arch, engine_split_problems)}"
        )
    style = read_style(args)
    tokenizer = model_tokenizer(source, args.tokenizer, style.chat_template)
    try:
        [task] = get_tasks([style.task])
    except ConfigError as error:
        raise ConfigError(f"{error}; set --task (--task jsonl: prompts as they are)") from error
    prompts = [] if args.chat else _render(args, style, task, tokenizer)
    max_tokens, max_model_len = _lengths(args, style, prompts, source.arch.max_position_embeddings)
    ends = read_end_tokens(tokenizer, source.hf_folder, source.arch.vocab_size)
    dtype = engine_dtype(source, args.dtype)
    return GenerationSettings(source, tokenizer, style, task, ends, prompts, max_tokens, max_model_len, dtype)


def _render(args: argparse.Namespace, style: PromptStyle, task: Task, tokenizer: Any) -> list[Prompt]:
    """The prompts, rendered by the function that renders those of training. Raises ConfigError."""
    data = style.data(tokenizer)
    questions = read_queries(args.prompt, args.file, task)
    try:
        texts = [render_prompt(data, task, one, tokenizer, f"prompt {n}") for n, one in enumerate(questions)]
    except ConfigError as error:
        message = str(error)
        for key, option in OPTION_OF_DATA_KEY.items():
            message = message.replace(key, option)
        raise ConfigError(message) from error
    encoded = encode_prompts(texts, tokenizer, is_chat=data.apply_chat_template)
    return [
        Prompt(f"generate/{number}", tuple(ids), text, "", task.name, "", question=question)
        for number, (ids, text, question) in enumerate(zip(encoded, texts, questions, strict=True))
    ]


def _lengths(args: argparse.Namespace, style: PromptStyle, prompts: list[Prompt], limit: int) -> tuple[int, int]:
    """(tokens of an answer, of prompt and answer). Raises ConfigError: the model has no positions for them."""
    if args.chat:
        length = min(args.max_length, limit)
        return min(style.max_tokens, length - 1), length
    longest = max(range(len(prompts)), key=lambda number: len(prompts[number].prompt_ids))
    length = len(prompts[longest].prompt_ids)
    room = limit - length
    if room < 1 or (args.max_tokens or 0) > room:
        asked = f" + --max-tokens {args.max_tokens} = {length + args.max_tokens}" if args.max_tokens else ""
        remedy = f"set --max-tokens {room} or less" if room > 0 else "shorten the prompt"
        raise ConfigError(
            f"prompt {longest} of {length} tokens{asked} exceeds the model's max_position_embeddings {limit}; {remedy}"
        )
    max_tokens = min(style.max_tokens, room)
    return max_tokens, length + max_tokens
