"""Names in a YAML file -> functions: a registered name, or `package.module:function` of the user's own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def import_function(path: str) -> object:
    """Import `package.module:attribute`. Raises ValueError that says which half of the path is wrong."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{path!r}: cannot import module {module_name!r} ({error}); is it on PYTHONPATH?") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ValueError(f"{path!r}: module {module_name!r} has no attribute {attribute!r}") from None


class Registry(Generic[T]):
    """A table of functions of one kind. `kind` names it in errors ("policy loss", "reward", ...)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: `@losses.register("vanilla")`."""

        def add(entry: T) -> T:
            assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry called `name`, or the object at `package.module:attribute`. Raises ValueError."""
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return import_function(name)  # type: ignore[return-value]
        close = difflib.get_close_matches(name, self._entries, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        known = ", ".join(sorted(self._entries))
        raise ValueError(f"unknown {self.kind} {name!r}{hint} (known: {known}; or package.module:function)")

    def names(self) -> list[str]:
        return sorted(self._entries)
