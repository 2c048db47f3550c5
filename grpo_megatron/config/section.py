"""Section: the base of all sections, and the types of values with their bounds."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

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
