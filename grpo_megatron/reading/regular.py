"""Bytes and lines of regular files. A FIFO would block for ever, and a device may have no end."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from grpo_megatron.reading import ReadError
from grpo_megatron.reading.bounds import path_problem, shown

SPECIAL_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def read_regular(path: Path | str, max_bytes: int) -> bytes:
    """The content of a regular file. Raises OSError, ReadError."""
    check_regular(path)
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ReadError(f"has {os.fstat(file.fileno()).st_size:,} bytes; at most {max_bytes:,} are read")
    return content


def read_text(path: Path | str, max_bytes: int) -> str:
    """The same as text. Raises OSError, ReadError."""
    try:
        return read_regular(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReadError(f"is not UTF-8 text ({error.reason} at byte {error.start})") from None


def lines_of(path: Path | str, max_bytes: int) -> Iterator[bytes | ReadError]:
    """Every line without its newline, or why it cannot be read: it is longer than `max_bytes`. Raises OSError, ReadError."""
    check_regular(path)
    with open(path, "rb") as file:
        while line := file.readline(max_bytes + 1):
            if len(line) <= max_bytes or line.endswith(b"\n"):
                yield line.removesuffix(b"\n")
                continue
            length = len(line)
            while not line.endswith(b"\n") and (line := file.readline(max_bytes)):
                length += len(line)
            yield ReadError(f"has {length:,} bytes; at most {max_bytes:,} are read")


def check_regular(path: Path | str) -> None:
    """Raises ReadError unless `path` is a regular file or a link to one; OSError if there is none."""
    if problem := path_problem(path):
        raise ReadError(f"cannot be opened: {problem}")
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind in SPECIAL_KINDS:
        raise ReadError(f"is {SPECIAL_KINDS[kind]}, not a regular file")


def special_file_in(folder: Path) -> str | None:
    """Names a FIFO, socket or device in a folder that a library is going to read, or in its subfolders. None: no such file."""
    entries = sorted(folder.iterdir())
    for entry in entries:
        if entry.is_dir():
            with contextlib.suppress(PermissionError):
                entries += sorted(entry.iterdir()) if entry.parent == folder else []
        try:
            check_regular(entry)
        except ReadError as error:
            return f"{shown(str(entry.relative_to(folder)))}, which {error}"
        except OSError:  # a link that leads nowhere
            continue
    return None
