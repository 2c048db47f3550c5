"""Rows of a data file: .jsonl (one object per line) or .json (a list of objects). One error names all mistakes of a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from grpo_megatron.config import ConfigError

T = TypeVar("T")
SHOWN_PROBLEMS = 5

Messages = list[dict[str, Any]]  # [{"role": "user", "content": "..."}, ...]
Question = str | Messages


def read_rows(path: Path | str, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    """`parse(row)` of every row of the file, in order. Blank lines are skipped.

    `parse` raises ValueError for a row that is wrong. Raises ConfigError (a ValueError) for an unreadable or empty file,
    and for wrong rows: the message has the first few with their lines, and the number of the others.
    """
    path = Path(path)
    parsed: list[T] = []
    problems: list[str] = []
    for place, row in _raw_rows(path):
        try:
            if isinstance(row, ValueError):
                raise row
            if not isinstance(row, dict):
                raise ValueError(f"is {type_name(row)}, not an object")
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
        raise missing_field([field], row)
    value = row[field]
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} is {type_name(value)}, not a string")
    if not empty and not value.strip():
        raise ValueError(f"field {field!r} is empty")
    return value


def missing_field(fields: Sequence[str], row: dict[str, Any]) -> ValueError:
    """The error for a row that has none of `fields`."""
    shown = ", ".join(map(repr, dict.fromkeys(fields)))
    what = f"field {shown} is missing" if len(fields) == 1 else f"none of the fields {shown} is there"
    return ValueError(f"{what} (fields: {', '.join(map(repr, row)) or 'none'})"[:300])


def read_question(row: dict[str, Any], field: str = "prompt") -> Question:
    """`row[field]`: text, or chat messages that do not end with the assistant's turn. Raises ValueError."""
    if not isinstance(row.get(field), list):
        return text_field(row, field)
    messages: list[Any] = row[field]
    if not messages:
        raise ValueError(f"field {field!r} is empty")
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f"field {field!r}: a message must be an object with role and content")
        text_field(message, "role")
        text_field(message, "content")
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"field {field!r} ends with the assistant's turn; the policy writes the response")
    return messages


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
            raise ConfigError(f"data file {str(path)!r} must be a list of objects, not {type_name(rows)}")
        yield from ((f"row {number}", row) for number, row in enumerate(rows))
        return
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield f"line {number}", _parse(line)


def _parse(content: bytes) -> Any:
    """The JSON value, or a ValueError. It is returned, not raised, so that the rows after it are read too."""
    try:
        return json.loads(content)
    except UnicodeDecodeError:
        return ValueError("is not UTF-8")
    except json.JSONDecodeError as error:
        return ValueError(f"is not JSON ({error.msg} at line {error.lineno}, column {error.colno})")
    except RecursionError:
        return ValueError("is not JSON (nested too deeply)")


def type_name(value: Any) -> str:
    """The type of a JSON value, for messages."""
    return {dict: "an object", list: "a list", str: "a string", type(None): "null"}.get(
        type(value), type(value).__name__
    )
