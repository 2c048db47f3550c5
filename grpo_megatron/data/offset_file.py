"""OffsetFile: a text file whose rows are known by the offsets at which they begin, and read in blocks.

A file that changes while it is open raises ConfigError: its offsets would point into other rows.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from grpo_megatron.config import ConfigError

ROWS_AT_ONCE = 1024

Offsets = np.ndarray[Any, np.dtype[np.int64]]


class OffsetFile:
    """Rows that begin at known offsets of a file."""

    BLOCK: ClassVar[int] = 1 << 22  # bytes that are scanned or read at once

    def __init__(self, path: Path) -> None:
        self.path, self._identity = path, _identity(os.stat(path))
        self._end = self._identity[0]  # where the last row ends
        self._starts = self._find_starts()

    def __len__(self) -> int:
        return len(self._starts)

    def _find_starts(self) -> Offsets:
        raise NotImplementedError

    def _open_at(self, number: int) -> Any:
        file = self.path.open("rb")
        if _identity(os.fstat(file.fileno())) != self._identity:
            file.close()
            raise self._was_changed()
        file.seek(int(self._starts[number]))
        return file

    def _was_changed(self) -> ConfigError:
        return ConfigError(f"data file {str(self.path)!r} was changed while it was in use; start again")

    def _end_of_block(self, start: int, stop: int) -> int:
        """The row up to which rows are read at once: BLOCK bytes at most. `start` itself where its row is longer."""
        rows = min(stop, start + ROWS_AT_ONCE)
        ends = self._starts[start + 1 : rows + 1]
        if rows == len(self):
            ends = np.append(ends, self._end)
        return start + int(np.searchsorted(ends, self._starts[start] + self.BLOCK, side="right"))

    def _bytes_of(self, start: int, end: int) -> bytes:
        """From the beginning of row `start` to that of row `end`."""
        with self._open_at(start) as file:
            last = int(self._starts[end]) if end < len(self) else self._end
            content: bytes = file.read(last - int(self._starts[start]))
        return content

    def _lines_before(self, offset: int) -> int:
        count = 0
        with self.path.open("rb") as file:
            while block := file.read(min(self.BLOCK, offset)):
                count, offset = count + block.count(b"\n"), offset - len(block)
        return count


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns
