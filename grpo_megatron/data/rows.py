"""Rows of a data file: .jsonl (one object a line) or .json (a list of objects). All mistakes of a file in one error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from grpo_megatron.config import ConfigError

T = TypeVar("T")
SHOWN_PROBLEMS = 5


def read_rows(path: Path | str, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    """`parse(row)` of every row of the file, in order. Blank lines are skipped.

    `parse` raises ValueError for a row that is wrong. Raises ConfigError (a ValueError): unreadable or empty file, or
    wrong rows, the first few of them with their line and the count of the rest.
    """
    path = Path(path)
    parsed: list[T] = []
    problems: list[str] = []
    for place, row in _raw_rows(path):
        try:
            if isinstance(row, ValueError):
                raise row
            if not isinstance(row, dict):
                raise ValueError(f"is {_type_name(row)}, not an object")
            parsed.append(parse(row))
        except ValueError as error:
            problems.append(f"  {place}: {error}")
    if problems:
        more = f"\n  and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        total = len(problems) + len(parsed)
        shown = "\n".join(problems[:SHOWN_PROBLEMS])
        raise ConfigError(f"data file {str(path)!r}: {len(problems)} of {total} rows are wrong:\n{shown}{more}")
    if not parsed:
        raise ConfigError(f"data file {str(path)!r} has no rows")
    return parsed


def text_field(row: dict[str, Any], field: str, empty: bool = False) -> str:
    """The string `row[field]`. Raises ValueError when it is missing, of another type, or blank (unless `empty`)."""
    if field not in row:
        raise ValueError(f"field {field!r} is missing (fields: {', '.join(map(repr, row)) or 'none'})"[:300])
    value = row[field]
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} is {_type_name(value)}, not a string")
    if not empty and not value.strip():
        raise ValueError(f"field {field!r} is empty")
    return value


def _raw_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, row or ValueError) of every row."""
    if path.suffix not in (".jsonl", ".json"):
        raise ConfigError(f"data file {str(path)!r}: the name must end with .jsonl or .json")
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ConfigError(f"cannot read data file {str(path)!r}: {error.strerror}") from error
    if path.suffix == ".json":
        rows = _parse(content)
        if isinstance(rows, ValueError):
            raise ConfigError(f"data file {str(path)!r}: {rows}")
        if not isinstance(rows, list):
            raise ConfigError(f"data file {str(path)!r} must be a list of objects, not {_type_name(rows)}")
        yield from ((f"row {number}", row) for number, row in enumerate(rows))
        return
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield f"line {number}", _parse(line)


def _parse(content: bytes) -> Any:
    """The JSON value, or the ValueError that says why it is none: returned, so that it hides no other."""
    try:
        return json.loads(content)
    except UnicodeDecodeError:
        return ValueError("is not UTF-8")
    except json.JSONDecodeError as error:
        return ValueError(f"is not JSON ({error.msg} at line {error.lineno}, column {error.colno})")
    except RecursionError:
        return ValueError("is not JSON (nested too deeply)")


def _type_name(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", type(None): "null"}.get(
        type(value), type(value).__name__
    )
