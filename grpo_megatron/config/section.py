"""Section: the base of all sections, the types of values with their bounds, and the list of all keys."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError, PydanticUndefined

from grpo_megatron.config.problems import ConfigError
from grpo_megatron.registry import did_you_mean
from grpo_megatron.untrusted import cut, integer_problem, path_problem, shown, text_problem

T = TypeVar("T")
ResumeClass = Literal["applies", "schedule", "fixed"]


@dataclass(frozen=True)
class Resume:
    """The meaning of a change of a key for a run that resumes. It is part of the key's type.

    applies    the new value holds from the next step on; every key without a mark
    schedule   as applies, and the learning-rate schedule is rebuilt: the run continues at its place in the new schedule
    fixed      what the checkpoint holds would have another meaning, or the new value would have no effect: refused
    """

    kind: ResumeClass


Schedule = Annotated[T, Resume("schedule")]
Fixed = Annotated[T, Resume("fixed")]  # of a section: all of its keys


@dataclass(frozen=True)
class Needs:
    """A condition without which a key, or every key of a section, has no effect. It is part of the key's type.

    `any_of`: alternatives, separated by " or ". Each is KEY (it is set, and not false), KEY=VALUE, KEY!=VALUE, KEY>NUMBER,
    KEY:FACT or KEY:FACT=VALUE, a fact of the function that the key names (registry.py). `.KEY` is of the same section.
    A key's own conditions replace those of its section. checks/methods.py refuses keys that are set without them.
    """

    any_of: str


class Section(BaseModel):
    """The base of all sections: frozen, without unknown keys, and without values that nothing can use."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,  # the text below a key is its description
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_is_true(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses true and false as numbers: pydantic would read `n: yes` as 1."""
        kind = str(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, bool) and re.search(r"\b(int|float)\b", kind) and "bool" not in kind:
            raise PydanticCustomError("number", "a number is needed, not true or false")
        return value

    @field_validator("*")
    @classmethod
    def _in_the_home_folder(cls, value: Any) -> Any:
        """Reads `~/` in a path as a shell does, which leaves it in `key=~/value`."""
        if isinstance(value, list):
            return [cls._in_the_home_folder(one) for one in value]
        return Path(os.path.expanduser(value)) if isinstance(value, Path) and str(value).startswith("~/") else value

    @field_validator("*")
    @classmethod
    def _can_be_used(cls, value: Any) -> Any:
        """Refuses what a file system, an encoding or 64 bits cannot represent."""
        if problem := next(_unusable(value), None):
            raise PydanticCustomError("unusable", "{problem}", {"problem": problem})
        return value

    def at(self, key: str) -> Any:
        """Returns the value of a key below this section: `actor.optim.lr` of a Config."""
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Copies the section with other values of keys below it. They are not validated."""
        update: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
        for name in {key.partition(".")[0] for key in values} - update.keys():
            inner = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
            update[name] = getattr(self, name).with_values(inner)
        return self.model_copy(update=update)


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
    """Returns a path as a list of one, and a pattern as the files that match it, in order, or as it is where none does."""
    paths = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(paths, list | tuple):
        return value
    expanded: list[Any] = []
    for path in paths:
        matches = _matches(os.path.expanduser(path)) if isinstance(path, str | Path) else []
        expanded += matches or [path]
    return expanded


def _matches(path: str) -> list[str]:
    """Lists the files that match a pattern, by name. Empty for a file's own path, which may hold a pattern's characters."""
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


# -- Mistakes in the words of this program -----------------------------------------------------------------------------

_VALUE_REMEDIES = {  # pydantic's kinds of errors -> what is to be done
    "bool_parsing bool_type": "set true or false",
    "int_from_float int_parsing int_type": "set a whole number",
    "int_parsing_size": "set a whole number of fewer digits",
    "float_parsing float_type": "set a number",
    "finite_number": "set a finite number",
    "greater_than": "set more than {gt}",
    "greater_than_equal": "set {ge} or more",
    "less_than": "set less than {lt}",
    "less_than_equal": "set {le} or less",
    "literal_error": "set {expected}",
    "string_type": "write a text, in quotes",
    "string_too_short": "it is too short; write {min_length} or more characters",
    "string_too_long": "write a text of at most {max_length} characters",
    "string_pattern_mismatch": "write a text of the form {pattern}",
    "path_type": "it is a path; write a text",
    "list_type tuple_type": "it is a list; write [{input}]",
    "too_short": "it has {actual_length} entries; give {min_length} or more",
    "too_long": "it has {actual_length} entries; give at most {max_length}",
    "dict_type": "it is a table; write {{KEY: VALUE}}",
    "model_type": "it is a section; write {{KEY: VALUE}}, or the keys below it",
    "dataclass_type": "it is a table; write {{KEY: VALUE}}",
    "missing": "it has no default; set it",
}
VALUE_REMEDIES = {kind: reason for kinds, reason in _VALUE_REMEDIES.items() for kind in kinds.split()}


# Values that are spelled like an allowed one, and mean another: fp16 is not bf16.
_OTHER_VALUES = re.compile(r"gpu|u?int\d+|(fp|float)(4|8|64).*|double|(?P<half>(fp|float)16|half)", re.IGNORECASE)


def reason_and_remedy(error: Any) -> str:
    """Says what is wrong with a value, and what to set instead, for one of pydantic's errors."""
    context = {
        name: f"{value:g}" if isinstance(value, float) else value for name, value in error.get("ctx", {}).items()
    }
    given = error["input"] if isinstance(error["input"], str | int | float | dict) and error["input"] != {} else "VALUE"
    text = VALUE_REMEDIES.get(error["type"], "{msg}").format(**context, input=given, msg=error["msg"])
    if error["type"] == "literal_error" and isinstance(given, str):
        another = _OTHER_VALUES.fullmatch(given)
        hint = "; float16 needs a scaled loss, which is not here" if another and another["half"] else ""
        text += hint if another else did_you_mean(given, re.findall("'([^']+)'", context["expected"]))
    if error["input"] is None and error["type"] in ("list_type", "tuple_type"):
        text = "it is empty; leave it out, or write [VALUE]"
    return cut(text.removeprefix("Value error, "), 1000)


S = TypeVar("S", bound=Section)


def read_section(kind: type[S], values: Mapping[str, Any], prefix: str = "") -> S:
    """Reads the keys of one section. `prefix`: before their names in messages. Raises ConfigError with a line per wrong key."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(*(_mistake(one, prefix, kind) for one in error.errors())) from None


def refused_values(kind: type[Section], raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (the place of a value as `a.b`, what is wrong with it) for a table in which keys may be missing."""
    try:
        kind.model_validate(raw)
    except ValidationError as error:
        for one in error.errors():
            if one["type"] != "missing":
                yield ".".join(map(str, one["loc"])), reason_and_remedy(one)


def _mistake(error: Any, prefix: str, kind: type[Section]) -> str:
    key = prefix + ".".join(map(str, error["loc"]))
    known = list(kind.model_fields)
    if error["type"] == "extra_forbidden":
        hint = f"; `grpo-megatron keys {key.rpartition('.')[0]}` lists those of this section"
        if len(error["loc"]) == 1:
            hint = did_you_mean(str(error["loc"][0]), known, prefix)
        else:
            inside = key.removeprefix(prefix).rpartition(".")[0] + "."
            names = [one.name.removeprefix(inside) for one in config_keys(kind) if one.name.startswith(inside)]
            hint = did_you_mean(str(error["loc"][-1]), names, prefix + inside) or hint
        return f"unknown key {key!r}" + (hint or f" (known here: {', '.join(known) or 'none'})")
    if error["type"] == "missing":
        return f"missing key {key!r}: it has no default"
    return f"{key}={shown(error['input'])}: {reason_and_remedy(error)}"


# -- All keys ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfigKey:
    """One key that holds a value: `actor.optim.lr`."""

    name: str
    kind: str  # its type: `float`, `list[Path]`
    default: Any  # None if it has none, see `is_required`
    is_required: bool
    description: str
    resume: ResumeClass = "applies"  # what a change means for a run that resumes
    needs: tuple[str, ...] = ()  # all of these conditions (`Needs`), or the key has no effect

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]


