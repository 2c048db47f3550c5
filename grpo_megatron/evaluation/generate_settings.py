"""Everything that `generate` reads before an engine is started: model, tokenizer, prompts and their lengths.

A model of one of our runs is asked as the run has asked it. The run's config is in the checkpoint (step_000020/trainer.json), or
beside the exported folder (outputs/run/config.yaml for outputs/run/hf). Every part can be replaced by an option.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.convert.conversion import EXPORT_FOLDER
from grpo_megatron.data.prompts import RowRenderer, image_format, render_prompt
from grpo_megatron.data.rows import Question, RowSet, read_question
from grpo_megatron.data.task import Task, get_tasks
from grpo_megatron.evaluation.ask import RUN_VALUES, AnswerSettings, AskedModel, placed_prompt, with_options
from grpo_megatron.evaluation.options import GenerateOptions
from grpo_megatron.storage.run_files import STEP_FILE
from grpo_megatron.types import Prompt, PromptImage
from grpo_megatron.untrusted import MAX_YAML, parse_yaml, read_json, read_text, reason_of

PLAIN_TASK = "jsonl"  # the prompt as it is
DEFAULT_MAX_TOKENS = 512
RUN_CONFIG = "config.yaml"
LINE_FILES = ("", ".txt", ".text")  # endings of files with one prompt per line
MAX_INPUT = 1 << 28  # bytes of standard input, or of a file of lines


@dataclass(frozen=True)
class PromptStyle:
    """The rendering of prompts, and the ends of responses. `is_chat` None: a chat if the tokenizer has a template.

    `run`: where these settings were found; None: nowhere. `of_run`: values of its section `data` that the tokenizer needs.
    """

    task: str
    system_prompt: str | None
    chat_template: Path | None
    is_chat: bool | None
    stop: list[str]
    stop_token_ids: list[int]
    max_tokens: int
    run: Path | None
    of_run: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Everything that was read. `prompts` is empty for a chat; `images` are those of its first question, without places."""

    options: GenerateOptions
    model: AskedModel
    max_model_len: int  # tokens of the longest prompt plus answer
    style: PromptStyle
    task: Task
    prompts: list[Prompt]
    answers: AnswerSettings
    images: list[PromptImage]


def prepare_generation(options: GenerateOptions) -> GenerationSettings:
    """Read and check everything. Raises ConfigError; nothing was started."""
    style = _read_style(options)
    model = AskedModel.read(options, style.chat_template, **style.of_run)
    if options.chat and model.tokenizer.chat_template is None:
        raise ConfigError(
            "--chat needs a chat template, and the tokenizer has none; set --chat-template FILE, or use --prompt"
        )
    try:
        [task] = get_tasks([style.task])
    except ConfigError as error:
        raise ConfigError(f"{error}; set --task (--task jsonl: prompts as they are)") from error
    images = _read_images(options, model.tokenizer)
    try:
        prompts = [] if options.chat else _render(options, style, task, model.tokenizer, images)
        lengths = [len(prompt.prompt_ids) for prompt in prompts]  # renders all
    except ValueError as error:
        raise with_options(error) from error
    max_tokens, max_model_len = _lengths(options, style, lengths, model.max_positions)
    answers = AnswerSettings(
        samples=options.samples,
        temperature=options.temperature,
        top_p=options.top_p if options.temperature else 1.0,
        top_k=(options.top_k or -1) if options.temperature else -1,
        max_tokens=max_tokens,
        stop=style.stop,
        stop_token_ids=style.stop_token_ids,
    )
    return GenerationSettings(
        options=options,
        model=model,
        max_model_len=max_model_len,
        style=style,
        task=task,
        prompts=prompts,
        answers=answers,
        images=images,
    )


def _read_style(options: GenerateOptions) -> PromptStyle:
    """Read the style of the run of `options.model`; the options win over it. Raises ConfigError."""
    config, where = _run_config(options.model)
    data, rollout = (config.get(name) or {} for name in ("data", "rollout"))
    template = options.chat_template
    if template is None and data.get("chat_template"):
        template = Path(data["chat_template"])
        if not template.is_file():
            if where is not None and where.name != RUN_CONFIG:  # an exported folder has the template itself
                raise ConfigError(
                    f"the run of {str(options.model)!r} rendered its prompts with data.chat_template={str(template)!r},"
                    " which is not there; set --chat-template FILE"
                )
            template = None
    return PromptStyle(
        task=options.task or data.get("task") or PLAIN_TASK,
        system_prompt=data.get("system_prompt") if options.system_prompt is None else options.system_prompt,
        chat_template=template,
        is_chat={"auto": data.get("apply_chat_template"), "chat": True, "text": False}[options.format],
        stop=list(options.stop or rollout.get("stop") or []),
        stop_token_ids=list(rollout.get("stop_token_ids") or []),
        max_tokens=options.max_tokens or data.get("max_response_length") or DEFAULT_MAX_TOKENS,
        run=where,
        of_run={name: data[name] for name in RUN_VALUES if data.get(name)},
    )


