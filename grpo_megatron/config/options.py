"""The options of a command, declared once: a frozen dataclass, of which the command line and Python make instances.

    class WatchOptions(Options):
        program, description = "watch", "Show a run in the terminal."
        run: Annotated[Path, Argument("the run's output folder")]
        every: Annotated[float, Option("between two looks (default: 2)", "SECONDS", above=0)] = 2.0

    parse(WatchOptions, ["outputs/run", "--every", "5"])     # from the command line
    WatchOptions(run=Path("outputs/run"), every=5.0)         # from Python

argparse checks what only a command line can get wrong: unknown options, missing ones, texts that are no number, choices. It
ends the process with exit code 2. The values and their combinations are checked when an instance is made, in both ways:
`problems` lists all that is wrong, and a ConfigError names it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from grpo_megatron.config.problems import ConfigError
from grpo_megatron.untrusted import ReadError, parse_json, shown

COMMAND_NAME = "grpo-megatron"
HIDDEN = argparse.SUPPRESS  # as a help text: the option is accepted and not listed


@dataclass(frozen=True)
class Option:
    """How a field is given on the command line. Its type decides how a text is read; a Literal lists the choices.

    A bool is a flag. A sequence takes all texts behind the option; with `repeated` one text each time, with `read` one text in
    which all items are. `low` and `high` are bounds that a value may have, `above` is one that it may not have. Of the
    `exclusive` options of a group, one is needed.
    """

    help: str
    metavar: str | None = None
    flags: tuple[str, ...] = ()  # default: --name-of-the-field
    positional: bool = False
    place: int = 0  # one with a lower number comes first; those of a base class come first among equals
    group: str | None = None  # heading in --help
    low: float | None = None
    above: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None  # text -> value; raises ValueError
    repeated: bool = False
    exclusive: bool = False
    bare: Any = None  # the value where the option stands alone; None: it must have one


Argument = partial(Option, positional=True)


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Options:
    """Base of all commands' options: a subclass is a frozen dataclass with keywords.

    A command with `actions` has no options of its own: each action has a class, which is a subclass of the command's.
    """

    program: ClassVar[str] = ""  # the command, as it is typed behind `grpo-megatron`
    description: ClassVar[str] = ""
    epilog: ClassVar[str] = ""  # with more than one line, it is printed as it is
    groups: ClassVar[tuple[str, ...]] = ()  # headings in the order of --help
    actions: ClassVar[Mapping[str, type[Options]]] = {}
    action_metavar: ClassVar[str] = "ACTION"
    summary: ClassVar[str] = ""  # of an action: its line in the command's --help

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for field, kind, option in declared(type(self)):
            value, (inner, is_sequence) = getattr(self, field.name), _inner(kind)
            if is_sequence and isinstance(value, str):  # one text, not its letters
                value = option.read(value) if option.read else (value,)
            if is_sequence and isinstance(value, list | tuple):
                value = tuple(Path(one) if inner is Path else one for one in value)
            elif inner is Path and isinstance(value, str):
                value = Path(value)
            object.__setattr__(self, field.name, value)
        if problems := [*_out_of_bounds(self), *self.problems()]:
            raise ConfigError(*problems)

    def problems(self) -> Iterator[str]:
        """What is wrong with the values, besides their bounds. A command overrides it."""
        return iter(())


T = TypeVar("T", bound=Options)


def parse(kind: type[T], argv: Sequence[str]) -> T:
    """The options of a command line. A mistake that argparse finds ends the process with exit code 2. Raises ConfigError."""
    parser = parser_of(kind)
    if kind.actions:
        values = vars(parser.parse_args(argv))
        return kind.actions[values.pop("action")](**values)  # type: ignore[return-value]
    namespace, rest = parser.parse_known_intermixed_args(argv)  # type: ignore[arg-type]
    if rest:
        parser.error(f"unknown option {rest[0]}" if rest[0].startswith("-") else f"unknown argument {rest[0]}")
    return kind(**vars(namespace))


def parser_of(kind: type[Options]) -> argparse.ArgumentParser:
    """The argparse parser of a command, with the parsers of its actions."""
    formatter = argparse.RawDescriptionHelpFormatter if "\n" in kind.epilog else argparse.HelpFormatter
    parser = argparse.ArgumentParser(
        f"{COMMAND_NAME} {kind.program}",
        description=kind.description,
        epilog=kind.epilog or None,
        formatter_class=formatter,
    )
    if kind.actions:
        actions = parser.add_subparsers(dest="action", required=True, metavar=kind.action_metavar)
        for name, action in kind.actions.items():
            text = f"{action.summary[:1].upper()}{action.summary[1:]}."
            _add_options(actions.add_parser(name, help=action.summary, description=text), action)
    else:
        _add_options(parser, kind)
    return parser


def declared(kind: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], Any, Option]]:
    """Each option of a command: its field, the type of its value, and how it is given."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        value, *metadata = get_args(hints[field.name])
        yield field, value, next(item for item in reversed(metadata) if isinstance(item, Option))


