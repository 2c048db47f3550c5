"""Bounds: how much of a value a message shows, and which texts, paths and integers are accepted."""

from __future__ import annotations

import os

MAX_SHOWN = 200  # characters of one value in a message
MAX_NUMBER = 100  # characters of one number in a file: Python converts longer ones in quadratic time
MAX_COMPONENT, MAX_PATH = 255, 4096  # bytes of a file's name and of a path, on every usual file system of Linux
MAX_INTEGER = 2**63 - 1


def cut(text: str, limit: int = MAX_SHOWN) -> str:
    """The text, or its beginning with the number of characters that are left out."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit:,} more characters)"


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """`repr(value)`, cut. A long text is cut before `repr` copies it."""
    if isinstance(value, str):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}... ({len(value) - limit:,} more characters)"
    try:
        return cut(repr(value), limit)
    except (ValueError, RecursionError):  # an integer with too many digits, or a table nested too deeply
        return f"a value of type {type(value).__name__} that cannot be shown"


def text_problem(text: str) -> str | None:
    """Why a text of a config cannot be used: a path or an argument of a program cannot hold NUL."""
    return "it contains the character NUL" if "\0" in text else surrogate_problem(text)


def surrogate_problem(text: str) -> str | None:
    """Why a text cannot be encoded. JSON and YAML can spell half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"it contains {text[error.start]!a}, half of a surrogate pair, which is no character"
    return None


def path_problem(path: str | os.PathLike[str]) -> str | None:
    """Why no file system can hold this path."""
    text = os.fspath(path)
    if problem := text_problem(text):
        return problem
    longest = max(len(part.encode()) for part in text.split("/"))
    if longest > MAX_COMPONENT:
        return f"a name in it has {longest:,} bytes; file systems take at most {MAX_COMPONENT}"
    if len(text.encode()) > MAX_PATH:
        return f"it has {len(text.encode()):,} bytes; a path may have at most {MAX_PATH:,}"
    return None


def integer_problem(value: int) -> str | None:
    """Why an integer cannot be passed on: torch and vLLM take signed integers of 64 bits."""
    if -MAX_INTEGER <= value <= MAX_INTEGER:
        return None
    return f"it needs {value.bit_length():,} bits; an integer may have 63 and a sign"
