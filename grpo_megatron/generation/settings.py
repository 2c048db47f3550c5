"""Everything that `generate` reads before an engine is started: model, tokenizer, prompts and their lengths."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.convert.conversion import EXPORT_FOLDER
from grpo_megatron.convert.source import Source
from grpo_megatron.data.prompts import encode_prompts, render_prompt
from grpo_megatron.data.rows import Question, read_question, read_rows
from grpo_megatron.data.task import Task, get_tasks
from grpo_megatron.data.tokenizer import EndTokens, read_end_tokens
from grpo_megatron.evaluation.engine import engine_dtype, model_tokenizer, open_model
from grpo_megatron.generation.options import GenerateOptions
from grpo_megatron.models.architecture import engine_split_problems, fitting_sizes
from grpo_megatron.reading import MAX_YAML, ReadError, parse_yaml, read_json, read_text
from grpo_megatron.storage.run_files import STEP_FILE
from grpo_megatron.types import Prompt

# -- PromptStyle: how prompts become token ids. A model of one of our runs is asked as the run has asked it ------------
# The run's config is in the checkpoint (step_000020/trainer.json), or beside the exported folder (outputs/run/config.yaml for
# outputs/run/hf). Every part can be replaced by an option.

PLAIN_TASK = "jsonl"  # the prompt as it is
DEFAULT_MAX_TOKENS = 512
RUN_CONFIG = "config.yaml"


@dataclass(frozen=True)
class PromptStyle:
    """`is_chat` None: a chat if the tokenizer has a template. `run`: where these settings were found; None: nowhere."""

    task: str = PLAIN_TASK
    system_prompt: str | None = None
    chat_template: Path | None = None
    is_chat: bool | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    max_tokens: int = DEFAULT_MAX_TOKENS
    run: Path | None = None

    def data(self, tokenizer: Any) -> DataConfig:
        """The section `data` that renders prompts in this style."""
        is_chat = tokenizer.chat_template is not None if self.is_chat is None else self.is_chat
        return DataConfig(task=self.task, apply_chat_template=is_chat, system_prompt=self.system_prompt)


def read_style(options: GenerateOptions) -> PromptStyle:
    """The style of the run that `options.model` belongs to, with the options laid over it. Raises ConfigError."""
    found, where = _run_config(options.model)
    data, rollout = (_section(found, name) for name in ("data", "rollout"))
    template = _path(data.get("chat_template"))
    if options.chat_template is None and template is not None and not template.is_file():
        if where is not None and where.name != RUN_CONFIG:  # an exported folder has the template itself
            raise ConfigError(
                f"the run of {str(options.model)!r} rendered its prompts with data.chat_template={str(template)!r}, which is"
                " not there; set --chat-template FILE"
            )
        template = None
    is_chat = data.get("apply_chat_template")
    return PromptStyle(
        task=options.task or data.get("task") or PLAIN_TASK,
        system_prompt=data.get("system_prompt") if options.system_prompt is None else options.system_prompt,
        chat_template=options.chat_template or template,
        is_chat={"auto": is_chat, "chat": True, "text": False}[options.format],
        stop=list(options.stop or rollout.get("stop") or []),
        stop_token_ids=list(rollout.get("stop_token_ids") or []),
        max_tokens=options.max_tokens or data.get("max_response_length") or DEFAULT_MAX_TOKENS,
        run=where,
    )


def _run_config(model: Path) -> tuple[dict[str, Any], Path | None]:
    """The config of the run that wrote `model`, and its file. Empty: the folder is no run's."""
    step, beside = model / STEP_FILE, model.resolve().parent / RUN_CONFIG
    try:
        if step.exists():
            return _section(read_json(step), "config"), step
        if model.resolve().name == EXPORT_FOLDER and beside.exists():
            config = parse_yaml(read_text(beside, MAX_YAML))
            if "data" in config and "trainer" in config:
                return config, beside
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the config of the run that wrote {str(model)!r} cannot be read: {error}") from error
    return {}, None


def _section(config: Any, name: str) -> dict[str, Any]:
    value = config.get(name) if isinstance(config, dict) else None
    return value if isinstance(value, dict) else {}


def _path(value: Any) -> Path | None:
    return Path(value) if isinstance(value, str) else None


