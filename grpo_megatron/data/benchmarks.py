"""Problems: the rows of a task's data file as questions with reference answers. No row of a benchmark is left out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.config.problems import ProblemList
from grpo_megatron.data.images import ImageFormat
from grpo_megatron.data.prompts import RowRenderer, image_format
from grpo_megatron.data.rows import Question, RowSet, question_text, read_rows
from grpo_megatron.data.task import Example, Fewshot, Task, get_tasks
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.processes.process import time_limit
from grpo_megatron.rewards import check_reward
from grpo_megatron.storage.files import sha256_of
from grpo_megatron.types import Prompt
from grpo_megatron.untrusted import shown

REMOVE_S = 2.0  # processor seconds for a task's regular expression on one row


@dataclass(frozen=True)
class BenchmarkProblem:
    """A problem. `uid` is "task/row number": it seeds the samples, and pairs the problems of two results."""

    uid: str
    question: Question
    answer: str
    subject: str | None = None
    level: str | None = None
    row: Mapping[str, Any] = field(default_factory=dict)  # of the file, for a task with an environment

    @property
    def question_text(self) -> str:
        """The question as text for display."""
        return question_text(self.question)


@dataclass(frozen=True)
class Dataset:
    """A task with its problems, and the files that they were read from. Few-shot examples are chosen from `pool`.

    Problem n is row n of `rows`. `num_in_file`: problems of the file; with --limit there are fewer in `problems`.
    """

    task: Task
    path: Path
    sha256: str
    problems: list[BenchmarkProblem]
    pool: list[Example]
    pool_sha256: str | None
    num_in_file: int
    rows: RowSet


@dataclass(frozen=True)
class DataPlaces:
    """The places of the tasks' files, and the options that set them, for error messages."""

    folder: Path | None
    files: Mapping[str, Path] = field(default_factory=dict)  # task -> its file, instead of one in the folder
    folder_option: str = "--data DIR"
    file_option: str = "--file {task}=PATH"


def read_datasets(
    tasks: list[Task],
    places: DataPlaces,
    num_fewshot: Callable[[Task], int],
    limit: int | None,
    images: ImageFormat | None = None,
) -> list[Dataset]:
    """Read the data of every task. `limit`: only the first so many problems of each. `images`: how the model reads them.

    Raises one ConfigError that names every file that is missing or wrong.
    """
    unknown = sorted(set(places.files) - {task.name for task in tasks})
    problems = ProblemList()
    problems.add(f"--file {name}=...: {name!r} is not one of --tasks; add it there" for name in unknown)
    datasets = [problems.attempt("", _read_dataset, task, places, num_fewshot(task), limit, images) for task in tasks]
    problems.raise_if_any()
    return [dataset for dataset in datasets if dataset is not None]


def _read_dataset(
    task: Task, places: DataPlaces, num_fewshot: int, limit: int | None, images: ImageFormat | None
) -> Dataset:
    remedy = f"set {places.file_option.format(task=task.name)}"
    path = places.files.get(task.name) or _find_file(task, "data file", task.files, places, remedy)
    rows = RowSet([path], task.name, images)
    parsed = rows.parsed(lambda row: (*task.read_row(row), *task.labels(row), row))
    problems = [BenchmarkProblem(f"{task.name}/{number}", *row) for chunk in parsed for number, row in chunk][:limit]
    pool: list[Example] = []
    pool_sha256 = None
    if num_fewshot:
        fewshot = task.fewshot
        if fewshot is None:
            raise ConfigError(f"task {task.name!r} has no training file to sample examples from; set --num-fewshot 0")
        if fewshot.examples:
            pool = fewshot.examples[:num_fewshot]
            what, remedy = f"task {task.name!r} has {len(pool)} examples of its own", "set that or less"
        else:
            train = _find_file(task, "few-shot file", fewshot.files, places, "set --num-fewshot 0 to do without")
            pool = read_rows(train, lambda row: _read_example(task, fewshot, row))
            pool_sha256 = sha256_of(train)
            what, remedy = f"{str(train)!r} has {len(pool)} rows", "set it to that or less"
        if num_fewshot > len(pool):
            raise ConfigError(f"--num-fewshot {num_fewshot}: {what}; {remedy}")
    return Dataset(task, path, sha256_of(path), problems, pool, pool_sha256, len(rows), rows)


def _find_file(task: Task, what: str, files: list[str], places: DataPlaces, remedy: str) -> Path:
    folder, name = places.folder, task.name
    if not files:
        raise ConfigError(f"task {name!r} names no {what}; {remedy}")
    names = ", ".join(files)
    if folder is None:
        raise ConfigError(f"task {name!r} needs its {what} ({names}); set {places.folder_option}, or {remedy}")
    if not folder.is_dir():
        raise ConfigError(
            f"{str(folder)!r} is not a folder, and task {name!r} looks there for {names}; set {places.folder_option}"
        )
    for file in files:
        if os.path.isfile(folder / file):  # false for a name that is too long, where Path.is_file raises
            return folder / file
    raise ConfigError(f"task {name!r}: no {what} in {str(folder)!r} (looked for {names}); {remedy}")


