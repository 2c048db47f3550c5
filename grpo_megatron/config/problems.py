"""Problems: messages for the user, one per mistake. They are collected, so that one start shows every mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

from grpo_megatron.config.section import ConfigError

P = ParamSpec("P")
T = TypeVar("T")
Problems = Iterator[str]  # what a check yields: each message names the key, its value, the arithmetic and the remedy


class ProblemList:
    """The problems found so far, in order."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, problems: Iterable[str]) -> bool:
        """Returns whether there was none, so that a check which builds on this one can run."""
        before = len(self.messages)
        self.messages += problems
        return len(self.messages) == before

    def attempt(self, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """`read(...)`. If it raises ConfigError, its message becomes a problem and the result is None."""
        try:
            return read(*args, **kwargs)
        except ConfigError as error:
            self.messages.append(str(error))
            return None

    def raise_if_any(self) -> None:
        """One ConfigError of all problems, each once. Does nothing without problems."""
        if self.messages:
            raise ConfigError("\n".join(dict.fromkeys(self.messages)))
