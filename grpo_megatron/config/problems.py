"""Problem: one mistake of the user, as an object that knows the keys it is about until it is printed.

A check is a generator of messages. With `k = keys_of(config)` the message `f"{k.actor.ppo_epochs} is ..."` prints
`actor.ppo_epochs=2 is ...`, and the problem is about this key. All problems of a start are gathered in a ProblemList and
raised as one ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

from grpo_megatron.untrusted import redacted

P = ParamSpec("P")
T = TypeVar("T")
CHANGE_ME = "CHANGE_ME"  # in a file that `import` wrote: a value that only the user knows
KEY_MARK = "\0"  # before and after a key in a message; no text of a config may hold it


@dataclass(frozen=True)
class Problem:
    """One mistake. `message`: key, value, arithmetic and remedy, with marked keys. `others`: further keys that it is about."""

    message: str
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Problem | str, *keys: str) -> Problem:
        """Makes a problem of a message. `keys`: those that it is about, where it names none itself."""
        problem = given if isinstance(given, Problem) else cls(given)
        return problem if problem.keys else cls(problem.message, keys)

    @property
    def text(self) -> str:
        """Returns the message as the user reads it, without secrets."""
        return redacted(self.message.replace(KEY_MARK, ""))

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns the keys of the config that the problem is about.

        The first one gives the problem its place in the order of the file. Where one of them could not be read, the problem
        may be caused by its default.
        """
        return tuple(dict.fromkeys([*self.message.split(KEY_MARK)[1::2], *self.others]))

    def __str__(self) -> str:
        return self.text

    def __format__(self, form: str) -> str:
        """Formats it within another message, which is then about the same keys."""
        return self.message


Problems = Iterator[Problem | str]  # what a check yields


class ConfigError(ValueError):
    """Mistakes in the user's input: `problems`. Each names key, value, arithmetic and remedy; the CLI exits with code 2."""

    tells_what_to_do = True  # the command line prints it without a traceback

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = [Problem.of(given) for given in problems]
        super().__init__("\n".join(problem.text for problem in self.problems))


class ProblemList:
    """The problems found so far, in order."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, problems: Iterable[Problem | str], *keys: str) -> bool:
        """Returns whether there was none, so that a check which builds on this one can run.

        `keys`: those that a plain text is about. Rooms that know no keys of a config yield plain texts.
        """
        added = [Problem.of(given, *keys) for given in problems]
        self.problems += added
        return not added

    def attempt(self, key: str, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Calls `read(...)`. If it raises ConfigError, adds its problems and returns None.

        `key`: what a problem without keys is about; several are separated by spaces.
        """
        try:
            return read(*args, **kwargs)
        except ConfigError as error:
            self.add(error.problems, *key.split())
            return None

    def raise_if_any(self) -> None:
        """Raises one ConfigError of all problems, each once. Does nothing without problems."""
        if self.problems:
            raise ConfigError(*{problem.text: problem for problem in self.problems}.values())


def keys_of(config: T, name: str = "") -> T:
    """Wraps the config as its keys, for messages: `f"{keys_of(config).trainer.seed}"` is `trainer.seed=42`, with the key marked.

    `!r` quotes the value, and the format `key` leaves it out. `name`: of the section that `config` is.
    """
    return cast("T", _Keys(config, name))


def marked(key: str) -> str:
    """Marks a key in a message whose name is put together from parts."""
    return f"{KEY_MARK}{key}{KEY_MARK}"


class _Keys:
    """A value of the config with the name of its key."""

    def __init__(self, value: object, name: str) -> None:
        self._value, self._name = value, name

    def __getattr__(self, part: str) -> _Keys:
        return _Keys(getattr(self._value, part), f"{self._name}.{part}" if self._name else part)

    def __format__(self, form: str) -> str:
        return marked(self._name) + ("" if form == "key" else f"={written(self._value)}")

    def __repr__(self) -> str:
        return f"{marked(self._name)}={self._value!r}"


def written(value: object) -> str:
    """Writes a value as a config has it. Paths are quoted, because they may hold spaces."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return repr(str(value)) if isinstance(value, Path) else "null" if value is None else str(value)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Writes a number with its noun: 1 node, 2 nodes."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
