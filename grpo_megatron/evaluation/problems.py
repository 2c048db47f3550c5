"""Problems: the rows of a task's data file as questions with gold answers. A benchmark is all of its rows or an error."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.data.rows import read_rows
from grpo_megatron.evaluation.task import AnswerField, Fewshot, Task, TaskFile
from grpo_megatron.rewards.math.boxed import last_boxed

PLACEHOLDER = re.compile(r"\{(\w+)\}")  # of a template; other braces stand for themselves


@dataclass(frozen=True)
class Problem:
    """`uid` is "task/row number": it seeds the draws, and pairs two results."""

    uid: str
    question: str
    answer: str
    subject: str | None = None
    level: str | None = None


@dataclass(frozen=True)
class Example:
    """A worked example for few-shot prompts."""

    question: str
    solution: str


@dataclass(frozen=True)
class Dataset:
    """A task with its problems, and what they were read from. `pool`: where few-shot examples are drawn from."""

    task: Task
    path: Path
    sha256: str
    problems: list[Problem]
    pool: list[Example]
    pool_sha256: str | None


def fill(template: str, values: dict[str, Any]) -> str:
    """The template with its {fields} replaced, once: braces in the values stay."""
    return PLACEHOLDER.sub(lambda match: str(values[match[1]]) if match[1] in values else match[0], template)


def read_datasets(
    tasks: list[Task], data: Path | None, files: dict[str, Path], num_fewshot: Callable[[Task], int], limit: int | None
) -> list[Dataset]:
    """The data of every task; `files` names some directly (task -> file). `limit`: the first so many problems only.

    Raises one ConfigError that names every file that is missing or wrong.
    """
    unknown = sorted(set(files) - {task.name for task in tasks})
    problems = [f"--file {name}=...: {name!r} is not one of --tasks; add it there" for name in unknown]
    found: list[Dataset] = []
    for task in tasks:
        try:
            found.append(_read(task, data, files.get(task.name), num_fewshot(task), limit))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _read(task: Task, data: Path | None, file: Path | None, num_fewshot: int, limit: int | None) -> Dataset:
    spec = task.spec
    path = file or _find(task.name, spec.files, data, "data file", f"--file {task.name}=PATH names another")
    rows = read_rows(path, lambda row: _problem(spec, row))
    problems = [Problem(f"{task.name}/{n}", *fields) for n, fields in enumerate(rows)][:limit]
    pool: list[Example] = []
    pool_sha256 = None
    if num_fewshot:
        if spec.fewshot is None:
            raise ConfigError(f"task {task.name!r} has no training file to draw examples from; set --num-fewshot 0")
        train = _find(task.name, spec.fewshot.files, data, "few-shot file", "set --num-fewshot 0 to do without")
        fewshot = spec.fewshot
        pool = read_rows(train, lambda row: _example(spec, fewshot, row))
        pool_sha256 = _sha256(train)
        if num_fewshot > len(pool):
            raise ConfigError(
                f"--num-fewshot {num_fewshot}: {str(train)!r} has {len(pool)} rows; set it to that or less"
            )
    return Dataset(task, path, _sha256(path), problems, pool, pool_sha256)


def _find(name: str, files: list[str], data: Path | None, what: str, remedy: str) -> Path:
    if data is None:
        raise ConfigError(f"task {name!r} needs its {what}; set --data DIR ({', '.join(files)} in it), or {remedy}")
    if not data.is_dir():
        raise ConfigError(f"--data {str(data)!r} is not a folder; task {name!r} looks there for {', '.join(files)}")
    for file in files:
        if (data / file).is_file():
            return data / file
    raise ConfigError(f"task {name!r}: no {what} in {str(data)!r} (looked for {', '.join(files)}); {remedy}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _problem(spec: TaskFile, row: dict[str, Any]) -> tuple[str, str, str | None, str | None]:
    """(question, answer, subject, level). Raises ValueError."""
    return _question(spec, row), _answer(spec.answer, row), _label(spec.subject, row), _label(spec.level, row, "Level ")


def _example(spec: TaskFile, fewshot: Fewshot, row: dict[str, Any]) -> Example:
    solution = row.get(fewshot.solution)
    if not isinstance(solution, str) or not solution.strip():
        raise ValueError(f"field {fewshot.solution!r} holds no solution (fields: {', '.join(row)})")
    return Example(_question(spec, row), re.sub(fewshot.remove, "", solution) if fewshot.remove else solution)


def _question(spec: TaskFile, row: dict[str, Any]) -> str:
    for template in spec.question:
        names = PLACEHOLDER.findall(template)
        if all(isinstance(row.get(name), str) and row[name].strip() for name in names):
            # inner white space is the benchmark's own; where several fields are joined, their ends are not
            return fill(template, {n: row[n].strip() if len(names) > 1 else row[n] for n in names})
    raise ValueError(f"no question: none of {', '.join(spec.question)} (fields: {', '.join(row)})")


def _answer(places: list[AnswerField], row: dict[str, Any]) -> str:
    for place in places:
        if row.get(place.field) is not None:
            answer = ANSWER_RULES[place.rule](row[place.field]).strip()
            if not answer:
                raise ValueError(f"field {place.field!r} holds no answer ({place.rule})")
            return answer
    raise ValueError(f"no answer: none of the fields {', '.join(p.field for p in places)} (fields: {', '.join(row)})")


def _label(names: list[str], row: dict[str, Any], prefix: str = "") -> str | None:
    value = next((str(row[name]) for name in names if row.get(name) not in (None, "")), None)
    return prefix + value if value is not None and value.isdigit() else value


def _after_hashes(value: Any) -> str:
    _, mark, answer = str(value).rpartition("####")
    return answer if mark else ""


def _boxed(value: Any) -> str:
    return last_boxed(str(value)) or ""


def _text(value: Any) -> str:
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        raise ValueError(f"the answer is {type(value).__name__}, not text or a number")
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: Any) -> str:
    number = float(value)
    return str(int(number)) if number == int(number) else repr(number)


def _list(value: Any) -> str:
    parts = value if isinstance(value, list) else [value]
    return ", ".join(str(part).strip().removeprefix("$").removesuffix("$") for part in parts)


ANSWER_RULES: dict[str, Callable[[Any], str]] = {
    "hashes": _after_hashes, "boxed": _boxed, "text": _text, "number": _number, "list": _list
}  # fmt: skip