def flag_of(field: dataclasses.Field[Any], option: Option) -> str:
    """An option as the user types it, or the metavar of an argument."""
    if option.positional:
        return option.metavar or field.name
    return option.flags[0] if option.flags else f"--{field.name.replace('_', '-')}"


def _add_options(parser: argparse.ArgumentParser, kind: type[Options]) -> None:
    groups: dict[str | None, Any] = {None: parser} | {name: parser.add_argument_group(name) for name in kind.groups}
    exclusive: dict[str | None, Any] = {}
    rank = {name: place for place, name in enumerate(groups)}
    for field, value, option in sorted(declared(kind), key=lambda one: (rank[one[2].group], one[2].place)):
        target = groups[option.group]
        if option.exclusive:
            if option.group not in exclusive:
                exclusive[option.group] = target.add_mutually_exclusive_group(required=True)
            target = exclusive[option.group]
        _add_option(target, field, value, option)


def _add_option(target: Any, field: dataclasses.Field[Any], value: Any, option: Option) -> None:
    is_needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    inner, is_sequence = _inner(value)
    keywords: dict[str, Any] = {"help": option.help, "default": argparse.SUPPRESS}
    if option.metavar is not None:
        keywords["metavar"] = option.metavar
    if inner is bool:
        keywords["action"] = "store_true"
    else:
        keywords["type"] = _reader(inner, option)
        keywords |= {} if option.bare is None else {"nargs": "?", "const": option.bare}
        if choices := option.choices or (get_args(inner) if get_origin(inner) is Literal else ()):
            keywords["choices"] = choices
    is_sequence = is_sequence and option.read is None
    if is_sequence:
        keywords |= (
            {"action": "append"} if option.repeated else {"nargs": "*" if option.positional and not is_needed else "+"}
        )
    if not option.positional:
        names = option.flags or (flag_of(field, option),)
        target.add_argument(*names, dest=field.name, required=is_needed, **keywords)
        return
    if not is_needed:
        keywords |= {"default": field.default} | ({} if is_sequence else {"nargs": "?"})
    target.add_argument(field.name, **keywords)


def _inner(value: Any) -> tuple[Any, bool]:
    """(the type of a value, or of each item of a sequence; whether it is a sequence) of `int | None`, `tuple[int, ...]`."""
    if get_origin(value) in (Union, UnionType):
        value = next(one for one in get_args(value) if one is not type(None))
    origin = get_origin(value)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return get_args(value)[0], True
    return (dict, False) if isinstance(origin, type) and issubclass(origin, Mapping) else (value, False)


def _reader(inner: Any, option: Option) -> Callable[[str], Any]:
    if option.read is None:
        readers: dict[Any, Callable[[str], Any]] = {int: _whole, dict: _table, float: float, Path: Path}
        return readers.get(inner, str)
    return partial(_read_by, option.read)


def _read_by(read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _whole(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{shown(text, 40)} is not a whole number of 64 bits")
    return int(text)


def _table(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ReadError as error:
        raise argparse.ArgumentTypeError(f"{shown(text, 40)} {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{shown(text, 40)} must be a JSON object")
    return value


def _out_of_bounds(options: Options) -> Iterator[str]:
    for field, _, option in declared(type(options)):
        value = getattr(options, field.name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        name = f"{flag_of(field, option)} {value if isinstance(value, int) else format(value, 'g')}"
        low, high = option.low if option.above is None else option.above, option.high
        is_low = low is not None and (value < low or (value == low and option.above is not None))
        is_high = high is not None and value > high
        is_outside = isinstance(value, float) and (is_low or is_high) and None not in (low, high)
        above = option.above is not None
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name} is not a finite number; set another value"
        elif is_outside:
            room = f"above {low:g}, at most {high:g}" if above else f"from {low:g} to {high:g}"
            yield f"{name} is outside {low:g} to {high:g}; set a value {room}"
        elif is_low:
            yield f"{name} is too small; set {f'a value above {low:g}' if above else f'{low:,} or more'}"
        elif is_high:
            yield f"{name} is more than {high:,}; set that or less"
