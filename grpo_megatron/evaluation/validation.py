"""Validation in training: the tasks of the scripted evaluation as prompts for the live engine (`data.val_tasks`).

Same questions, same chat format, same extractor and verifier; drawn as `rollout.val_kwargs` says, within
`data.max_response_length`, and reported as `val-core/<task>/acc/mean@n`. Text formats and few-shot examples stay with
the scripted evaluation, which cuts at stop texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.evaluation.problems import Dataset, read_datasets
from grpo_megatron.evaluation.prompting import build
from grpo_megatron.evaluation.task import Task, read_tasks
from grpo_megatron.rewards import check_reward
from grpo_megatron.types import Prompt


def read_task_prompts(data: DataConfig, reward_kwargs: Mapping[str, Any], tokenizer: Any | None) -> list[Prompt]:
    """The prompts of `data.val_tasks`, in order; without a tokenizer (it is another problem) only the check of files.

    `data.val_max_samples` takes the first of each task. Raises ConfigError.
    """
    try:
        tasks = read_tasks(data.val_tasks)
    except ConfigError as error:
        raise ConfigError(f"data.val_tasks: {error}") from error
    problems = [problem for task in tasks for problem in _unfit(task, data, reward_kwargs)]
    datasets: list[Dataset] = []
    try:
        datasets = read_datasets(tasks, data.val_data, {}, lambda task: 0, data.val_max_samples)
    except ConfigError as error:
        text = re.sub(r"(,| ;|;) (or )?--file \S+ names another", "", str(error))
        problems.append(text.replace("set --data DIR", "set data.val_data=DIR").replace("--data", "data.val_data"))
    if problems:
        raise ConfigError("\n".join(problems))
    if tokenizer is None:
        return []
    return [prompt for dataset in datasets for prompt in _prompts(dataset, data, tokenizer)]


def _unfit(task: Task, data: DataConfig, reward_kwargs: Mapping[str, Any]) -> list[str]:
    """Why the task cannot be asked in training."""
    name, reward = task.name, task.spec.reward
    if task.spec.chat is None or reward is None:
        return [
            f"data.val_tasks: task {name!r} is for the scripted evaluation only (it has no chat, or no reward); drop it"
        ]
    if not data.apply_chat_template:
        return [
            f"data.val_tasks: task {name!r} is asked as a chat; set data.apply_chat_template=true, or use data.val_files"
        ]
    try:
        check_reward(reward, reward_kwargs)
    except ValueError as error:
        return [f"data.val_tasks: task {name!r}: {error}"]
    return []


def _prompts(dataset: Dataset, data: DataConfig, tokenizer: Any) -> list[Prompt]:
    if tokenizer.chat_template is None:
        return []  # reported where the tokenizer is read
    prompts = build(dataset, "chat", 0, 0, tokenizer).prompts
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids))
    if len(longest.prompt_ids) > data.max_prompt_length:
        raise ConfigError(
            f"data.val_tasks: {longest.uid} has {len(longest.prompt_ids)} tokens, data.max_prompt_length is"
            f" {data.max_prompt_length}; set it to {len(longest.prompt_ids)} or more (no problem of a benchmark is dropped)"
        )
    return prompts