# -- The prompts of `generate`, from the command line, standard input or a file ----------------------------------------

LINE_FILES = ("", ".txt", ".text")  # endings of files with one prompt per line
MAX_INPUT = 1 << 28  # bytes of standard input, or of a file of lines


def read_queries(prompt: str | None, file: Path | None, task: Task) -> list[Question]:
    """The questions in order: texts, or chats. Raises ConfigError."""
    if prompt is not None:
        text = sys.stdin.read(MAX_INPUT).rstrip("\n") if prompt == "-" else prompt
        if not text.strip():
            raise ConfigError(f"--prompt {prompt!r}: the prompt is empty")
        return [text]
    assert file is not None
    return _lines_of(file) if file.suffix in LINE_FILES else read_rows(file, lambda row: _question_of(task, row))


def _question_of(task: Task, row: dict[str, Any]) -> Question:
    """As the task reads the row. Without a task, a row may have its chat in "messages". Raises ValueError."""
    if task.name == PLAIN_TASK and "messages" in row and "prompt" not in row:
        return read_question(row, "messages")
    return task.read_unanswered(row)[0]


def _lines_of(file: Path) -> list[Question]:
    try:
        text = read_text(file, MAX_INPUT)
    except (OSError, ReadError) as error:
        raise ConfigError(f"cannot read --file {str(file)!r}: {error}") from error
    lines: list[Question] = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--file {str(file)!r} has no prompts: each line that is not blank is one")
    return lines


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

    options: GenerateOptions
    source: Source
    tokenizer: Any
    style: PromptStyle
    task: Task
    end_tokens: EndTokens
    prompts: list[Prompt]
    max_tokens: int
    max_model_len: int
    dtype: str


def prepare_generation(options: GenerateOptions) -> GenerationSettings:
    """Read and check everything. Raises ConfigError; nothing was started."""
    source = open_model(options.model, options.hf, options.family)
    if split_problems := engine_split_problems(source.arch, options.tp):
        raise ConfigError(
            f"--tp {options.tp} cannot split the model {str(options.model)!r}: {', '.join(split_problems)}; set one of"
            f" {fitting_sizes(source.arch, engine_split_problems)}"
        )
    style = read_style(options)
    tokenizer = model_tokenizer(source, options.tokenizer, style.chat_template)
    try:
        [task] = get_tasks([style.task])
    except ConfigError as error:
        raise ConfigError(f"{error}; set --task (--task jsonl: prompts as they are)") from error
    prompts = [] if options.chat else _render(options, style, task, tokenizer)
    max_tokens, max_model_len = _lengths(options, style, prompts, source.arch.max_position_embeddings)
    ends = read_end_tokens(tokenizer, source.hf_folder, source.arch.vocab_size)
    dtype = engine_dtype(source, options.dtype)
    return GenerationSettings(options, source, tokenizer, style, task, ends, prompts, max_tokens, max_model_len, dtype)


def _render(options: GenerateOptions, style: PromptStyle, task: Task, tokenizer: Any) -> list[Prompt]:
    """The prompts, rendered by the function that renders those of training. Raises ConfigError."""
    data = style.data(tokenizer)
    questions = read_queries(options.prompt, options.file, task)
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


def _lengths(options: GenerateOptions, style: PromptStyle, prompts: list[Prompt], limit: int) -> tuple[int, int]:
    """(tokens of an answer, of prompt and answer). Raises ConfigError: the model has no positions for them."""
    if options.chat:
        length = min(options.max_length, limit)
        return min(style.max_tokens, length - 1), length
    longest = max(range(len(prompts)), key=lambda number: len(prompts[number].prompt_ids))
    length = len(prompts[longest].prompt_ids)
    room = limit - length
    if room < 1 or (options.max_tokens or 0) > room:
        asked = f" + --max-tokens {options.max_tokens} = {length + options.max_tokens}" if options.max_tokens else ""
        remedy = f"set --max-tokens {room} or less" if room > 0 else "shorten the prompt"
        raise ConfigError(
            f"prompt {longest} of {length} tokens{asked} exceeds the model's max_position_embeddings {limit}; {remedy}"
        )
    max_tokens = min(style.max_tokens, room)
    return max_tokens, length + max_tokens
