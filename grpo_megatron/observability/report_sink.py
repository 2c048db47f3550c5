"""ReportSink: keeps output_dir/report.html up to date while the run goes on.

The whole page is written (to a hidden file that is then renamed) at the start, at the end, and after a step when writing has
taken at most SHARE of the run's time. In the other steps one line is appended, which takes a fraction of a millisecond however
long the run is: the step's metrics in a script element of its own, which the page adds to its curves. A line that a kill has cut
off is ignored.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from grpo_megatron.observability.sink import ShownGroups, Sink
from grpo_megatron.report.page import appended_step, render_report
from grpo_megatron.report.run_folder import RunFolder
from grpo_megatron.report.samples import KeptSamples
from grpo_megatron.storage.atomic import write_file

REPORT_FILE = "report.html"
SHARE = 0.01  # of the time between two writings of the whole page
logger = logging.getLogger(__name__)


class ReportSink(Sink):
    """Reads metrics.jsonl, so that it comes after the sink that writes it. A report that cannot be written ends no run."""

    def __init__(self, output_dir: Path, first_step: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.run, self.samples, self._clock = RunFolder(output_dir), KeptSamples(output_dir, first_step), clock
        self.path = output_dir / REPORT_FILE
        self._shown: tuple[int, Callable[[], ShownGroups]] | None = None
        self._has_failed = False
        self._write()  # also where the run ends within its first step
        self._due = -float("inf")

    def show(self, step: int, groups: Callable[[], ShownGroups]) -> None:
        self._shown = step, groups

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._clock() >= self._due:
            self._write()
        else:
            self._append(step, metrics)

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        begin, is_written = self._clock(), False
        try:
            if self._shown is not None:
                step, groups = self._shown
                self.samples.add(step, groups())
                self._shown = None
            self.run.update()
            write_file(self.path, render_report([self.run], is_live=True))
            is_written = True
        except Exception as error:  # noqa: BLE001 - a page is no reason to end a run: a full disk, a user's tokenizer
            self._report_failure(error)
        end = self._clock()
        self._due = end + (end - begin) / SHARE if is_written else -float("inf")

    def _append(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            with self.path.open("r+", encoding="utf-8") as file:  # not "a", which would make a page without a head
                file.seek(0, os.SEEK_END)
                file.write(appended_step(step, metrics))
        except OSError as error:
            self._report_failure(error)
            self._due = -float("inf")  # a part of the line may be there: the next step writes the whole page

    def _report_failure(self, error: Exception) -> None:
        if not self._has_failed:
            logger.warning(f"cannot write {self.path}: {type(error).__name__}: {error}")
        self._has_failed = True
