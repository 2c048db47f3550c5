"""Tasks by name: a file in `tasks/`, the path of another YAML file, or "my.module:function" of the user's own.

`data.task`, `data.val_tasks` and `tools/evaluate.py --tasks` take the same names and get the same objects.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
from functools import cache
from pathlib import Path

from grpo_megatron.config import ConfigError
from grpo_megatron.data.task import Task
from grpo_megatron.data.task_file import FOLDER, read_task_file
from grpo_megatron.registry import import_function, no_exit


def task_names() -> list[str]:
    """The built-in tasks."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


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
    return _built_in(name)


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


@cache
def _built_in(name: str) -> Task:
    return read_task_file(FOLDER / f"{name}.yaml")


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
