"""ScoreValidation: what ValidationLoss reports, and how far the probabilities of a scalar head can be trusted.

    val/ece/FILE, val/brier/FILE    over held-out pairs, or over held-out steps (algo/scores.py)
    val/step_accuracy/FILE          of steps; that of pairs, val/pair_accuracy/FILE, is reported by the loss

`calibration.txt` in the output folder has the newest table of confidence against accuracy, per file.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grpo_megatron.algo.scores import Calibration, calibration, calibration_table
from grpo_megatron.parallel.exchange import gather_rows
from grpo_megatron.parallel.mesh import on_first_rank
from grpo_megatron.storage.atomic import write_file
from grpo_megatron.training.validation import ValidationLoss
from grpo_megatron.types import Batch

CALIBRATION_FILE = "calibration.txt"


class ScoreValidation(ValidationLoss):
    """See ValidationLoss."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.tables: dict[str, str] = {}

    def _also(self, file: str, batch: Batch, logprobs: Tensor) -> dict[str, float]:
        mesh = self.policy.mesh
        local = {
            row: list(zip(logprobs[i][mask].tolist(), batch.advantages[i][mask].tolist(), strict=True))
            for i, (row, mask) in enumerate(zip(batch.rows, batch.loss_mask, strict=True))
        }
        scored = gather_rows(local, mesh)
        predictions = _of_pairs(scored) if self.is_paired else _of_steps(scored)
        result = calibration([odds for odds, _ in predictions], [label for _, label in predictions])
        self.tables[file] = _described(file, result, "pairs" if self.is_paired else "steps")
        text, target = "\n".join(self.tables.values()), self.output_dir / CALIBRATION_FILE
        on_first_rank(mesh, f"cannot write {target}", lambda: write_file(target, text))
        found = {"ece": result.ece, "brier": result.brier}
        return found if self.is_paired else {**found, "step_accuracy": result.accuracy}


Scored = dict[int, list[tuple[float, float]]]  # table row -> (score, advantage) of its scored tokens


def _of_pairs(scored: Scored) -> list[tuple[float, bool]]:
    """(log-odds that the chosen response is better, True), by pair. The rows of a pair are neighbours in the table."""
    rows = sorted(scored)
    pairs = zip(rows[0::2], rows[1::2], strict=True)
    margins = []
    for first, second in pairs:
        ((score, label),), ((other, opposite),) = scored[first], scored[second]
        assert label == -opposite, f"rows {first} and {second} are no pair"
        margins.append((score - other if label > 0 else other - score, True))
    return margins


def _of_steps(scored: Scored) -> list[tuple[float, bool]]:
    """(log-odds that the step is right, whether it is), by row and step."""
    return [(score, label > 0) for row in sorted(scored) for score, label in scored[row]]


def _described(file: str, result: Calibration, what: str) -> str:
    head = (
        f"{file}: {result.count:,} {what}, accuracy {result.accuracy:.4f}, log loss {result.log_loss:.4f}, Brier"
        f" {result.brier:.4f}, expected calibration error {result.ece:.4f}"
    )
    return f"{head}\n{calibration_table(result)}\n"
