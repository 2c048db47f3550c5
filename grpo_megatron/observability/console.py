"""The console: one aligned line per step. On a terminal a bar under the lines shows the phase and the time that is left."""

from __future__ import annotations

import math
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm

from grpo_megatron.observability.progress import FIRST_LINE_S, StepProgress
from grpo_megatron.observability.sinks import Sink

# -- columns of runs that draw samples, and of supervised ones ---------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column of the console's table. With `decimals` None, numbers are in scientific notation."""

    title: str
    metric: str
    decimals: int | None
    legend: str

    def cell(self, metrics: Mapping[str, float]) -> str:
        value = metrics.get(self.metric)
        if value is None:
            return "-"
        if not math.isfinite(value) or (value == 0 and self.decimals is None):
            return f"{value:g}"
        if self.decimals is None or abs(value) >= 1e7 or 0 < abs(value) < 0.5 * 10.0**-self.decimals:
            return f"{value:.1e}"  # fixed notation would not fit, or would read 0.0000
        return f"{value:,.{self.decimals}f}"


_VAL_ACCURACY = Column("val acc", "val acc", 4, "accuracy on the validation sets, in steps that validate")
_LENGTH = Column("resp len", "response_length/mean", 1, "mean response length, tokens")
_ENTROPY = Column("entropy", "actor/entropy", 4, "policy entropy per token, nats; near 0 the policy no longer explores")
_GRAD_NORM = Column("grad norm", "actor/grad_norm", 4, "gradient norm before clipping; spikes are a warning")
_SECONDS = Column("s/step", "timing_s/step", 1, "wall-clock seconds of the step, with validation, without saving")
_SPEED = Column("tok/s", "perf/throughput", 0, "prompt + response tokens per second and device")

CONSOLE_COLUMNS = (
    Column("reward", "critic/score/mean", 4, "mean reward of this step's samples, before penalties; should rise"),
    _VAL_ACCURACY,
    _LENGTH,
    _ENTROPY,
    _GRAD_NORM,
    Column("clipped", "actor/pg_clipfrac", 4, "share of tokens whose gradient the ratio clip removed"),
    Column(
        "logp gap",
        "training/rollout_logp_diff_mean",
        None,
        "mean |logprob of the policy - of the engine| per token; should be tiny",
    ),
    _SECONDS,
    _SPEED,
)
SUPERVISED_COLUMNS = (
    Column("loss", "actor/pg_loss", 4, "of this step's rows, before the update; should fall"),
    Column("val loss", "val loss", 4, "of data.val_loss_files, in steps that validate; training too long raises it"),
    _VAL_ACCURACY,
    _LENGTH,
    _ENTROPY,
    _GRAD_NORM,
    Column("lr", "actor/lr", None, "learning rate"),
    _SECONDS,
    _SPEED,
)
SCORE_ACCURACY = {  # actor.loss_mode -> the metric that takes the place of the entropy
    "bradley_terry": Column("accuracy", "actor/pair_accuracy", 4, "share of pairs whose chosen response scores higher"),
    "step_labels": Column("accuracy", "actor/step_accuracy", 4, "share of steps that are judged as their label says"),
}


def console_columns(run_config: Mapping[str, Any] | None) -> tuple[Column, ...]:
    """The columns for a run with this config, as plain JSON."""
    source = (run_config or {}).get("algorithm", {}).get("source")
    if source != "file":
        return CONSOLE_COLUMNS
    accuracy = SCORE_ACCURACY.get((run_config or {}).get("actor", {}).get("loss_mode", ""))
    return tuple(accuracy if accuracy and column is _ENTROPY else column for column in SUPERVISED_COLUMNS)


# -- the sink ----------------------------------------------------------------------------------------------------------

VALIDATION_ACCURACY = re.compile(r"val-core/(?P<source>.+)/mean@\d+")
COLUMN_WIDTH = 11  # 6 + 9 * 11 = 105 characters per line
ROWS_PER_HEADER = 20
BAR_PERIOD_S, LOG_PERIOD_S = 1.0, 5.0


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
            # Without tqdm's own rate and time left: they would count the start and the warm-up as steps.
            form = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps{postfix}"
            self._bar = tqdm(
                total=total_steps,
                initial=first_step,
                desc="training",
                bar_format=form,
                file=self._stream,
                dynamic_ncols=True,
            )
        self._progress, self._stopped = StepProgress(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._thread.start()

    def enter(self, step: int | None, phases: Sequence[str]) -> None:
        self._progress.enter(step, phases)

    def _follow(self) -> None:
        """Keep the bar up to date. Where there is none, print a line about a step that takes minutes."""
        next_s = FIRST_LINE_S
        while not self._stopped.wait(BAR_PERIOD_S if self._bar is not None else LOG_PERIOD_S):
            passed = self._progress.step_seconds()
            if self._bar is not None:
                self._bar.set_postfix_str(self._progress.text(self._bar.total - self._bar.n))
            elif passed < FIRST_LINE_S:
                next_s = FIRST_LINE_S
            elif passed >= next_s:
                self.note(self._progress.line())
                next_s = 2 * passed

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
        self._progress.finished(metrics.get("timing_s/step"))
        if self._bar is not None:
            self._bar.set_postfix_str("", refresh=False)
            self._bar.update(
                min(step + 1, self._bar.total) - self._bar.n
            )  # after the last step, validation logs once more

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.set_postfix_str("")
            self._bar.close()