def config_keys(
    config: type[Section],
    prefix: str = "",
    resume: ResumeClass | None = None,
    needs: tuple[str, ...] = (),
    defaults: Section | None = None,
) -> Iterator[ConfigKey]:
    """Yields the keys of a section and of the sections in it, in the order of the sources.

    `resume`, `needs`: of the whole section. `defaults`: the section as it is where the file does not have it.
    """
    for name, field in config.model_fields.items():
        inner = field.annotation
        resume_class = resume or next((mark.kind for mark in field.metadata if isinstance(mark, Resume)), None)
        needed = tuple(mark.any_of for mark in field.metadata if isinstance(mark, Needs)) or needs
        is_required = field.default is PydanticUndefined
        default = getattr(defaults, name) if defaults else None if is_required else field.default
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from config_keys(inner, f"{prefix}{name}.", resume_class, needed, default)
            continue
        needed = tuple(re.sub(r"(?<![\w.])\.", prefix, text) for text in needed)
        needed = tuple(text for text in needed if re.split("[:=!>]", text)[0] != prefix + name)  # not itself
        kind, description = _type_name(inner), " ".join((field.description or "").split())
        yield ConfigKey(prefix + name, kind, default, is_required, description, resume_class or "applies", needed)


def _type_name(kind: Any) -> str:
    """Writes a type as the sources have it: `list[Path]`, `int | None`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type_name(args[0])
    if origin in (Union, UnionType):
        return " | ".join(map(_type_name, args))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type_name, args))}]"
    return "None" if kind is type(None) else str(getattr(kind, "__name__", kind))
