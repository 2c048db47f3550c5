"""Sinks: where a step's metrics go. A console line, metrics.jsonl, TensorBoard, Weights & Biases.

Only rank 0 writes. On other ranks `Sinks` holds no sink and every call does nothing. A resumed run repeats the steps
after its checkpoint, and no sink may keep a step twice: jsonl drops its lines from `first_step` on, TensorBoard purges
them, and a continued wandb run ignores the steps that it already has.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from grpo_megatron.config import ConfigError, TrainerConfig
from grpo_megatron.observability.columns import CONSOLE_COLUMNS, Column, console_columns
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.atomic import write_file

METRICS_FILE = "metrics.jsonl"
VALIDATION_ACCURACY = re.compile(r"val-core/(?P<source>.+)/mean@\d+")


class Sink:
    """One destination. By default it ignores notes, which are text."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise NotImplementedError

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Sinks:
    """All sinks of the run as one. A context manager: leaving it closes them."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = list(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics, once per step and in order of steps."""
        for sink in self._sinks:
            sink.log(step, metrics)

    def note(self, text: str) -> None:
        """Show text on the console. It may have several lines."""
        for sink in self._sinks:
            sink.note(text)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError if a logger's package is missing. Every rank checks for itself, before any process group."""
    for package in sorted({"tensorboard", "wandb"}.intersection(names)):
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
    """The sinks of `trainer.logger` under `trainer.output_dir`; none on ranks other than 0.

    `first_step`: the step that this run starts with. Later steps of an earlier run are dropped. `run_config` is recorded
    with a wandb run. `stream`: the console, standard output by default. Raises ConfigError on every rank if a package is
    missing.
    """
    check_loggers(config.logger)
    if rank != 0:
        return Sinks()
    config.output_dir.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = []
    for name in dict.fromkeys(config.logger):
        if name == "console":
            sinks.append(ConsoleSink(config.total_training_steps, first_step, stream, console_columns(run_config)))
        elif name == "jsonl":
            sinks.append(JsonlSink(config.output_dir / METRICS_FILE, first_step))
        elif name == "tensorboard":
            sinks.append(TensorBoardSink(config.output_dir / "tensorboard", first_step))
        else:
            sinks.append(WandbSink(config.output_dir, first_step, run_config))
    return Sinks(sinks)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl in file order. A line that is cut off or damaged, whatever its bytes, is left out."""
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, no UTF-8
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
    return rows


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


class TensorBoardSink(Sink):
    """Scalars under the metrics' own names. `tensorboard --logdir OUTPUT_DIR/tensorboard`."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink(Sink):
    """A run named after the output folder, which keeps its id: a resumed run continues it, and one from step 0 is new.

    The project is WANDB_PROJECT, by default "grpo_megatron"; WANDB_MODE=offline needs no network.
    """

    def __init__(self, output_dir: Path, first_step: int = 0, run_config: Mapping[str, Any] | None = None) -> None:
        wandb = importlib.import_module("wandb")
        id_file = output_dir / "wandb_run_id"
        if first_step == 0 or not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "grpo_megatron"),
            name=output_dir.resolve().name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(output_dir),
            config=dict(run_config or {}),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


COLUMN_WIDTH = 11  # 6 + 9 * 11 = 105 characters per line
ROWS_PER_HEADER = 20


def skip_reason(metrics: Mapping[str, float]) -> str | None:
    """Why a training step made no update, or fewer than planned. None: it made all, or the metrics are of no step."""
    if "actor/skipped_updates" not in metrics:
        return None
    count = metrics["actor/skipped_updates"]
    if count:
        updates = "update" if count == 1 else "updates"
        return f"skipped {count:g} {updates}: the gradient is not finite"
    if "actor/grad_norm" in metrics:
        return None
    if metrics.get("critic/unscorable_ratio") == 1:
        return "skipped: no sample has a reward"
    if metrics.get("critic/zero_variance_ratio", 1) == 1:  # also where dynamic sampling has found no group at all
        return "skipped: no informative group (the samples of each prompt have equal rewards)"
    return "skipped: no sample is in the loss"


class ConsoleSink(Sink):
    """One aligned line per step. On a terminal the lines scroll above a progress bar; a file gets no bar."""

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        stream: TextIO | None = None,
        columns: Sequence[Column] = CONSOLE_COLUMNS,
    ) -> None:
        self._columns = columns
        self._stream = stream or sys.stdout
        self._rows = 0
        self._bar: Any = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total_steps, initial=first_step, desc="GRPO", unit="step", file=self._stream, dynamic_ncols=True
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._rows == 0:
            self.note("\n".join(f"  {column.title:<10} {column.legend}" for column in self._columns) + "\n")
        if self._rows % ROWS_PER_HEADER == 0:
            self.note(f"{'step':>6}" + "".join(f"{column.title:>{COLUMN_WIDTH}}" for column in self._columns))
        self._rows += 1
        accuracies = [value for name, value in metrics.items() if VALIDATION_ACCURACY.fullmatch(name)]
        if accuracies:
            metrics = {**metrics, "val acc": sum(accuracies) / len(accuracies)}
        losses = [value for name, value in metrics.items() if name.startswith("val/loss/")]
        if losses:
            metrics = {**metrics, "val loss": sum(losses) / len(losses)}
        cells = "".join(f"{column.cell(metrics):>{COLUMN_WIDTH}}" for column in self._columns)
        reason = skip_reason(metrics)
        self.note(f"{step:>6}{cells}" + (f"  {reason}" if reason else ""))
        if self._bar is not None:
            self._bar.update(
                min(step + 1, self._bar.total) - self._bar.n
            )  # after the last step, validation logs once more

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
