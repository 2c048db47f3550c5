"""PassThrough: a table of the config that is passed to another package unread, and the check of its names.

The names are read from the source files of the installed package. Nothing is imported: importing Megatron-Core or vLLM
takes seconds, and an error about a wrong name should not wait for it. If the package is not installed, no name is
reported as unknown.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PassThrough:
    """`key` is the table's name in the config. `sources` maps a file of `package` to the class whose annotated fields
    are the allowed names. `owned` maps each name that this program sets itself, or refuses, to the user's remedy; a name
    with a dot is a key of a table: `compilation_config.backend`."""

    key: str
    package: str
    sources: Mapping[str, str]
    owned: Mapping[str, str]

    def problems(self, given: Mapping[str, Any]) -> Iterator[str]:
        """One line per name that this program sets itself, or that the package does not know."""
        for name, value in self.owned_by(given).items():
            yield f"{self.key}.{name}={value!r} cannot be set here: {self.owned[name]}"
        names = [str(name) for name in given if name not in self.owned]
        known = _fields(self.package, self.sources) if names else set()
        for name in names:
            if known and name not in known:
                close = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f"did you mean {close[0]!r}?" if close else "take it out"
                owner = next(iter(self.sources.values()))
                yield f"unknown key {f'{self.key}.{name}'!r}: {owner} of {self.package} has no such field; {hint}"

    def owned_by(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The given names that are in `owned`, and their values."""
        found = {}
        for name in self.owned:
            table, _, key = name.rpartition(".")
            values = given.get(table) if table else given
            if isinstance(values, Mapping) and key in values:
                found[name] = values[key]
        return found


def _fields(package: str, sources: Mapping[str, str]) -> set[str]:
    """Annotated fields of the classes, {file: class}. Empty if the package or one of the classes is not found."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # raised for the parent package
        return set()
    if spec is None or not spec.submodule_search_locations:
        return set()
    folder = Path(next(iter(spec.submodule_search_locations)))
    found: set[str] = set()
    for file, name in sources.items():
        try:
            tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError):
            return set()
        bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        targets = [node.target for body in bodies for node in body if isinstance(node, ast.AnnAssign)]
        fields = {target.id for target in targets if isinstance(target, ast.Name)}
        if not fields:
            return set()
        found |= fields
    return found
