"""RowFile: the rows of one data file by number, without holding them. `open_rows` opens any format.

    LineFile     .jsonl             the offset of each row: 8 bytes per row
    TableFile    .csv               the same
    ArrayFile    .json              the same (array_file.py)
    ArrowRows    .parquet, .arrow   record batches, memory-mapped (arrow_rows.py)
    Shards       a folder           the files of one split, one after the other (dataset_folder.py)

A row that cannot be parsed is returned as a ValueError, so that a check can report all of them.
"""

from __future__ import annotations

import bisect
import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from grpo_megatron.config import ConfigError
from grpo_megatron.data.array_file import open_list
from grpo_megatron.data.arrow_rows import ARROW_SUFFIXES, open_arrow
from grpo_megatron.data.dataset_folder import files_of_split
from grpo_megatron.data.offset_file import OffsetFile, Offsets
from grpo_megatron.data.rows import BOM, MAX_ROW, named_failures, reader_of
from grpo_megatron.reading import ReadError, check_regular, parse_lines, parsed_line

MAY_BE_BLANK = np.isin(np.arange(256), list(b" \t\n\r\x0b\x0c" + BOM[:1]))  # by the first byte of a line


class RowFile(Protocol):
    def __len__(self) -> int: ...

    def rows(self, start: int, stop: int) -> Iterator[Any]:
        """The values of rows [start, stop) in order; a ValueError for a row that cannot be parsed. Raises ConfigError."""

    def place(self, number: int) -> str:
        """Where a row stands, for messages: "line 17"."""


def open_rows(path: Path) -> RowFile:
    """The rows of a file, or of a folder with one split. Raises ConfigError: not there, unreadable, without rows."""
    with named_failures(path):
        opened = [_open(file) for file in files_of_split(path)]
    rows = opened[0] if len(opened) == 1 else Shards(opened)
    if not len(rows):
        raise ConfigError(f"data file {str(path)!r} has no rows")
    return rows


def _open(path: Path) -> RowFile:
    reader_of(path)
    if path.suffix in ARROW_SUFFIXES:
        return open_arrow(path)
    check_regular(path)
    if path.suffix == ".json":
        return open_list(path)
    return LineFile(path) if path.suffix == ".jsonl" else TableFile(path)


class LineFile(OffsetFile):
    """One JSON value per line. Blank lines are no rows."""

    def rows(self, start: int, stop: int) -> Iterator[Any]:
        while start < stop:
            end = self._end_of_block(start, stop)
            if end > start:
                yield from parse_lines(self._lines(start, end))
            else:
                end = start + 1
                yield self._long_row(start)
            start = end

    def _lines(self, start: int, end: int) -> list[bytes]:
        """The lines of rows [start, end)."""
        lines = self._bytes_of(start, end).split(b"\n")
        if not lines[-1]:  # behind the last newline
            lines.pop()
        if len(lines) > end - start:  # some are blank
            lines = [line for line in lines if line.strip()]
        if len(lines) != end - start:
            raise self._was_changed()
        if start == 0:
            lines[0] = lines[0].removeprefix(BOM)
        return lines

    def _long_row(self, number: int) -> Any:
        with self._open_at(number) as file:
            line: bytes = file.readline(MAX_ROW + 2)
            if len(line.removesuffix(b"\n")) <= MAX_ROW:
                return parsed_line(line.removeprefix(BOM) if number == 0 else line)
            length = len(line)
            while not line.endswith(b"\n") and (line := file.readline(MAX_ROW)):
                length += len(line)
            return ReadError(f"has {length:,} bytes; at most {MAX_ROW:,} are read")

    def place(self, number: int) -> str:
        return f"line {self._lines_before(int(self._starts[number])) + 1}"

    def _find_starts(self) -> Offsets:
        found, suspects, base, begins_line = [], [], 0, True
        with self.path.open("rb") as file:
            while block := file.read(self.BLOCK):
                data = np.frombuffer(block, np.uint8)
                starts = np.flatnonzero(data[:-1] == ord("\n")) + 1
                if begins_line:
                    starts = np.concatenate([[0], starts])
                found.append((base, starts.astype(np.uint32)))
                suspects.append(starts[MAY_BE_BLANK[data[starts]]] + base)
                base, begins_line = base + len(block), block.endswith(b"\n")
            if not found:
                return np.zeros(0, np.int64)
            blank = [offset for offset in np.concatenate(suspects).tolist() if self._is_blank(file, offset)]
        every, count = np.empty(sum(len(starts) for _, starts in found), np.int64), 0
        for begin, offsets in found:
            part = every[count : count + len(offsets)]
            part[:] = offsets
            part += begin
            count += len(offsets)
        return np.delete(every, np.searchsorted(every, blank)) if blank else every

    @staticmethod
    def _is_blank(file: Any, offset: int) -> bool:
        file.seek(offset)
        line: bytes = file.readline()
        return not (line.removeprefix(BOM) if offset == 0 else line).strip()


class TableFile(OffsetFile):
    """A table with a header (RFC 4180), whose values are all texts."""

    def rows(self, start: int, stop: int) -> Iterator[Any]:
        if start >= stop:
            return
        with self._open_at(start) as file:
            records = (cells for cells in csv.reader(map(_decoded, file), strict=True) if cells)
            for cells in itertools.islice(records, stop - start):
                if len(cells) == len(self.header):
                    yield dict(zip(self.header, cells, strict=True))
                else:
                    yield ReadError(f"has {len(cells)} cells, and the header has {len(self.header)}")

    def place(self, number: int) -> str:
        with self._open_at(number) as file:
            reader = csv.reader(map(_decoded, file))
            next(reader)
            return f"line {self._lines_before(int(self._starts[number])) + reader.line_num}"

    def _find_starts(self) -> Offsets:
        csv.field_size_limit(MAX_ROW)
        end, starts = 0, []

        def lines() -> Iterator[str]:
            nonlocal end
            for line in file:
                text = _decoded(line.removeprefix(BOM) if end == 0 else line)
                end += len(line)
                yield text

        with self.path.open("rb") as file:
            reader = csv.reader(lines(), strict=True)
            try:
                self.header = next(reader, [])
                if len(set(self.header)) < len(self.header):
                    raise ReadError(f"has a column twice in its header: {', '.join(map(repr, self.header))}")
                start = end
                for cells in reader:
                    if cells:
                        starts.append(start)
                    start = end
            except csv.Error as error:
                raise ReadError(f"is no CSV ({error} at line {reader.line_num})") from None
        return np.array(starts, np.int64)


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ReadError("is not UTF-8") from None


class Shards:
    """Several files as one."""

    def __init__(self, files: Sequence[RowFile]) -> None:
        self.files = files
        self._ends = list(itertools.accumulate(map(len, files)))

    def __len__(self) -> int:
        return self._ends[-1]

    def rows(self, start: int, stop: int) -> Iterator[Any]:
        for file, end in zip(self.files, self._ends, strict=True):
            first = end - len(file)
            if first < stop and start < end:
                yield from file.rows(max(start - first, 0), min(stop - first, len(file)))

    def place(self, number: int) -> str:
        shard = bisect.bisect_right(self._ends, number)
        first = self._ends[shard] - len(self.files[shard])
        return f"shard {shard}, {self.files[shard].place(number - first)}"
