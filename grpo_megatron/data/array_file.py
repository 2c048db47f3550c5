"""ArrayFile: the elements of a .json file, which is one list, by the offsets at which they begin.

A scan finds the commas between the elements. It knows brackets and texts, and nothing else of the syntax. Then every element
is parsed once. If that succeeds, the file is right, and its elements are those that a parser of the whole file gives. In all
other cases the whole file is parsed (ListFile): a wrong file then has the usual message, and a rare spelling its rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.data.offset_file import OffsetFile, Offsets
from grpo_megatron.data.rows import BOM, MAX_FILE, raw_rows
from grpo_megatron.reading import SURE_LEVELS, ReadError, parse_lines

# Everything up to the next bracket or comma that is in no text; a quote where a text has no end in the block.
NEXT_MARK = re.compile(rb'(?:[^"\[\]{},]++|"(?:[^"\\]++|\\.)*+")*+([\[\]{},"])', re.DOTALL)
LIST, END, COMMA, QUOTE = b'[],"'
MAX_AWAITED = 1 << 26  # bytes of one text that the scan waits for
SPACES = b" \t\r\n"


class UnclearError(Exception):
    """The whole file has to be parsed: see the header."""


def open_list(path: Path) -> ArrayFile | ListFile:
    """Raises ReadError, OSError: the file is not a list in JSON."""
    try:
        return ArrayFile(path)
    except UnclearError:
        return ListFile(path)


class ArrayFile(OffsetFile):
    """A row is followed by one byte, a comma or the closing bracket. Raises UnclearError."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if any(isinstance(row, ReadError) for row in self.rows(0, len(self))):
            raise UnclearError

    def rows(self, start: int, stop: int) -> Iterator[Any]:
        while start < stop:
            end = max(self._end_of_block(start, stop), start + 1)
            first, content = int(self._starts[start]), self._bytes_of(start, end)
            bounds = [*(self._starts[start:end] - first).tolist(), len(content)]
            # the space: a BOM or a NUL at the beginning of an element would change how its bytes are decoded
            yield from parse_lines([b" " + content[a : b - 1] for a, b in itertools.pairwise(bounds)])
            start = end

    def place(self, number: int) -> str:
        return f"row {number}"

    def _find_starts(self) -> Offsets:
        if self._end > MAX_FILE:
            raise UnclearError
        parts: list[Offsets] = []
        base = depth = 0
        carried = b""
        with self.path.open("rb") as file:
            while block := file.read(self.BLOCK):
                content = carried + block
                found, depth, used = self._scan(content, base, depth)
                parts.append(np.array(found, np.int64))
                base, carried = base + used, content[used:]
                if b"\0" in block or len(carried) > MAX_AWAITED:
                    raise UnclearError
        if depth != -1 or carried.strip(SPACES):
            raise UnclearError
        starts = np.concatenate(parts)
        with self.path.open("rb") as file:
            file.seek(int(starts[-1]))
            is_blank = not file.read(self._end - 1 - int(starts[-1])).strip(SPACES)
        return starts[:-1] if is_blank and len(starts) == 1 else starts

    def _scan(self, content: bytes, base: int, depth: int) -> tuple[list[int], int, int]:
        """(offsets where rows begin, the depth at the end, the bytes that were used) of `content`, which is at `base`.

        Depth 0 is before the list, 1 in it, and -1 behind it. Bytes are not used that the next block continues.
        """
        found, used = [], 0
        while match := NEXT_MARK.match(content, used):
            mark, after = content[match.end() - 1], match.end()
            if mark == QUOTE:
                break
            if depth < 1:
                head = content[used : after - 1]
                if depth or mark != LIST or (head.removeprefix(BOM) if not base + used else head).strip(SPACES):
                    raise UnclearError
            if mark == COMMA:
                is_row = depth == 1
            elif mark in b"[{":
                is_row, depth = depth == 0, depth + 1
            else:
                is_row, depth = False, depth - 1
            if is_row:
                found.append(base + after)
            if depth > SURE_LEVELS or (depth == 0 and mark != END):
                raise UnclearError
            if depth == 0:
                self._end, depth = base + after, -1
            used = after
        return found, depth, used


class ListFile:
    """A list in memory."""

    def __init__(self, path: Path) -> None:
        self._rows = [row for _, _, row in raw_rows(path)]

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, start: int, stop: int) -> Iterator[Any]:
        return iter(self._rows[start:stop])

    def place(self, number: int) -> str:
        return f"row {number}"
