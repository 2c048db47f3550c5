"""Section: the base of all sections, the types of values with their bounds, and the list of all keys."""

from __future__ import annotations

import ast
import functools
import glob
import inspect
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, PydanticUndefined

from grpo_megatron.reading import integer_problem, path_problem, text_problem

T = TypeVar("T")
ResumeClass = Literal["applies", "schedule", "fixed"]


@dataclass(frozen=True)
class Resume:
    """What a change of a key means for a run that resumes. It is part of the key's type.

    applies    the new value holds from the next step on; every key without a mark
    schedule   as applies, and the learning-rate schedule is rebuilt: the run continues at its place in the new schedule
    fixed      what the checkpoint holds would have another meaning, or the new value would have no effect: refused
    """

    kind: ResumeClass


Schedule = Annotated[T, Resume("schedule")]
Fixed = Annotated[T, Resume("fixed")]  # of a section: all of its keys


class Section(BaseModel):
    """The base of all sections: frozen, without unknown keys, and without values that nothing can use."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_is_true(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic reads `n: yes` as 1."""
        kind = str(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, bool) and "bool" not in kind and ("int" in kind or "float" in kind):
            raise PydanticCustomError("number", "a number is needed, not true or false")
        return value

    @field_validator("*")
    @classmethod
    def _can_be_used(cls, value: Any) -> Any:
        """No key may hold what a file system, an encoding or 64 bits cannot."""
        if problem := next(_unusable(value), None):
            raise PydanticCustomError("unusable", "{problem}", {"problem": problem})
        return value


def _unusable(value: Any) -> Iterator[str]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _unusable(item)
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _unusable(pair)
    problem = None
    if isinstance(value, Path):
        problem = path_problem(value)
    elif isinstance(value, str):
        problem = text_problem(value)
    elif isinstance(value, int):
        problem = integer_problem(value)
    if problem is not None:
        yield problem


def _expanded(value: Any) -> Any:
    """A path as a list of one; a pattern as the files that match it, in order, or as it is where none does."""
    paths = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(paths, list | tuple):
        return value
    expanded: list[Any] = []
    for path in paths:
        found = _matches(str(path)) if isinstance(path, str | Path) else []
        expanded += found or [path]
    return expanded


def _matches(path: str) -> list[str]:
    """The files that match a pattern, by name. Empty for a file's own path, which may hold a pattern's characters."""
    if not glob.has_magic(path) or path_problem(path) is not None or os.path.exists(path):
        return []
    return sorted(glob.glob(path, recursive=True))


def _not_zero(steps: int) -> int:
    if steps == 0:
        raise PydanticCustomError("frequency", "every 0 steps has no meaning; set -1 for never")
    return steps


# Upper bounds are far above any sensible value. A value beyond them is a slip of the pen, which would be found late: as
# weights that are not finite, or as a machine without memory.
Beta = Annotated[float, Field(ge=0, lt=1)]
Coefficient = Annotated[float, Field(ge=0, le=1e4)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Processes = Annotated[int, Field(ge=1, le=1024)]  # on one machine
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, le=10_000_000)]  # 115 days
Files = Annotated[list[Path], BeforeValidator(_expanded)]  # one path, or a list; *, ? and ** match names of files
Frequency = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]  # every so many steps; -1: never


# -- All keys, with what is written beside them in the sources ----------------------------------------------------------


@dataclass(frozen=True)
class ConfigKey:
    """One key that holds a value: `actor.optim.lr`."""

    name: str
    kind: str  # its type, as in the sources: `float`, `list[Path]`
    default: Any  # None if it has none, see `is_required`
    is_required: bool
    comment: str
    resume: ResumeClass = "applies"  # what a change means for a run that resumes

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]


def config_keys(config: type[Section], prefix: str = "", resume: ResumeClass | None = None) -> Iterator[ConfigKey]:
    """The keys of a section and of the sections in it, in the order of the sources. `resume`: the class of them all."""
    kinds, comments = _written(config)
    for name, field in config.model_fields.items():
        inner = field.annotation
        own = resume or next((mark.kind for mark in field.metadata if isinstance(mark, Resume)), None)
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from config_keys(inner, f"{prefix}{name}.", own)
            continue
        is_required = field.default is PydanticUndefined
        default = None if is_required else field.default
        written = kinds.get(name, ""), default, is_required, comments.get(name, "")
        yield ConfigKey(prefix + name, *written, resume=own or "applies")


@functools.cache
def _written(section: type[Section]) -> tuple[dict[str, str], dict[str, str]]:
    """Field -> its type, and field -> its comment: beside it, within its brackets, or in the lines above it."""
    lines = inspect.getsource(section).splitlines()
    tree = ast.parse("\n".join(lines)).body[0]
    assert isinstance(tree, ast.ClassDef)
    kinds, comments = {}, {}
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        name = ast.unparse(node.target)
        kinds[name] = re.sub(r"^(?:Fixed|Schedule)\[(.*)\]$", r"\1", ast.unparse(node.annotation))
        above = list(itertools.takewhile(lambda line: line.strip().startswith("#"), reversed(lines[: node.lineno - 1])))
        comments[name] = " ".join(
            filter(None, map(_comment, [*reversed(above), *lines[node.lineno - 1 : node.end_lineno]]))
        )
    return kinds, comments


def _comment(line: str) -> str:
    found = re.search(r"#\s(.*)$", line)
    return found[1].strip() if found else ""
