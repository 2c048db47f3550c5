"""Sinks: where a step's metrics go. The console, metrics.jsonl and the report (always), TensorBoard, trackers of experiments.

Only rank 0 writes. On other ranks `Sinks` holds no sink and every call does nothing. A resumed run repeats the steps
after its checkpoint, and no sink may keep a step twice: jsonl drops its lines from `first_step` on, TensorBoard purges
them, and a tracker's continued run ignores or replaces the steps that it already has.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from grpo_megatron.config import ConfigError, TrainerConfig
from grpo_megatron.observability.columns import console_columns
from grpo_megatron.observability.console import ConsoleSink
from grpo_megatron.observability.report_sink import ReportSink
from grpo_megatron.observability.sink import ShownGroups, Sink
from grpo_megatron.observability.tensorboard import TensorBoardSink
from grpo_megatron.observability.trackers import TRACKER_SINKS, TRACKERS, TrackedRun
from grpo_megatron.report.metrics_file import METRICS_FILE, read_metrics
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.atomic import write_file
from grpo_megatron.storage.run_files import add_event, finish_start, read_events

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


def check_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError if a logger's package is missing. Every rank checks for itself, before any process group."""
    for package in sorted({"tensorboard", *TRACKERS}.intersection(names)):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"trainer.logger={list(names)}: the package {package!r} does not import ({error}); "
                f"pip install {package}, or take {package!r} out of trainer.logger"
            ) from error


def build_sinks(
    config: TrainerConfig,
    *,
    rank: int = 0,
    first_step: int = 0,
    run_config: Mapping[str, Any] | None = None,
    stream: TextIO | None = None,
) -> Sinks:
    """The sinks of `trainer.logger`, and metrics.jsonl with the report, under `trainer.output_dir`; none on ranks other than 0.

    `first_step`: the step that this run starts with. Later steps of an earlier run are dropped. `run_config` is recorded
    by TensorBoard and the trackers. `stream`: the console, standard output by default. Raises ConfigError on every rank if a
    package is missing.
    """
    check_loggers(config.logger)
    if rank != 0:
        return Sinks()
    folder = config.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    add_event(folder, "resumed" if first_step else "started", first_step)
    name = config.experiment_name or folder.resolve().name
    sinks: list[Sink] = []
    for logger in dict.fromkeys([*config.logger, "jsonl"]):  # always: the report is made of it
        if logger == "console":
            sinks.append(ConsoleSink(config.total_training_steps, first_step, stream, console_columns(run_config)))
        elif logger == "jsonl":
            sinks += [JsonlSink(folder / METRICS_FILE, first_step), ReportSink(folder, first_step)]
        elif logger == "tensorboard":
            steps = config.total_training_steps
            sinks.append(TensorBoardSink(folder / "tensorboard", first_step, steps, name, run_config))
        else:
            tracked = TrackedRun(folder, config.project_name, name, tuple(config.tags), first_step, run_config or {})
            sinks.append(TRACKER_SINKS[logger](tracked))
    return Sinks(sinks, folder)


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
