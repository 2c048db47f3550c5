"""Prompts: rows of a task's files -> token ids, through the tokenizer's chat template or as plain text.

The supervised warmup renders its rows in the same way, so both phases see the same prompts.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.conversation import TurnRenderer
from grpo_megatron.data.rendering import encode_prompts, render_chat
from grpo_megatron.data.rows import Question, read_rows
from grpo_megatron.data.task import Task
from grpo_megatron.data.tasks import get_task
from grpo_megatron.data.written import Written, WrittenResponse, read_written, render_written
from grpo_megatron.types import BY_MODEL, Prompt

logger = logging.getLogger(__name__)
T = TypeVar("T")

SupervisedExample = tuple[list[int], WrittenResponse]  # prompt ids, response
WrittenGroup = tuple[Question, list[Written], Sequence[Any]]  # a question, its responses, a reward (or labels) of each
OfflineGroup = tuple[Prompt, list[WrittenResponse], list[float]]  # a prompt, its responses, their rewards


def load_prompts(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    reward_override: str | None = None,
    max_samples: int | None = None,
    renderer: TurnRenderer | None = None,
) -> list[Prompt]:
    """The prompts of `files` (data.train_files, or data.val_files with `max_samples` = data.val_max_samples), in order.

    A prompt longer than data.max_prompt_length tokens is dropped and counted. With data.filter_overlong_prompts=false it
    is an error. `uid` is "source/file stem/row number"; row numbers start at 0 and count dropped rows. Only the first
    `max_samples` rows over all files are used. Raises ConfigError.

    `renderer`: the prompts are for an environment. Their template shows its tools, and `extra["row"]` has the data row, with
    the task's chat as "messages". `reward_override=""`: no reward function scores them. BY_MODEL: nor have they an answer.
    """
    task = get_task(data.task)
    reward = task.reward if reward_override is None else reward_override
    if reward is None:
        raise ConfigError(f"data.task={data.task!r} has no reward of its own; set reward.function")
    read = task.read_unanswered if reward == BY_MODEL else task.read_row
    rows = _read_files(files, task, lambda row: (*read(row), row))[:max_samples]
    tools = renderer.tools if renderer else ()
    texts = [render_prompt(data, task, question, tokenizer, uid, tools) for uid, (question, _, _) in rows]
    encoded = _encode_and_check(data, texts, tokenizer)
    prompts = [
        Prompt(
            uid,
            tuple(ids),
            text,
            answer,
            task.name,
            reward,
            _extra(data, task, question, row) if renderer else {},
            question=question,
        )
        for (uid, (question, answer, row)), text, ids in zip(rows, texts, encoded, strict=True)
    ]
    fits = [len(prompt.prompt_ids) <= data.max_prompt_length for prompt in prompts]
    what = f"prompts are longer than {data.max_prompt_length} tokens"
    return _drop_overlong(data, prompts, fits, what, [prompt.uid for prompt in prompts])


def _extra(data: DataConfig, task: Task, question: Question, row: dict[str, Any]) -> dict[str, Any]:
    """What an environment's reset reads."""
    return {"row": {**row, "messages": task.messages(question, system_prompt=data.system_prompt)}}


def load_supervised(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    renderer: TurnRenderer | None = None,
    end_token_ids: Sequence[int] = (),
) -> list[SupervisedExample]:
    """(prompt ids, response) of rows {"prompt", "response"} or {"messages"}, in order.

    Rows over data.max_prompt_length or data.max_response_length tokens are dropped or refused as in `load_prompts`.
    `renderer` is that of the rollouts, if they have several turns; `end_token_ids` those of `EndTokens`. Raises ConfigError.
    """
    groups = load_offline_groups(data, files, tokenizer, {"response": 1.0}, renderer, end_token_ids)
    return [(list(prompt.prompt_ids), responses[0]) for prompt, responses, _ in groups]


def load_offline_groups(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    fields: Mapping[str, float],
    renderer: TurnRenderer | None = None,
    end_token_ids: Sequence[int] = (),
) -> list[OfflineGroup]:
    """Prompts with responses from the file. A row has "prompt" and one response in each of `fields` (name -> reward).

    `fields` is {"response": 1.0} for supervised training, {"chosen": 1.0, "rejected": 0.0} for preferences. Otherwise as
    `load_supervised`.
    """
    rewards = list(fields.values())
    return load_written_groups(
        data,
        files,
        tokenizer,
        lambda row: [(*read_written(row, list(fields)), rewards)],
        None,
        renderer,
        end_token_ids,
    )


