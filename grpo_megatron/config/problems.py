"""Problem: one mistake of the user, as an object that knows the keys it is about until it is printed.

A check is a generator of problems. Its messages are templates: `mistake(config, "{actor.ppo_epochs} is ...")` prints
`actor.ppo_epochs=2 is ...`, and the problem is about this key. All problems of a start are gathered in a ProblemList and
raised as one ConfigError.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """One mistake: `text` names key, value, arithmetic and remedy. `keys`: the keys of the config that it is about.

    The first key is the one to change: it gives the problem its place in the order of the file. Where one of the keys could
    not be read, the problem may be caused by its default.
    """

    text: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    def is_of(self, section: str) -> bool:
        """Whether the key to change is `section`, or in it."""
        return f"{self.keys[0] if self.keys else ''}.".startswith(f"{section}.")


Problems = Iterator[Problem | str]  # what a check yields


class ConfigError(ValueError):
    """Mistakes in the user's input: `problems`. Each names key, value, arithmetic and remedy; the CLI exits with code 2."""

    tells_what_to_do = True  # the command line prints it without a traceback

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = [given if isinstance(given, Problem) else Problem(given) for given in problems]
        super().__init__("\n".join(problem.text for problem in self.problems))


class ProblemList:
    """The problems found so far, in order."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, problems: Iterable[Problem | str], *keys: str) -> bool:
        """Returns whether there was none, so that a check which builds on this one can run.

        `keys`: those that a plain text is about. Rooms that know no keys of a config yield plain texts.
        """
        found = [given if isinstance(given, Problem) else Problem(given, keys) for given in problems]
        self.problems += found
        return not found

    def attempt(self, key: str, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """`read(...)`. If it raises ConfigError, its problems are added and the result is None.

        `key`: what a problem without keys is about; several are separated by spaces.
        """
        try:
            return read(*args, **kwargs)
        except ConfigError as error:
            self.add((problem if problem.keys else problem.text for problem in error.problems), *key.split())
            return None

    def raise_if_any(self) -> None:
        """One ConfigError of all problems, each once. Does nothing without problems."""
        if self.problems:
            raise ConfigError(*{problem.text: problem for problem in self.problems}.values())


def mistake(config: object, template: str, *values: object, keys: Sequence[str] = ()) -> Problem:
    """A problem from a template for `str.format`, in which a key stands for itself and its value.

    `{trainer.seed}` becomes `trainer.seed=42`, `{trainer.seed:key}` and `{trainer.seed:value}` a half of it; texts are
    quoted by `!r`. The keys of the template are the problem's, in this order, and then `keys`. `{}` is the next of `values`.
    """
    writer = _KeyWriter(config)
    text = writer.vformat(template, values, {})
    return Problem(text, (*dict.fromkeys(writer.keys), *keys))


@dataclass(frozen=True)
class _Key:
    name: str
    value: object
    is_quoted: bool = False

    def __format__(self, half: str) -> str:
        value = repr(self.value) if self.is_quoted else written(self.value)
        return {"key": self.name, "value": value, "": f"{self.name}={value}"}[half]


class _KeyWriter(string.Formatter):
    """Writes a template's keys with their values, and remembers them."""

    def __init__(self, config: object) -> None:
        self.config = config
        self.keys: list[str] = []

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Any) -> Any:
        if field_name.isdigit():
            return super().get_field(field_name, args, kwargs)
        self.keys.append(field_name)
        return _Key(field_name, attrgetter(field_name)(self.config)), field_name

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if isinstance(value, _Key) and conversion == "r":
            return _Key(value.name, value.value, is_quoted=True)
        return super().convert_field(value, conversion)


def written(value: object) -> str:
    """A value as a config has it. Paths are quoted, because they may hold spaces."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return repr(str(value)) if isinstance(value, Path) else "null" if value is None else str(value)
