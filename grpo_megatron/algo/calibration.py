"""Calibration: do the probabilities of a reward model agree with how often it is right?

A pair's probability is p = sigmoid(s_chosen - s_rejected), a step's p = sigmoid(s). The prediction is the more probable side. Its
confidence is max(p, 1 - p), from 0.5 to 1. It is right where this side has the label (p = 1/2: half). With the predictions in
bins of equal width by confidence (arXiv:1706.04599, equation 3):

    ECE = sum over the bins of  (n_b / n) * |accuracy_b - confidence_b|

log_loss is the mean of -log of the label's probability, brier the mean of (p - label)^2. Sums are exact (`math.fsum`), so neither
order nor layout changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NUM_BINS = 10


@dataclass(frozen=True)
class Bin:
    """Predictions with a confidence in (low, high]; the first bin includes its low end. Means are NaN without any."""

    low: float
    high: float
    count: int
    accuracy: float
    confidence: float


@dataclass(frozen=True)
class Calibration:
    """`count` predictions. `bins` are NUM_BINS from 0.5 to 1."""

    count: int
    accuracy: float
    log_loss: float
    brier: float
    ece: float
    bins: list[Bin]


def calibration(log_odds: Sequence[float], labels: Sequence[bool]) -> Calibration:
    """`log_odds[i]` of label True. Raises ZeroDivisionError without predictions."""
    n = len(log_odds)
    rows = [_prediction(x, label) for x, label in zip(log_odds, labels, strict=True)]
    members: list[list[tuple[float, float]]] = [[] for _ in range(NUM_BINS)]
    for confidence, correct, _, _ in rows:
        index = math.ceil((confidence - 0.5) * 2 * NUM_BINS) - 1
        members[min(max(index, 0), NUM_BINS - 1)].append((confidence, correct))
    bins = [_bin(0.5 + i / (2 * NUM_BINS), 0.5 + (i + 1) / (2 * NUM_BINS), held) for i, held in enumerate(members)]
    return Calibration(
        count=n,
        accuracy=math.fsum(correct for _, correct, _, _ in rows) / n,
        log_loss=math.fsum(loss for _, _, loss, _ in rows) / n,
        brier=math.fsum(square for _, _, _, square in rows) / n,
        ece=math.fsum(b.count / n * abs(b.accuracy - b.confidence) for b in bins if b.count),
        bins=bins,
    )


def _prediction(log_odds: float, label: bool) -> tuple[float, float, float, float]:
    """(confidence, 1 if right else 0, -log of the label's probability, squared error)."""
    signed = log_odds if label else -log_odds
    loss = max(-signed, 0.0) + math.log1p(math.exp(-abs(signed)))  # softplus(-signed) for any size
    confidence = 1.0 / (1.0 + math.exp(-abs(log_odds)))
    correct = 0.5 if signed == 0 else float(signed > 0)
    return confidence, correct, loss, (1.0 - math.exp(-loss)) ** 2


def _bin(low: float, high: float, held: Sequence[tuple[float, float]]) -> Bin:
    n = len(held)
    accuracy = math.fsum(correct for _, correct in held) / n if n else math.nan
    confidence = math.fsum(confidence for confidence, _ in held) / n if n else math.nan
    return Bin(low, high, n, accuracy, confidence)


def calibration_table(result: Calibration) -> str:
    """The bins that hold predictions, one line each."""
    rows = [
        f"{b.low:.3f} - {b.high:.3f} {b.count:>8,} {b.accuracy:>9.3f} {b.confidence:>16.3f}"
        for b in result.bins
        if b.count
    ]
    return "\n".join(["confidence       count  accuracy  mean confidence", *rows])