def load_written_groups(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    read: Callable[[dict[str, Any]], list[WrittenGroup]],
    label: Callable[[WrittenResponse, Any], WrittenResponse] | None,
    renderer: TurnRenderer | None = None,
    end_token_ids: Sequence[int] = (),
) -> list[OfflineGroup]:
    """As `load_offline_groups`. `read` makes any number of groups of a row; `label(response, reward)` completes a response.

    `label` may raise ValueError. With `label` the reward in the file may be anything; that of the group is then the mean label.
    """
    task = get_task(data.task)
    per_row = _read_files(files, task, read)
    rows = [(uid, group) for uid, row_groups in per_row for group in row_groups]
    tools = renderer.tools if renderer else ()
    texts = [render_prompt(data, task, question, tokenizer, f"row {uid}", tools) for uid, (question, _, _) in rows]
    encoded = _encode_and_check(data, texts, tokenizer)
    written_responses = [one for _, (_, written, _) in rows for one in written]
    responses = iter(_render_responses(written_responses, data, tokenizer, renderer, end_token_ids))
    groups: list[OfflineGroup] = []
    for (uid, (_, written, rewards)), text, ids in zip(rows, texts, encoded, strict=True):
        row_responses = [next(responses) for _ in written]
        if label is not None:
            try:
                row_responses = [label(one, reward) for one, reward in zip(row_responses, rewards, strict=True)]
            except ValueError as error:
                raise ConfigError(f"row {uid}: {error}") from error
            rewards = [sum(value for _, value in one.labels) / len(one.labels) for one in row_responses]
        groups.append((Prompt(uid, tuple(ids), text, "", task.name, ""), row_responses, list(rewards)))
    fits = [
        len(prompt.prompt_ids) <= data.max_prompt_length
        and all(len(response) <= data.max_response_length for response in row_responses)
        for prompt, row_responses, _ in groups
    ]
    what = f"rows exceed {data.max_prompt_length} prompt or {data.max_response_length} response tokens"
    return _drop_overlong(data, groups, fits, what, [f"row {number}" for number in range(len(groups))])


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


def _read_files(files: Sequence[Path], task: Task, parse: Callable[[dict[str, Any]], T]) -> list[tuple[str, T]]:
    """(uid, parsed row) of all files, in order."""
    _check_files(files)
    rows: list[tuple[str, T]] = []
    for file in map(Path, files):
        rows += [(f"{task.name}/{file.stem}/{number}", row) for number, row in enumerate(read_rows(file, parse))]
    return rows


def _render_responses(
    written: list[Written],
    data: DataConfig,
    tokenizer: Any,
    renderer: TurnRenderer | None,
    end_token_ids: Sequence[int],
) -> list[WrittenResponse]:
    """The responses in order. Turns end with the template's end of turn.

    A text gets the tokenizer's end-of-sequence token, unless an end token is its last one already.
    """
    ends = {tokenizer.eos_token_id, *end_token_ids}
    texts = [one for one in written if isinstance(one, str)]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    if len(texts) < len(written):
        if not data.apply_chat_template:
            raise ConfigError(
                "responses of several turns are rendered by a chat template; set data.apply_chat_template=true"
            )
        renderer = renderer or TurnRenderer(tokenizer, where="rows with messages", end_token_ids=end_token_ids)
        roles = {message["role"] for one in written if not isinstance(one, str) for message in one}
        for role in sorted(roles - {"assistant"}):
            renderer.check(role)
    responses = []
    for one in written:
        if isinstance(one, str):
            ids = next(encoded)
            is_ended = bool(ids) and ids[-1] in ends
            responses.append(WrittenResponse(ids if is_ended else [*ids, tokenizer.eos_token_id]))
        else:
            assert renderer is not None
            responses.append(render_written(one, renderer))
    return responses


def _check_files(files: Sequence[Path]) -> None:
    if not files:
        raise ConfigError("no data files; set data.train_files (data.val_files, sft.train_files)")
    stems: dict[str, Path] = {}
    for file in map(Path, files):
        if file.stem in stems:
            raise ConfigError(
                f"data files {str(stems[file.stem])!r} and {str(file)!r} have the same name without extension, and a"
                " prompt's uid is made of it; rename one"
            )
        stems[file.stem] = file


def _encode_and_check(data: DataConfig, texts: list[str], tokenizer: Any) -> list[list[int]]:
    if texts:
        _check_round_trip(texts[0], tokenizer)
    return encode_prompts(texts, tokenizer, is_chat=data.apply_chat_template)


def _check_round_trip(text: str, tokenizer: Any) -> None:
    """Warn when the tokenizer loses text. A tokenizer class that does not fit its files loses some without an error."""
    back = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
    if "".join(unicodedata.normalize("NFKC", back).split()) != "".join(unicodedata.normalize("NFKC", text).split()):
        logger.warning("the tokenizer (%s) turns %r into %r", type(tokenizer).__name__, text[:120], back[:120])


def _drop_overlong(data: DataConfig, items: list[Any], fits: list[bool], what: str, names: list[str]) -> list[Any]:
    dropped = fits.count(False)
    if not dropped:
        return items
    message = f"{dropped} of {len(items)} {what} (the first: {names[fits.index(False)]})"
    if dropped == len(items):
        raise ConfigError(f"{message}: nothing is left; raise data.max_prompt_length")
    if not data.filter_overlong_prompts:
        raise ConfigError(f"{message}; raise data.max_prompt_length, or set data.filter_overlong_prompts=true")
    logger.warning("%s and are dropped (data.filter_overlong_prompts)", message)
    return [item for item, keep in zip(items, fits, strict=True) if keep]
