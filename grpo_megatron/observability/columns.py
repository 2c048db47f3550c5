"""The columns of the console's table: those of a run that draws samples, and those of a supervised one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """One column of the console's table. `decimals` None: scientific notation."""

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
    """Those for a run with this config, as plain JSON."""
    source = (run_config or {}).get("algorithm", {}).get("source")
    if source != "file":
        return CONSOLE_COLUMNS
    accuracy = SCORE_ACCURACY.get((run_config or {}).get("actor", {}).get("loss_mode", ""))
    return tuple(accuracy if accuracy and column is _ENTROPY else column for column in SUPERVISED_COLUMNS)
