"""RowSet: the rows of several files under one numbering, with a uid for each.

A uid is "source/label/row number". The label of a file is its name without extension. Files of equal names get as many of
their parent folders as tell them apart: a/train.jsonl and b/train.jsonl are "a.train" and "b.train".
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.data.row_file import RowFile, open_rows
from grpo_megatron.data.rows import SHOWN_PROBLEMS, type_name
from grpo_megatron.reading import cut


class RowSet:
    """Raises ConfigError with every file that cannot be read, without files, or for a file that is named twice."""

    def __init__(self, paths: Sequence[Path], source: str) -> None:
        if not paths:
            raise ConfigError("no data files; set data.train_files (data.val_files, sft.train_files)")
        self.paths, self.source = list(map(Path, paths)), source
        self.labels = distinct_labels(self.paths)
        self.files: list[RowFile] = []
        problems = []
        for path in self.paths:
            try:
                self.files.append(open_rows(path))
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError(*problems)
        self._ends = list(itertools.accumulate(map(len, self.files)))

    def __len__(self) -> int:
        return self._ends[-1]

    def uid(self, number: int) -> str:
        file, row = self._locate(number)
        return f"{self.source}/{self.labels[file]}/{row}"

    def rows(self, start: int, stop: int) -> Iterator[Any]:
        """Objects, or a ValueError for a row that is wrong."""
        for file, end in zip(self.files, self._ends, strict=True):
            first = end - len(file)
            if first < stop and start < end:
                yield from map(_object, file.rows(max(start - first, 0), min(stop - first, len(file))))

    def row(self, number: int) -> dict[str, Any]:
        """A row that is known to be right."""
        row: dict[str, Any] = next(self.rows(number, number + 1))
        if isinstance(row, ValueError):
            raise ConfigError(f"row {self.uid(number)}: {row}") from row
        return row

    def wrong_rows(self, problems: Sequence[tuple[int, str]], checked: int) -> ConfigError:
        """`problems`: (row number, message), in order, among the first `checked` rows."""
        texts = []
        for path, file, end in zip(self.paths, self.files, self._ends, strict=True):
            first = end - len(file)
            own = [(number - first, message) for number, message in problems if first <= number < end]
            if own:
                lines = [f"  {file.place(number)}: {cut(message, 500)}" for number, message in own[:SHOWN_PROBLEMS]]
                more = [f"  and {len(own) - SHOWN_PROBLEMS} more"] if len(own) > SHOWN_PROBLEMS else []
                total = min(len(file), checked - first)
                of = f"the first {total}" if total < len(file) else f"{total}"
                texts.append("\n".join([f"data file {str(path)!r}: {len(own)} of {of} rows are wrong:", *lines, *more]))
        return ConfigError(*texts)

    def _locate(self, number: int) -> tuple[int, int]:
        """(file, row in the file)."""
        file = bisect.bisect_right(self._ends, number)
        return file, number - (self._ends[file] - len(self.files[file]))


def distinct_labels(paths: Sequence[Path]) -> list[str]:
    """See the header. Raises ConfigError for a file that is named twice."""
    whole = [path.absolute() for path in paths]
    if twice := next((path for number, path in enumerate(whole) if path in whole[:number]), None):
        raise ConfigError(f"data file {str(twice)!r} is named twice; name it once")
    for length in range(1, max(len(path.parts) for path in whole) + 1):
        labels = [".".join([*path.parts[-length:-1], path.stem]).replace("/", "") for path in whole]
        if len(set(labels)) == len(labels):
            return labels
    return [".".join([*path.parts[1:-1], path.name]) for path in whole]  # a.jsonl beside a.csv


def _object(row: Any) -> Any:
    if isinstance(row, ValueError | dict):
        return row
    return ValueError(f"is {type_name(row)}, not an object")
