"""Rows "name   text" of a printed plan: all texts begin in the same column, and long ones go on below it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

NAME_WIDTH = 18


def named_row(name: str, text: str) -> str:
    return f"{name:<{NAME_WIDTH}}{text}"


def named_rows(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    return (named_row(name, text) for name, text in pairs)


def fitted_row(line: str, width: int) -> list[str]:
    """The row in lines of at most `width` characters, where its words allow it. A line that is no row stays as it is."""
    name, text = line[:NAME_WIDTH], line[NAME_WIDTH:]
    is_row = name[-1:] == " " and text[:1].strip() and (name[0].strip() or not name.strip())
    if len(line) <= width or not is_row:
        return [line]
    return textwrap.wrap(
        line, width, subsequent_indent=" " * NAME_WIDTH, break_on_hyphens=False, break_long_words=False
    )
