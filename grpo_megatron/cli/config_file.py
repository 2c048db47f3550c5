"""Reads the config file: YAML plus `section.key=value` overrides -> Config. An error has one line per wrong key."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from grpo_megatron.config import Config, ConfigError


def load_config(path: Path | str, overrides: list[str] | None = None) -> Config:
    """Read the YAML at `path`, apply `section.key=value` overrides, check types and names. Raises ConfigError."""
    try:
        raw = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config {str(path)!r} is not UTF-8 text: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config {str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"config {str(path)!r} must be a mapping of sections, not {type(raw).__name__}")
    for override in overrides or []:
        _apply_override(raw, override)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error
    *sections, leaf = key.split(".")
    node = raw
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {section!r} is a value, not a section")
    node[leaf] = parsed


def _explain(error: Any) -> str:
    """One line for one pydantic error; for an unknown key with the nearest known key."""
    location = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = _fields_at(error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"; did you mean {'.'.join([*map(str, error['loc'][:-1]), close[0]])!r}?" if close else ""
        return f"unknown key {location!r}{hint} (known here: {', '.join(known)})"
    if error["type"] == "missing":
        return f"missing key {location!r}: it has no default"
    return f"{location}={error['input']!r}: {error['msg']}"


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    model: Any = Config
    for part in location:
        model = model.model_fields[part].annotation
    return list(model.model_fields)
