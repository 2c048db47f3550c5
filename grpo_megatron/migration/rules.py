"""Rule: what becomes of one key of another trainer. A trainer is a table of rules (verl.py, trl.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.config.keys import ConfigKey

Settings = dict[str, Any]  # their keys -> values
Convert = Callable[[Any, Settings], "Mapping[str, Any] | str"]  # -> our keys and values, or why there are none


@dataclass(frozen=True)
class Rule:
    """`ours`: the key of the same meaning; None: there is none, and `note` says why.

    `convert(value, settings)` returns what is to be written instead of `{ours: value}`, or a note for this value.
    """

    ours: str | None = None
    note: str = ""
    convert: Convert | None = None

    def apply(self, value: Any, settings: Settings) -> Mapping[str, Any] | str:
        if self.convert is not None:
            return self.convert(value, settings)
        return self.note if self.ours is None else {self.ours: value}


@dataclass(frozen=True)
class OtherTrainer:
    """One trainer whose configs are read. A rule for `a.b` also holds for all keys below it that have no rule."""

    name: str
    rules: Mapping[str, Rule]
    defaults: Mapping[str, Any]  # that trainer's defaults, where this program's differ
    prefixes: tuple[str, ...] = ()  # a key without a rule has our key's meaning if it is one after this is removed
    implied: Settings = field(default_factory=dict)  # our keys and values that hold for each run of that trainer

    def rule(self, key: str, known: Mapping[str, ConfigKey]) -> Rule | None:
        """The rule for their `key`; `known` are our keys. None: no key of that trainer that we know."""
        if key in self.rules:
            return self.rules[key]
        for prefix in self.prefixes:
            name = key.removeprefix(prefix)
            if name in known or any(name.startswith(f"{parent}.") and _is_mapping(known[parent]) for parent in known):
                return Rule(name)
        parents = key.split(".")
        above = (".".join(parents[:length]) for length in range(len(parents) - 1, 0, -1))
        return next(
            (self.rules[parent] for parent in above if parent in self.rules and not self.rules[parent].ours), None
        )


def _is_mapping(key: ConfigKey) -> bool:
    return isinstance(key.default, dict)


def same(ours: str) -> Rule:
    """The value is written as it is."""
    return Rule(ours)


def values(ours: str, table: Mapping[Any, Any], otherwise: str) -> Rule:
    """Values have other names here. `otherwise`: the note for a value that is not in the table."""

    def convert(value: Any, settings: Settings) -> Mapping[str, Any] | str:
        return {ours: table[value]} if isinstance(value, str | int | bool) and value in table else otherwise

    return Rule(ours, convert=convert)


def listed(ours: str) -> Rule:
    """One value or a list of them; ours is a list."""
    return Rule(ours, convert=lambda value, settings: {ours: value if isinstance(value, list) else [value]})


def unless(ours: str, off: Any, instead: Any = None) -> Rule:
    """The value `off` means that the setting is off, which is `instead` here."""
    return Rule(ours, convert=lambda value, settings: {ours: instead if value == off else value})


def none(note: str) -> Rule:
    """There is no such key here."""
    return Rule(note=note)
