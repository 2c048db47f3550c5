"""Problems: the rows of a task's data file as questions with reference answers. No row of a benchmark is left out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.data.questions import question_text
from grpo_megatron.data.rows import Question, read_rows
from grpo_megatron.data.task import Example, Fewshot, Task
from grpo_megatron.reading import shown
from grpo_megatron.rewards.time_limit import time_limit
from grpo_megatron.storage.manifest import sha256_of

REMOVE_S = 2.0  # processor seconds for a task's regular expression on one row


@dataclass(frozen=True)
class Problem:
    """`uid` is "task/row number". It seeds the samples, and pairs the problems of two results."""

    uid: str
    question: Question
    answer: str
    subject: str | None = None
    level: str | None = None
    row: Mapping[str, Any] = field(default_factory=dict)  # of the file, for a task with an environment

    @property
    def question_text(self) -> str:
        """The question as text for display; of a chat, the contents of its messages."""
        return question_text(self.question)


@dataclass(frozen=True)
class Dataset:
    """A task with its problems, and the files that they were read from. Few-shot examples are drawn from `pool`.

    `num_in_file`: problems of the file. With --limit there are fewer in `problems`.
    """

    task: Task
    path: Path
    sha256: str
    problems: list[Problem]
    pool: list[Example]
    pool_sha256: str | None
    num_in_file: int


@dataclass(frozen=True)
class DataPlaces:
    """Where the tasks' files are, and the options that set this, for error messages."""

    folder: Path | None
    files: Mapping[str, Path] = field(default_factory=dict)  # task -> its file, instead of one in the folder
    folder_option: str = "--data DIR"
    file_option: str = "--file {task}=PATH"


def read_datasets(
    tasks: list[Task], places: DataPlaces, num_fewshot: Callable[[Task], int], limit: int | None
) -> list[Dataset]:
    """The data of every task. `limit`: only the first so many problems of each.

    Raises one ConfigError that names every file that is missing or wrong.
    """
    unknown = sorted(set(places.files) - {task.name for task in tasks})
    errors = [f"--file {name}=...: {name!r} is not one of --tasks; add it there" for name in unknown]
    datasets: list[Dataset] = []
    for task in tasks:
        try:
            datasets.append(_read_dataset(task, places, num_fewshot(task), limit))
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError("\n".join(errors))
    return datasets


def _read_dataset(task: Task, places: DataPlaces, num_fewshot: int, limit: int | None) -> Dataset:
    remedy = f"set {places.file_option.format(task=task.name)}"
    path = places.files.get(task.name) or _find_file(task, "data file", task.files, places, remedy)
    rows = read_rows(path, lambda row: (*task.read_row(row), *task.labels(row), row))
    problems = [Problem(f"{task.name}/{number}", *row) for number, row in enumerate(rows)][:limit]
    pool: list[Example] = []
    pool_sha256 = None
    if num_fewshot:
        fewshot = task.fewshot
        if fewshot is None:
            raise ConfigError(f"task {task.name!r} has no training file to draw examples from; set --num-fewshot 0")
        if fewshot.examples:
            return Dataset(
                task, path, sha256_of(path), problems, _given_examples(task, fewshot, num_fewshot), None, len(rows)
            )
        train = _find_file(task, "few-shot file", fewshot.files, places, "set --num-fewshot 0 to do without")
        pool = read_rows(train, lambda row: _read_example(task, fewshot, row))
        pool_sha256 = sha256_of(train)
        if num_fewshot > len(pool):
            raise ConfigError(
                f"--num-fewshot {num_fewshot}: {str(train)!r} has {len(pool)} rows; set it to that or less"
            )
    return Dataset(task, path, sha256_of(path), problems, pool, pool_sha256, len(rows))


def _given_examples(task: Task, fewshot: Fewshot, count: int) -> list[Example]:
    if count > len(fewshot.examples):
        raise ConfigError(
            f"--num-fewshot {count}: task {task.name!r} has {len(fewshot.examples)} examples of its own; set that or less"
        )
    return [Example(one.question, one.solution) for one in fewshot.examples[:count]]


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
