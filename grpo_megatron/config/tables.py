"""Tables in YAML files: a file that a user names, and the package's own by name (tasks, methods, other trainers)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from grpo_megatron.config.problems import ConfigError
from grpo_megatron.registry import did_you_mean
from grpo_megatron.untrusted import MAX_YAML, ReadError, parse_yaml, read_text, reason_of, shown


def read_yaml_table(path: Path | str, kind: str) -> tuple[str, dict[str, Any]]:
    """Reads (the text, the table) of a YAML file. `kind` stands before its path in messages. Raises ConfigError."""
    where = f"{kind} {shown(str(path))}"
    try:
        text = read_text(path, MAX_YAML)
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {reason_of(error)}") from error
    except ReadError as error:
        inside = Path(path) / "config.yaml"
        hint = f"; did you mean {str(inside)!r}?" if kind == "config" and os.path.isfile(inside) else ""
        raise ConfigError(f"{where} {error}{hint}") from error
    try:
        table = parse_yaml(text)
    except ReadError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error
    if table is None:
        raise ConfigError(f"{where} is empty")
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a mapping, not {type(table).__name__}")
    return text, table


def table_names(folder: Path) -> list[str]:
    """Lists the names of a folder's YAML files."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def named_file(folder: Path, name: str, kind: str, others: str = "") -> Path:
    """Finds the YAML file of a name. `others`: further ways to name one, for the message. Raises ConfigError."""
    known = table_names(folder)
    if name not in known:
        listed = f"known: {', '.join(known)}{others}"
        raise ConfigError(f"unknown {kind} {shown(name)}{did_you_mean(name, known)} ({listed})")
    return folder / f"{name}.yaml"


def named_yaml(folder: Path, name: str, kind: str) -> dict[str, Any]:
    """Reads the table of a name. Raises ConfigError."""
    return read_yaml_table(named_file(folder, name, kind), kind)[1]
