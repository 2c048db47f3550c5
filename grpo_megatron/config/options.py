"""Options: a section whose values come from a command line, or from Python. argparse is made from its fields.

class WatchOptions(Options):
    program, description = "watch", "Show a run in the terminal."
    run: Annotated[Path, Argument("the run's output folder")]
    every: Annotated[float, Option("between two looks (default: 2)", "SECONDS", gt=0)] = 2.0
parse(WatchOptions, ["outputs/run", "--every", "5"]) == WatchOptions(run=Path("outputs/run"), every=5.0)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from grpo_megatron.config.problems import ConfigError
from grpo_megatron.config.section import Section, reason_and_remedy
from grpo_megatron.registry import did_you_mean
from grpo_megatron.untrusted import ReadError, parse_json, shown

COMMAND_NAME = "grpo-megatron"
HIDDEN = argparse.SUPPRESS  # as a help text: the option is accepted and not listed


@dataclass(frozen=True)
class Presentation:
    """How a field is given on the command line: the keywords of `Option`."""

    metavar: str | None = None
    flags: tuple[str, ...] = ()
    positional: bool = False
    place: int = 0
    group: str | None = None
    read: Callable[[str], Any] | None = None
    repeated: bool = False
    exclusive: bool = False
    bare: Any = None


def Option(
    help: str,
    metavar: str | None = None,
    *,
    flags: tuple[str, ...] = (),
    positional: bool = False,
    place: int = 0,
    group: str | None = None,
    read: Callable[[str], Any] | None = None,
    repeated: bool = False,
    exclusive: bool = False,
    bare: Any = None,
    **bounds: Any,
) -> Any:
    """Describes an option, inside `Annotated`. A bool is a flag; a sequence takes all texts behind the option.

    `flags`: default --name-of-the-field. `place`: a lower one comes first in --help; a base class comes first among equals.
    `group`: heading in --help. `read`: text -> value, raises ValueError; a sequence is then one text. `repeated`: a sequence
    has one text for each time. `exclusive`: one option of the group is needed. `bare`: the value of the option without one.
    `bounds`: as of pydantic's Field (`ge`, `gt`, `le`).
    """
    shown_as = Presentation(metavar, flags, positional, place, group, read, repeated, exclusive, bare)
    return Field(description=help, json_schema_extra={"option": shown_as}, **bounds)  # type: ignore[dict-item]


Argument = partial(Option, positional=True)


class Options(Section):
    """The base of all commands' options. A command with `actions` has none itself: each action has a subclass of its class."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    program: ClassVar[str] = ""  # the command, as it is typed behind `grpo-megatron`
    description: ClassVar[str] = ""
    epilog: ClassVar[str] = ""  # with more than one line, it is printed as it is
    groups: ClassVar[tuple[str, ...]] = ()  # headings in the order of --help
    actions: ClassVar[Mapping[str, type[Options]]] = {}
    action_metavar: ClassVar[str] = "ACTION"
    summary: ClassVar[str] = ""  # of an action: its line in the command's --help

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(*(_explained(type(self), one) for one in error.errors())) from None
        if problems := list(self.problems()):
            raise ConfigError(*problems)

    @field_validator("*", mode="before")
    @classmethod
    def _read_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Reads a text of the command line. Where a sequence is needed, a text is one item, not its letters."""
        field = cls.model_fields[str(info.field_name)]
        if not isinstance(value, str):
            return value
        if read := _presentation(field).read:
            return read(value)
        if _holds(field, Sequence):
            return (value,)
        return _json_object(value) if _holds(field, Mapping) else value

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with options that are right one by one. A command overrides it."""
        return iter(())


T = TypeVar("T", bound=Options)


def parse(kind: type[T], argv: Sequence[str]) -> T:
    """Reads the options of a command line. argparse ends the process with exit code 2. Raises ConfigError."""
    parser = parser_of(kind)
    if kind.actions:
        check_choice(parser, kind.action_metavar, argv, kind.actions)
        namespace, rest = parser.parse_known_args(argv)
        kind = kind.actions[vars(namespace).pop("action")]  # type: ignore[assignment]
    else:
        namespace, rest = parser.parse_known_intermixed_args(argv)  # type: ignore[arg-type]
    if rest:
        fields = kind.model_fields.items()
        flags = [_flag(name, _presentation(field)) for name, field in fields if field.description != HIDDEN]
        kind_of_word = "option" if rest[0].startswith("-") else "argument"
        parser.error(f"unknown {kind_of_word} {rest[0]}{did_you_mean(rest[0], flags)}")
    return kind(**vars(namespace))


