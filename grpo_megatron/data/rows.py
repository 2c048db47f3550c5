"""Rows of a data file: .jsonl (one object per line), .json (a list of objects), .csv (a header, then texts), .parquet, .arrow.

One error names all mistakes of a file. `read_rows` holds all rows of a file; row_file.py reads them by number.
"""

from __future__ import annotations

import contextlib
import csv
import glob
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from grpo_megatron.config import ConfigError
from grpo_megatron.data.arrow_rows import open_arrow
from grpo_megatron.data.dataset_folder import files_of_split
from grpo_megatron.reading import (
    ReadError,
    check_regular,
    cut,
    lines_of,
    parse_json,
    parsed_line,
    read_regular,
    shown,
    surrogate_problem,
)

T = TypeVar("T")
SHOWN_PROBLEMS = 5
BOM = b"\xef\xbb\xbf"
MAX_ROW = 1 << 22  # bytes of a line, and characters of a field: a text of a million tokens
MAX_FILE = 1 << 31  # bytes of a .json file, which is read as a whole

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
    for place, _, row in raw_rows(path):
        try:
            if isinstance(row, ValueError):
                raise row
            if not isinstance(row, dict):
                raise ValueError(f"is {type_name(row)}, not an object")
            parsed.append(parse(row))
        except ValueError as error:
            problems.append(f"  {place}: {cut(str(error), 500)}")
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
    value = row.get(field)
    if is_plain_text(value):
        return str(value)  # most fields, without the time of the rest
    if field not in row:
        raise missing_field([field], row)
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} is {type_name(value)}, not a string")
    if len(value) > MAX_ROW:
        raise ValueError(f"field {field!r} has {len(value):,} characters; at most {MAX_ROW:,} are read")
    if problem := surrogate_problem(value):
        raise ValueError(f"field {field!r}: {problem}")
    if not empty and not value.strip():
        raise ValueError(f"field {field!r} is empty")
    return value


def is_plain_text(value: Any) -> bool:
    """Whether `text_field` certainly accepts a value: quick, and false for some texts that it accepts too."""
    return type(value) is str and value.isascii() and 0 < len(value) <= MAX_ROW and not value.isspace()


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


def raw_rows(path: Path) -> Iterator[tuple[str, bytes | None, Any]]:
    """(place, line, row or ValueError) of every row of a file or of a folder (dataset_folder.py), in order.

    `line` is None except in .jsonl files. Raises ConfigError.
    """
    with named_failures(path):
        for file in files_of_split(path):
            yield from reader_of(file)(file)


def reader_of(path: Path) -> Callable[[Path], Iterator[tuple[str, bytes | None, Any]]]:
    """What reads a file of this name. Raises ConfigError: no format has this name, or it is a pattern without a match."""
    if path.suffix not in READERS:
        raise ConfigError(f"data file {str(path)!r}: the name must end with {' or '.join(READERS)}")
    if glob.has_magic(str(path)) and not path.exists():
        raise ConfigError(f"data file {shown(str(path))}: no file matches this pattern")
    return READERS[path.suffix]


@contextlib.contextmanager
def named_failures(path: Path) -> Iterator[None]:
    """An unreadable file is a ConfigError that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot read data file {shown(str(path))}: {error.strerror}") from error
    except ReadError as error:
        raise ConfigError(f"data file {shown(str(path))} {error}") from error


def _rows_of_arrow(path: Path) -> Iterator[tuple[str, None, Any]]:
    rows = open_arrow(path)
    yield from ((f"row {number}", None, row) for number, row in enumerate(rows.rows(0, len(rows))))


def _rows_of_list(path: Path) -> Iterator[tuple[str, None, Any]]:
    rows = parse_json(read_regular(path, MAX_FILE).removeprefix(BOM))
    if not isinstance(rows, list):
        raise ReadError(f"must be a list of objects, not {type_name(rows)}")
    yield from ((f"row {number}", None, row) for number, row in enumerate(rows))


def _rows_of_lines(path: Path) -> Iterator[tuple[str, bytes, Any]]:
    for number, line in enumerate(lines_of(path, MAX_ROW), start=1):
        if isinstance(line, ReadError):
            yield f"line {number}", b"", line
            continue
        line = line.removeprefix(BOM) if number == 1 else line
        if line.strip():
            yield f"line {number}", line, parsed_line(line)


def _rows_of_table(path: Path) -> Iterator[tuple[str, None, Any]]:
    """The rows of a .csv file (RFC 4180), whose values are all texts."""
    check_regular(path)
    csv.field_size_limit(MAX_ROW)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise ReadError(f"has a column twice in its header: {', '.join(map(repr, header))}")
            for cells in reader:
                place = f"line {reader.line_num}"
                if len(cells) == len(header):
                    yield place, None, dict(zip(header, cells, strict=True))
                elif cells:
                    yield place, None, ReadError(f"has {len(cells)} cells, and the header has {len(header)}")
        except csv.Error as error:
            raise ReadError(f"is no CSV ({error} at line {reader.line_num})") from None
        except UnicodeDecodeError:
            raise ReadError("is not UTF-8") from None


READERS: dict[str, Callable[[Path], Iterator[tuple[str, bytes | None, Any]]]] = {
    ".jsonl": _rows_of_lines,
    ".json": _rows_of_list,
    ".csv": _rows_of_table,
    ".parquet": _rows_of_arrow,
    ".arrow": _rows_of_arrow,
}


def type_name(value: Any) -> str:
    """The type of a JSON value, for messages."""
    return {dict: "an object", list: "a list", str: "a string", type(None): "null"}.get(
        type(value), type(value).__name__
    )