def _run_config(model: Path) -> tuple[dict[str, Any], Path | None]:
    """Find the config of the run that wrote `model`, and its file. Empty: the folder is no run's. Raises ConfigError."""
    step, beside = model / STEP_FILE, model.resolve().parent / RUN_CONFIG
    config: Any = None
    where = step
    try:
        if step.exists():
            config = read_json(step).get("config")
        elif model.resolve().name == EXPORT_FOLDER and beside.exists():
            config, where = parse_yaml(read_text(beside, MAX_YAML)), beside
            if not {"data", "trainer"} <= config.keys():
                return {}, None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"the config of the run that wrote {str(model)!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        return {}, where if step.exists() else None
    return {name: section for name, section in config.items() if isinstance(section, dict)}, where


def _read_images(options: GenerateOptions, tokenizer: Any) -> list[PromptImage]:
    """Read the images of --image, without places. Raises ConfigError."""
    images: list[PromptImage] = []
    if options.image and image_format(tokenizer) is None:
        raise ConfigError(
            f"--image {options.image[0]}: the model {str(options.model)!r} reads no images; name one that does"
        )
    for path in options.image:
        try:
            images += image_format(tokenizer).read({"image": str(path)}, Path(), [-1])
        except ValueError as error:
            raise ConfigError(f"--image {path}: {str(error).removeprefix('images[0] ')}") from error
    return images


def _render(
    options: GenerateOptions, style: PromptStyle, task: Task, tokenizer: Any, images: list[PromptImage]
) -> list[Prompt]:
    """Render the prompts by the functions that render those of training. Raises ConfigError."""
    is_chat = tokenizer.chat_template is not None if style.is_chat is None else style.is_chat
    data = DataConfig(task=style.task, apply_chat_template=is_chat, system_prompt=style.system_prompt)
    if options.file is not None and options.file.suffix not in LINE_FILES:
        rows = RowSet([options.file], "generate", image_format(tokenizer))
        renderer = RowRenderer(data, task, rows, tokenizer, None)
        return [
            renderer.prompt(number, question, {}, uid=f"generate/{number}", answer="", source=task.name, reward="")
            for chunk in rows.parsed(partial(_question_of, renderer))
            for number, question in chunk
        ]
    prompts = []
    for number, question in enumerate(_read_texts(options.prompt, options.file)):
        text = render_prompt(data, task, question, tokenizer, f"prompt {number}", num_images=len(images))
        fields = {"source": task.name, "question": question}
        prompts.append(placed_prompt(tokenizer, f"generate/{number}", text, images, is_chat=is_chat, **fields))
    return prompts


def _question_of(renderer: RowRenderer, row: dict[str, Any]) -> Question:
    if renderer.task.name == PLAIN_TASK and "messages" in row and "prompt" not in row:
        question = read_question(row, "messages")
    else:
        question, _ = renderer.task.read_unanswered(row)
    renderer.check_images(question, row)
    return question


def _read_texts(prompt: str | None, file: Path | None) -> list[Question]:
    """Read prompts from the command line, standard input or the lines of a file, in order. Raises ConfigError."""
    if prompt is not None:
        text = sys.stdin.read(MAX_INPUT).rstrip("\n") if prompt == "-" else prompt
        if not text.strip():
            raise ConfigError(f"--prompt {prompt!r}: the prompt is empty")
        return [text]
    assert file is not None
    try:
        lines: list[Question] = [line for line in read_text(file, MAX_INPUT).splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read --file {str(file)!r}: {reason_of(error)}") from error
    if not lines:
        raise ConfigError(f"--file {str(file)!r} has no prompts: each line that is not blank is one")
    return lines


def _lengths(options: GenerateOptions, style: PromptStyle, lengths: list[int], limit: int) -> tuple[int, int]:
    """Choose the tokens of an answer, and of prompt and answer. Raises ConfigError: the model has no positions for them."""
    if options.chat:
        length = min(options.max_length, limit)
        return min(style.max_tokens, length - 1), length
    length = max(lengths)
    room = limit - length
    if room < 1 or (options.max_tokens or 0) > room:
        limit_text = (
            f" + --max-tokens {options.max_tokens} = {length + options.max_tokens}" if options.max_tokens else ""
        )
        remedy = f"set --max-tokens {room} or less" if room > 0 else "shorten the prompt"
        raise ConfigError(
            f"prompt {lengths.index(length)} of {length} tokens{limit_text} exceeds the model's max_position_embeddings {limit};"
            f" {remedy}"
        )
    max_tokens = min(style.max_tokens, room)
    return max_tokens, length + max_tokens