def check_choice(parser: argparse.ArgumentParser, what: str, argv: Sequence[str], known: Iterable[str]) -> None:
    """Ends the process where the first word is close to a known one and is none; argparse names only all of them."""
    if argv and argv[0] not in known and (hint := did_you_mean(argv[0], known)):
        parser.error(f"unknown {what} {argv[0]}{hint}")


def parser_of(kind: type[Options]) -> argparse.ArgumentParser:
    """Builds the argparse parser of a command, with the parsers of its actions."""
    formatter = argparse.RawDescriptionHelpFormatter if "\n" in kind.epilog else argparse.HelpFormatter
    parser = argparse.ArgumentParser(
        f"{COMMAND_NAME} {kind.program}",
        description=kind.description,
        epilog=kind.epilog or None,
        formatter_class=formatter,
    )
    if not kind.actions:
        _add_options(parser, kind)
        return parser
    actions = parser.add_subparsers(dest="action", required=True, metavar=kind.action_metavar)
    for name, action in kind.actions.items():
        text = f"{action.summary[:1].upper()}{action.summary[1:]}."
        _add_options(actions.add_parser(name, help=action.summary, description=text), action)
    return parser


def _add_options(parser: argparse.ArgumentParser, kind: type[Options]) -> None:
    groups: dict[str | None, Any] = {None: parser} | {name: parser.add_argument_group(name) for name in kind.groups}
    exclusive: dict[str | None, Any] = {}
    order = {name: place for place, name in enumerate(groups)}
    fields = [(name, field, _presentation(field)) for name, field in kind.model_fields.items()]
    for name, field, option in sorted(fields, key=lambda one: (order[one[2].group], one[2].place)):
        target = groups[option.group]
        if option.exclusive:
            if option.group not in exclusive:
                exclusive[option.group] = target.add_mutually_exclusive_group(required=True)
            target = exclusive[option.group]
        _add_option(target, name, field, option)


def _add_option(target: Any, name: str, field: FieldInfo, option: Presentation) -> None:
    """Adds an argparse argument that takes texts. pydantic reads and checks them when the options are made."""
    keywords: dict[str, Any] = {"help": field.description, "default": argparse.SUPPRESS}
    choices = [choice for kind in _kinds(field) if get_origin(kind) is Literal for choice in get_args(kind)]
    if metavar := option.metavar or (f"{{{','.join(choices)}}}" if choices else None):
        keywords["metavar"] = metavar
    is_needed = field.is_required()
    if bool in _kinds(field):
        keywords["action"] = "store_true"
    elif option.bare is not None:
        keywords |= {"nargs": "?", "const": option.bare}
    elif option.repeated:
        keywords["action"] = "append"
    elif _holds(field, Sequence) and option.read is None:
        keywords["nargs"] = "*" if option.positional and not is_needed else "+"
    elif option.positional and not is_needed:
        keywords["nargs"] = "?"
    if option.positional:
        target.add_argument(name, **keywords)
    else:
        target.add_argument(*option.flags or (_flag(name, option),), dest=name, required=is_needed, **keywords)


def _presentation(field: FieldInfo) -> Presentation:
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra["option"]  # type: ignore[return-value]


def _flag(name: str, option: Presentation) -> str:
    """Names an option as the user types it, or an argument by its metavar."""
    if option.positional:
        return option.metavar or name
    return option.flags[0] if option.flags else f"--{name.replace('_', '-')}"


def _kinds(field: FieldInfo) -> tuple[Any, ...]:
    """Lists the alternatives of a field's type: (int, NoneType) of `int | None`."""
    kind: Any = field.annotation
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _holds(field: FieldInfo, kind: type) -> bool:
    """Says if a field's type is a generic of this kind, as tuple[str, ...] is of Sequence."""
    origins = [get_origin(one) for one in _kinds(field)]
    return any(isinstance(origin, type) and issubclass(origin, kind) for origin in origins)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ReadError as error:
        raise ValueError(str(error)) from None
    if not isinstance(value, dict):
        raise ValueError("it must be a JSON object")
    return value


def _explained(kind: type[Options], error: Any) -> str:
    """Explains one pydantic error in a line, with the option as the user types it."""
    name = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        known = list(kind.model_fields)
        return f"{kind.program}: unknown option {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})"
    flag = _flag(name, _presentation(kind.model_fields[name]))
    if error["type"] == "missing":
        return f"{flag} is needed"
    return f"{flag} {shown(error['input'])}: {reason_and_remedy(error)}"
