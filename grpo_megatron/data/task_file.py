"""Task files: a task as YAML, in `tasks/` or the user's own. The keys are those of `Task` and `RowFormat`.

A file may extend a built-in task: `extends: gsm8k` takes every key from there that the file does not set. So a variant
of a benchmark (few-shot examples, the scores of another program) is a task with a name of its own. The sha256 of the
bytes, with those of the extended file, is printed with every result. Only results with equal sha256 are compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo_megatron.config import ConfigError
from grpo_megatron.data.row_format import RowFormat
from grpo_megatron.data.rows import Question, type_name
from grpo_megatron.data.task import Task
from grpo_megatron.reading import ReadError
from grpo_megatron.reading.bounds import shown
from grpo_megatron.reading.regular import read_regular
from grpo_megatron.reading.yaml_text import MAX_YAML, parse_yaml
from grpo_megatron.rewards import extractors

FOLDER = Path(__file__).parent / "tasks"
SET_HERE = ("read_row", "read_question", "sha256")  # fields of Task that a file may not set
OWN_KEYS = ("name", "version", "title")  # never taken from the extended file

KEYS = sorted({"extends", *RowFormat.model_fields, *(f.name for f in dataclasses.fields(Task))} - set(SET_HERE))


def read_task_file(path: Path) -> Task:
    """The task that a file describes. Raises ConfigError with every mistake of the file."""
    content, own = _load(path)
    keys, hashed = own, content
    if "extends" in own:
        base_content, base = _load_base(path, own["extends"])
        keys = {**{key: value for key, value in base.items() if key not in OWN_KEYS}, **own}
        del keys["extends"]
        hashed = base_content + b"\0" + content
    problems = [f"{key}: Field required" for key in ("version", "title") if key not in own]
    problems += [f"{key}: not a key of a task file" for key in SET_HERE if key in own]
    rows = task = None
    try:
        rows = RowFormat.model_validate({key: keys[key] for key in RowFormat.model_fields if key in keys})
    except ValidationError as error:
        problems += _mistakes(error)
    fields = {key: value for key, value in keys.items() if key not in RowFormat.model_fields}
    try:
        task = TypeAdapter(Task).validate_python({**fields, "read_row": RowFormat.read, "sha256": ""})  # replaced below
    except ValidationError as error:
        problems += _mistakes(error)
    if rows is None or task is None or problems:
        raise ConfigError(f"task file {str(path)!r} is wrong:\n" + "\n".join(f"  {problem}" for problem in problems))
    names = sorted({*task.graders.values(), *([task.reward] if task.reward else [])} & {*extractors.names()})
    return dataclasses.replace(
        task,
        read_row=partial(_checked_row, rows, [extractors.get(name).read_answer for name in names]),
        read_question=rows.read_question,
        sha256=hashlib.sha256(hashed).hexdigest(),
    )


def _load(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        content = read_regular(path, MAX_YAML)
        raw: Any = parse_yaml(content.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read task file {shown(str(path))}: {error.strerror}") from error
    except (UnicodeDecodeError, ReadError) as error:
        raise ConfigError(f"task file {shown(str(path))} cannot be used: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"task file {shown(str(path))} must be a mapping, not {type_name(raw)}")
    return content, {str(key): value for key, value in raw.items()}


def _load_base(path: Path, name: Any) -> tuple[bytes, dict[str, Any]]:
    known = sorted(file.stem for file in FOLDER.glob("*.yaml"))
    if name not in known:
        raise ConfigError(
            f"task file {str(path)!r}: extends {shown(name)} is not a built-in task; set one of {', '.join(known)}"
        )
    content, base = _load(FOLDER / f"{name}.yaml")
    if "extends" in base:
        raise ConfigError(
            f"task file {str(path)!r} extends {name!r}, which extends {base['extends']!r}; set extends to the latter"
        )
    return content, base


def _mistakes(error: ValidationError) -> list[str]:
    messages = []
    for mistake in error.errors():
        text = mistake["msg"]
        if mistake["type"] == "unexpected_keyword_argument":
            text = f"unknown key (known: {', '.join(KEYS)})"
        messages.append(f"{'.'.join(map(str, mistake['loc']))}: {text}")
    return messages


def _checked_row(
    rows: RowFormat, readers: Sequence[Callable[[str], object]], row: dict[str, Any]
) -> tuple[Question, str]:
    """As `RowFormat.read`; also refuses a reference answer that one of the rewards cannot read."""
    question, answer = rows.read(row)
    for read_answer in readers:
        read_answer(answer)
    return question, answer
