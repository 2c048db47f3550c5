"""Reads the config file: YAML plus `section.key=value` overrides -> Config. An error has one line per wrong key."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from grpo_megatron.cli.partial_config import read_without_wrong_keys, without_places
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.reading import MAX_LEVELS, MAX_YAML, ReadError, cut, parse_yaml, read_text, shown

Defaults = Callable[[dict[str, Any]], dict[str, dict[str, Any]]]  # the file's content -> section -> key -> value
MAX_EXPLAINED = 50  # wrong keys that are shown


class WrongKeys(ConfigError):
    """Keys that cannot be read: `keys`. `config` is the file with their defaults instead; None if there is none.

    The checks that follow can still look at the other keys (mistakes.py). A problem that names one of `keys` may be caused by
    the default.
    """

    def __init__(self, lines: list[str], config: Config | None, keys: set[str]) -> None:
        super().__init__("\n".join(lines))
        self.config, self.keys = config, keys


def load_config(path: Path | str, overrides: list[str] | None = None, defaults: Defaults | None = None) -> Config:
    """Read the YAML at `path`, apply `section.key=value` overrides, check types and names. Raises ConfigError.

    `defaults` makes the values of keys that are set nowhere, from the file's content with the overrides.
    """
    raw, wrong = read_raw(path, overrides)
    for section, values in (defaults(raw) if defaults else {}).items():
        given = raw.setdefault(section, {})
        if isinstance(given, dict):
            raw[section] = {**values, **given}
    config, mistakes = read_without_wrong_keys(raw)
    lines = [*wrong.values(), *(_explain(mistake) for mistake in mistakes[:MAX_EXPLAINED])]
    if len(mistakes) > MAX_EXPLAINED:
        lines.append(f"and {len(mistakes) - MAX_EXPLAINED:,} more keys are wrong")
    if lines or config is None:
        keys = {override.partition("=")[0] for override in wrong}
        keys |= {key for mistake in mistakes for key in _named_by(mistake)}
        raise WrongKeys(lines, config, keys)
    return config


def read_raw(path: Path | str, overrides: list[str] | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """(the file's content with the overrides, override -> what is wrong with it). Raises ConfigError: unreadable file."""
    try:
        text = read_text(path, MAX_YAML)
    except OSError as error:
        raise ConfigError(f"cannot read config {shown(str(path))}: {error.strerror}") from error
    except ReadError as error:
        raise ConfigError(f"config {shown(str(path))} {error}") from error
    try:
        raw = parse_yaml(text)
    except ReadError as error:
        raise ConfigError(f"config {shown(str(path))} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"config {shown(str(path))} must be a mapping of sections, not {type(raw).__name__}")
    problems = {}
    for override in overrides or []:
        try:
            _apply_override(raw, override)
        except ConfigError as error:
            problems[override] = str(error)
    return raw, problems


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {shown(override)} is not of the form section.key=value")
    try:
        parsed = parse_yaml(value)
    except ReadError as error:
        raise ConfigError(f"override {shown(override)}: the value is not valid YAML: {error}") from error
    *sections, leaf = key.split(".")
    if len(sections) > MAX_LEVELS:
        raise ConfigError(f"override {shown(override)}: the key has {len(sections):,} sections within each other")
    node = raw
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {shown(override)}: {shown(section)} is a value, not a section")
    node[leaf] = parsed


def _named_by(error: Any) -> set[str]:
    """The keys whose value is not known because of one pydantic error: its own, and the one that was probably meant."""
    *section, leaf = [str(part) for part in error["loc"]] or [""]
    close = []
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(leaf[:100], _fields_at(error["loc"][:-1]), n=1)
    return {without_places([*section, name]) for name in [leaf, *close]}


def _explain(error: Any) -> str:
    """One line for one pydantic error; for an unknown key with the nearest known key."""
    location = cut(".".join(str(part) for part in error["loc"]))
    if error["type"] == "extra_forbidden":
        from grpo_megatron.migration.hints import (  # the tables of other trainers, only for this
            explained,
            known_elsewhere,
        )

        known = _fields_at(error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1])[:100], known, n=1)
        elsewhere = known_elsewhere(location)
        if close and elsewhere is None:
            hint = f"; did you mean {'.'.join([*map(str, error['loc'][:-1]), close[0]])!r}?"
        else:
            hint = "".join(f"; {text}" for text in (elsewhere, explained(error["input"], location)) if text)
        return f"unknown key {location!r}{hint} (known here: {', '.join(known)})"
    if error["type"] == "missing":
        return f"missing key {location!r}: it has no default"
    return f"{location}={shown(error['input'])}: {cut(error['msg'], 1000)}"


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    model: Any = Config
    for part in location:
        if isinstance(part, str):  # a number is a place in a list of sections
            # get_args: of a mapping from the user's names to sections, or of an optional one
            kind = model.model_fields[part].annotation if hasattr(model, "model_fields") else get_args(model)[1]
            model = next((option for option in (kind, *get_args(kind)) if hasattr(option, "model_fields")), kind)
    return list(model.model_fields)
