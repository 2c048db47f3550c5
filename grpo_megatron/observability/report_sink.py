"""ReportSink: keeps output_dir/report.html up to date while the run goes on.

It is written after a step, but takes at most SHARE of the run's time: where a step takes a second, after every few steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from grpo_megatron.observability.sink import ShownGroups, Sink
from grpo_megatron.report.page import render_report
from grpo_megatron.report.run_folder import RunFolder
from grpo_megatron.report.samples import KeptSamples
from grpo_megatron.storage.atomic import write_file

REPORT_FILE = "report.html"
SHARE = 0.01  # of the time between two writings
logger = logging.getLogger(__name__)


class ReportSink(Sink):
    """Reads metrics.jsonl, so that it comes after the sink that writes it. A report that cannot be written ends no run."""

    def __init__(self, output_dir: Path, first_step: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.run, self.samples, self._clock = RunFolder(output_dir), KeptSamples(output_dir, first_step), clock
        self._due = -float("inf")
        self._shown: tuple[int, Callable[[], ShownGroups]] | None = None
        self._has_failed = False

    def show(self, step: int, groups: Callable[[], ShownGroups]) -> None:
        self._shown = step, groups

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._clock() >= self._due:
            self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        begin = self._clock()
        try:
            if self._shown is not None:
                step, groups = self._shown
                self.samples.add(step, groups())
                self._shown = None
            self.run.update()
            write_file(self.run.folder / REPORT_FILE, render_report([self.run]))
        except Exception as error:  # noqa: BLE001 - a page is no reason to end a run: a full disk, a user's tokenizer
            if not self._has_failed:
                logger.warning(f"cannot write {self.run.folder / REPORT_FILE}: {type(error).__name__}: {error}")
            self._has_failed = True
        end = self._clock()
        self._due = end + (end - begin) / SHARE
