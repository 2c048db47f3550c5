"""Validation in training: tasks by name as prompts for the live engine (`data.val_tasks`).

The prompts are rendered as those of training: chat or plain text, with `data.system_prompt` if it is set. The samples
are drawn as `rollout.val_kwargs` says, within `data.max_response_length`, and reported as
`val-core/<task>/acc/mean@n`. Few-shot examples and stop texts belong to the scripted evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.prompts import chat_of, render_prompt, source_of_row
from grpo_megatron.data.rendering import encode_prompts
from grpo_megatron.data.task import Task
from grpo_megatron.data.tasks import get_tasks
from grpo_megatron.evaluation.problems import DataPlaces, Dataset, read_datasets
from grpo_megatron.rewards import check_reward
from grpo_megatron.types import Prompt


def read_task_prompts(data: DataConfig, reward_kwargs: Mapping[str, Any], tokenizer: Any | None) -> list[Prompt]:
    """The prompts of `data.val_tasks`, in order. Without a tokenizer (reported elsewhere) only the files are checked.

    Only the first `data.val_max_samples` rows of each task are used. Raises ConfigError.
    """
    try:
        tasks = get_tasks(data.val_tasks)
    except ConfigError as error:
        raise ConfigError(f"data.val_tasks: {error}") from error
    problems = [problem for task in tasks for problem in _task_problems(task, data, reward_kwargs)]
    datasets: list[Dataset] = []
    places = DataPlaces(data.val_data, {}, folder_option="data.val_data=DIR", file_option="data.val_files=[PATH]")
    try:
        datasets = read_datasets(tasks, places, lambda task: 0, data.val_max_samples)
    except ConfigError as error:
        problems.append(f"data.val_tasks: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    if tokenizer is None or (data.apply_chat_template and tokenizer.chat_template is None):
        return []  # reported where the tokenizer is read
    return [prompt for dataset in datasets for prompt in _load_prompts(dataset, data, tokenizer)]


def _task_problems(task: Task, data: DataConfig, reward_kwargs: Mapping[str, Any]) -> list[str]:
    """Why the task cannot be used in training."""
    if task.multi_turn.environment is not None:
        return [
            f"data.val_tasks: task {task.name!r} plays an environment: it is for the scripted evaluation; validate with"
            " data.val_files and rollout.multi_turn"
        ]
    if task.reward is None:
        return [
            f"data.val_tasks: task {task.name!r} has no reward: it is for the scripted evaluation only; leave it out"
        ]
    if data.apply_chat_template and task.user_prompt is None:
        return [
            f"data.val_tasks: task {task.name!r} has plain text prompts only; set data.apply_chat_template=false, or"
            " drop it"
        ]
    try:
        check_reward(task.reward, reward_kwargs)
    except ValueError as error:
        return [f"data.val_tasks: task {task.name!r}: {error}"]
    return []


def _load_prompts(dataset: Dataset, data: DataConfig, tokenizer: Any) -> list[Prompt]:
    task, problems = dataset.task, dataset.problems
    texts = [render_prompt(data, task, problem.question, tokenizer, problem.uid) for problem in problems]
    encoded = encode_prompts(texts, tokenizer, is_chat=data.apply_chat_template)
    prompts = [
        Prompt(
            problem.uid,
            tuple(ids),
            text,
            problem.answer,
            task.name,
            task.reward or "",
            columns=problem.row,
            data_source=source_of_row(problem.row),
            messages=chat_of(data, task, problem.question),
        )
        for problem, text, ids in zip(problems, texts, encoded, strict=True)
    ]
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids))
    length = len(longest.prompt_ids)
    if length > data.max_prompt_length:
        raise ConfigError(
            f"data.val_tasks: {longest.uid} has {length} tokens, data.max_prompt_length is {data.max_prompt_length}; set"
            f" it to {length} or more (no problem of a benchmark is dropped)"
        )
    return prompts
