"""Tasks by name: a file in `tasks/`, the path of another YAML file, or "my.module:function" of the user's own.

`data.task`, `data.val_tasks` and `tools/evaluate.py --tasks` take the same names and get the same objects.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo_megatron.config import ConfigError
from grpo_megatron.data.fields import Question, type_name
from grpo_megatron.data.rows import open_rows
from grpo_megatron.data.task import RowFormat, Task
from grpo_megatron.importing import import_function, no_exit
from grpo_megatron.reading import MAX_YAML, ReadError, parse_yaml, read_regular, shown
from grpo_megatron.rewards import extractors

# -- Task files: a task as YAML, in `tasks/` or the user's own. The keys are those of `Task` and `RowFormat` -----------
# A file may extend a built-in task: `extends: gsm8k` takes every key from there that the file does not set. So a variant
# of a benchmark (few-shot examples, the scores of another program) is a task with a name of its own. The sha256 of the
# bytes, with those of the extended file, is printed with every result. Only results with equal sha256 are compared.

TASKS_FOLDER = Path(__file__).parent / "tasks"
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
    known = sorted(file.stem for file in TASKS_FOLDER.glob("*.yaml"))
    if name not in known:
        raise ConfigError(
            f"task file {str(path)!r}: extends {shown(name)} is not a built-in task; set one of {', '.join(known)}"
        )
    content, base = _load(TASKS_FOLDER / f"{name}.yaml")
    if "extends" in base:
        raise ConfigError(
            f"task file {str(path)!r} extends {name!r}, which extends {base['extends']!r}; set extends to the latter"
        )
    return content, base


def _mistakes(error: ValidationError) -> list[str]:
    unknown = {"unexpected_keyword_argument": f"unknown key (known: {', '.join(KEYS)})"}
    return [f"{'.'.join(map(str, one['loc']))}: {unknown.get(one['type'], one['msg'])}" for one in error.errors()]


def _checked_row(
    rows: RowFormat, readers: Sequence[Callable[[str], object]], row: dict[str, Any]
) -> tuple[Question, str]:
    """As `RowFormat.read`; also refuses a reference answer that one of the rewards cannot read."""
    question, answer = rows.read(row)
    for read_answer in readers:
        read_answer(answer)
    return question, answer


_read_built_in = cache(read_task_file)


def task_names() -> list[str]:
    """The built-in tasks."""
    return sorted(path.stem for path in TASKS_FOLDER.glob("*.yaml"))


def get_task(name: str) -> Task:
    """The task called `name`. Raises ConfigError (a ValueError).

    "module:attribute" may be a Task, or a function without arguments that returns one. Exceptions raised by the import
    of the module are passed on.
    """
    if name.endswith((".yaml", ".yml")):
        return read_task_file(Path(name))
    if ":" in name:
        return _python_task(name)
    if name not in task_names():
        close = difflib.get_close_matches(name, task_names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        known = ", ".join(task_names())
        raise ConfigError(f"unknown task {name!r}{hint} (known: {known}; or a .yaml file, or package.module:function)")
    return _read_built_in(TASKS_FOLDER / f"{name}.yaml")


def get_tasks(names: list[str]) -> list[Task]:
    """Several tasks. Raises one ConfigError for all that are wrong."""
    tasks: list[Task] = []
    problems: list[str] = []
    for name in names:
        try:
            tasks.append(get_task(name))
        except ConfigError as error:
            problems.append(str(error))
        except Exception as error:  # whatever the user's module raises while it is imported
            problems.append(f"task {name!r}: importing it raised {type(error).__name__}: {error}; correct the module")
    labels = [task.name for task in tasks]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    problems += [f"task {label!r} is given twice; name it once" for label in repeated]
    if not names:
        problems.append(f"no task is named; choose from {', '.join(task_names())}")
    if problems:
        raise ConfigError("\n".join(problems))
    return tasks


def _python_task(name: str) -> Task:
    try:
        entry = import_function(name)
        with no_exit(f"task {name!r}: calling it"):
            task = entry() if callable(entry) else entry
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(task, Task):
        raise ConfigError(f"task {name!r} is {type(task).__name__}, not a grpo_megatron.data.task.Task")
    return task if task.sha256 else dataclasses.replace(task, sha256=_source_sha256(name.partition(":")[0]))


def _source_sha256(module_name: str) -> str:
    """sha256 of the module's file. What the module imports is not part of it."""
    path = importlib.import_module(module_name).__file__
    return hashlib.sha256(Path(path).read_bytes() if path else module_name.encode()).hexdigest()


# -- The form of data files where `data.task` is not set: verl's rows, TRL's, or others --------------------------------

FORMS = {"verl": "reward_model.ground_truth", "trl": "prompt, and no question"}  # task -> what its rows are known by


def recognised_task(files: Sequence[Path]) -> str | None:
    """The task for the first row of the files; None: the default, or there is no row (which other checks report)."""
    for file in files:
        try:
            row = next(open_rows(file).rows(0, 1))
        except (ConfigError, StopIteration):
            continue
        return form_of_row(row) if isinstance(row, dict) else None
    return None


def form_of_row(row: Mapping[str, Any]) -> str | None:
    """A task of FORMS, or None."""
    rule = row.get("reward_model")
    if "prompt" in row and isinstance(rule, Mapping) and "ground_truth" in rule:
        return "verl"
    return "trl" if "prompt" in row and "question" not in row else None
