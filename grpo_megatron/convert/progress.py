"""Bytes done and bytes per second: a bar on a terminal, one line per 15 seconds in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

from grpo_megatron.convert.folder import format_bytes

SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """`with Progress("to-megatron", total) as progress: progress.add(n)`. Writes to standard error."""

    def __init__(self, label: str, total: int, quiet: bool = False) -> None:
        self.label, self.total, self.quiet, self.done = label, total, quiet, 0
        self._start = self._last = time.monotonic()
        self._bar = None
        if sys.stderr.isatty() and not quiet:
            self._bar = tqdm(total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1024, leave=False)

    def add(self, count: int) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._line()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if kind is None:
            self._line()

    def _line(self) -> None:
        self._last = time.monotonic()
        if not self.quiet:
            done, total = format_bytes(self.done), format_bytes(self.total)
            percent = 100 * self.done / max(self.total, 1)
            speed = format_bytes(self.done / max(self._last - self._start, 1e-6))
            print(f"{self.label}: {done} of {total} ({percent:.0f}%), {speed}/s", file=sys.stderr, flush=True)
