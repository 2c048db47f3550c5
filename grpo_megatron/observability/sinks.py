"""Sinks: where a step's metrics go. The console, metrics.jsonl and the report (always), TensorBoard, trackers of experiments.

Only rank 0 writes. On other ranks `Sinks` holds no sink and every call does nothing. A resumed run repeats the steps
after its checkpoint, and no sink may keep a step twice: jsonl drops its lines from `first_step` on, TensorBoard purges
them, and a tracker's continued run ignores or replaces the steps that it already has.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.pages.run_folder import KeptSamples, RunFolder, read_metrics
from grpo_megatron.pages.run_page import appended_step, render_report
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import write_file
from grpo_megatron.storage.run_files import add_event, finish_start, read_events

ShownGroups = list[dict[str, Any]]  # samples of a step, as pages/run_folder.py describes them


class Sink:
    """One destination of a run's metrics. By default it ignores everything but metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise NotImplementedError

    def show(self, step: int, groups: Callable[[], ShownGroups]) -> None:
        """Samples of the step whose metrics are logged next. Calling `groups` takes some milliseconds."""

    def note(self, text: str) -> None:
        """Text for people, of one line or several."""

    def enter(self, step: int | None, phases: Sequence[str]) -> None:
        """The run is now in these nested phases of a step."""

    def close(self) -> None:
        """After the last step, or a failure."""


ENDED_ON_REQUEST = ("stopped", "done")


class Sinks:
    """All sinks of the run as one. A context manager: leaving it closes them, and records a failure as an event."""

    def __init__(self, sinks: Sequence[Sink] = (), output_dir: Path | None = None) -> None:
        self._sinks, self._output_dir = list(sinks), output_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics, once per step and in order of steps."""
        for sink in self._sinks:
            sink.log(step, metrics)

    def show(self, step: int, groups: Callable[[], ShownGroups]) -> None:
        """Samples of the step whose metrics are logged next."""
        for sink in self._sinks:
            sink.show(step, groups)

    def note(self, text: str) -> None:
        """Show text on the console. It may have several lines."""
        for sink in self._sinks:
            sink.note(text)

    def enter(self, step: int | None, phases: Sequence[str]) -> None:
        """The run has entered these nested phases."""
        if phases and self._output_dir is not None:
            finish_start()
        for sink in self._sinks:
            sink.enter(step, phases)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._output_dir is not None:
            events = read_events(self._output_dir)
            if not events or events[-1]["kind"] not in ENDED_ON_REQUEST:
                add_event(self._output_dir, "failed", None, f"{type(error).__name__}: {error}")
        self.close()


class JsonlSink(Sink):
    """One JSON object per step: {"step": 3, "critic/score/mean": 0.25, ...}. NaN and infinities become null."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        if path.exists():
            self._truncate(path, first_step)
        self._file = path.open("a", encoding="utf-8")

    @staticmethod
    def _truncate(path: Path, first_step: int) -> None:
        """Keep steps < first_step. The old file stays complete until the new one is on disk."""
        write_file(path, (json.dumps(row) + "\n" for row in read_metrics(path) if row["step"] < first_step))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        try:
            self._file.write(json.dumps({"step": step, **row}) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())  # before the step's checkpoint
        except OSError as error:
            raise StorageError(f"cannot write the metrics of step {step} to {self._file.name}: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `log` has flushed every row, or has raised
            self._file.close()


# -- report.html -------------------------------------------------------------------------------------------------------
# The whole page is written (to a hidden file that is then renamed) at the start, at the end, and after a step when writing
# has taken at most SHARE of the run's time. In the other steps one line is appended, in a fraction of a millisecond however
# long the run is: the step's metrics in a script element, which the page adds to its curves. A line that a kill has cut off
# is ignored.

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