def _read_example(task: Task, fewshot: Fewshot, row: dict[str, Any]) -> Example:
    solution = row.get(fewshot.solution)
    if not isinstance(solution, str) or not solution.strip():
        raise ValueError(f"field {fewshot.solution!r} holds no solution (fields: {', '.join(row)})")
    question, _ = task.read_row(row)
    if not isinstance(question, str):
        raise ValueError("the question is a list of chat messages, and a few-shot example must be text")
    if fewshot.remove is not None:
        try:
            with time_limit(REMOVE_S, f"fewshot.remove={shown(fewshot.remove)} of task {task.name!r}"):
                solution = re.sub(fewshot.remove, "", solution)
        except TimeoutError as error:
            raise ValueError(str(error)) from error
    return Example(question, solution)


def problem_prompts(
    dataset: Dataset,
    data: DataConfig,
    tokenizer: Any,
    turns: TurnRenderer | None = None,
    examples: Sequence[Sequence[Example]] | None = None,
) -> list[Prompt]:
    """Make the prompts of all problems. `examples`: the worked ones of each problem.

    Raises ConfigError, also for images that a prompt cannot show.
    """
    task, prompts = dataset.task, list[Prompt]()
    renderer = RowRenderer(data, task, dataset.rows, tokenizer, turns)
    for number, problem in enumerate(dataset.problems):
        try:
            renderer.check_images(problem.question, problem.row)
        except ValueError as error:
            raise ConfigError(f"{problem.uid}: {error}") from error
        shots = examples[number] if examples else ()
        fields = {"uid": problem.uid, "answer": problem.answer, "source": task.name, "reward": task.reward or ""}
        prompts.append(renderer.prompt(number, problem.question, problem.row, shots, **fields))
    return prompts


# -- Validation in training (`data.val_tasks`) -------------------------------------------------------------------------
# Rendered as those of training, sampled by `rollout.val_kwargs`, and reported as `val-core/<task>/acc/mean@n`. Few-shot
# examples and stop texts belong to the scripted evaluation.


def read_task_prompts(data: DataConfig, reward_kwargs: Mapping[str, Any], tokenizer: Any | None) -> list[Prompt]:
    """Read the prompts of `data.val_tasks`, in order. Without a tokenizer (reported elsewhere) only the files are checked.

    Only the first `data.val_max_samples` rows of each task are used. Raises ConfigError.
    """
    try:
        tasks = get_tasks(data.val_tasks)
    except ConfigError as error:
        raise ConfigError(f"data.val_tasks: {error}") from error
    problems = [_task_problem(task, data, reward_kwargs) for task in tasks]
    mistakes = [f"data.val_tasks: task {task.name!r}{text}" for task, text in zip(tasks, problems, strict=True) if text]
    datasets: list[Dataset] = []
    places = DataPlaces(data.val_data, {}, folder_option="data.val_data=DIR", file_option="data.val_files=[PATH]")
    try:
        datasets = read_datasets(tasks, places, lambda task: 0, data.val_max_samples, image_format(tokenizer))
    except ConfigError as error:
        mistakes.append(f"data.val_tasks: {error}")
    if mistakes:
        raise ConfigError(*mistakes)
    if tokenizer is None or (data.apply_chat_template and tokenizer.chat_template is None):
        return []  # reported where the tokenizer is read
    return [prompt for dataset in datasets for prompt in _load_prompts(dataset, data, tokenizer)]


def _task_problem(task: Task, data: DataConfig, reward_kwargs: Mapping[str, Any]) -> str | None:
    """Say why the task cannot be used in training, to be put behind its name."""
    if task.multi_turn.environment is not None:
        return " plays an environment: it is for the scripted evaluation; validate with data.val_files and rollout.multi_turn"
    if task.reward is None:
        return " has no reward: it is for the scripted evaluation only; leave it out"
    if data.apply_chat_template and task.user_prompt is None:
        return " has plain text prompts only; set data.apply_chat_template=false, or drop it"
    try:
        check_reward(task.reward, reward_kwargs)
    except ValueError as error:
        return f": {error}"
    return None


def _load_prompts(dataset: Dataset, data: DataConfig, tokenizer: Any) -> list[Prompt]:
    prompts = problem_prompts(dataset, data, tokenizer)
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids))
    length = len(longest.prompt_ids)
    if length > data.max_prompt_length:
        raise ConfigError(
            f"data.val_tasks: {longest.uid} has {length} tokens, data.max_prompt_length is {data.max_prompt_length}; set"
            f" it to {length} or more (no problem of a benchmark is dropped)"
        )
    return prompts
