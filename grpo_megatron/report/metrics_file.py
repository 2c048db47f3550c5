"""metrics.jsonl: one JSON object per step, {"step": 3, "critic/score/mean": 0.25, ...}; null is a number that is not finite."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
StepMetrics = dict[str, Any]  # one line: "step", and a number or null per metric
READ_AT_ONCE = 1 << 24  # bytes


def parse_line(line: bytes) -> StepMetrics | None:
    """None for a line that is cut off or damaged, whatever its bytes."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, no UTF-8
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def read_metrics(path: Path) -> list[StepMetrics]:
    """The objects of a metrics.jsonl in file order, without damaged lines. Raises OSError."""
    return [row for line in path.read_bytes().splitlines() if (row := parse_line(line)) is not None]


class MetricsTail:
    """Reads a growing metrics.jsonl part by part."""

    def __init__(self, path: Path) -> None:
        self.path, self._inode, self._offset, self._rest = path, 0, 0, b""  # the rest: a line that is not whole yet

    def read(self) -> tuple[bool, list[StepMetrics]]:
        """Whether the file was replaced since the last call, so that all is read again, and the new whole lines."""
        try:
            file = self.path.open("rb")
        except OSError:
            return False, []
        with file:
            status = os.fstat(file.fileno())
            is_new = status.st_ino != self._inode or status.st_size < self._offset
            if is_new:
                self._inode, self._offset, self._rest = status.st_ino, 0, b""
            file.seek(self._offset)
            rows: list[StepMetrics] = []
            while part := file.read(READ_AT_ONCE):
                self._offset += len(part)
                *lines, self._rest = (self._rest + part).split(b"\n")
                rows += [row for line in lines if (row := parse_line(line)) is not None]
        return is_new, rows
