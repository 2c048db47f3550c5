"""Ranking: which responses make a pair, and the pairwise loss that a reward model learns from.

Bradley-Terry: P(chosen beats rejected) = sigmoid(s_chosen - s_rejected), so the negative log-likelihood of a pair is

    -log sigmoid(s_chosen - s_rejected) = softplus(-(s_chosen - s_rejected))

(InstructGPT, arXiv:2203.02155, equation 1; DeepSeekMath, arXiv:2402.03300, continues its reward model by it). Departure
from InstructGPT: a group gives pairs in which no response comes twice, not all its pairs: n (n - 1) / 2 pairs of n
responses are not that many facts, and there they had to share one batch for that reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def pairwise_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(chosen - rejected) of scores [pairs] -> [pairs], exact for any margin."""
    return F.softplus(rejected - chosen)


def ranked_pairs(labels: Sequence[float], group: Sequence[int], limit: int | None = None) -> list[tuple[int, int]]:
    """(chosen, rejected) rows of one group: the best with the worst, the second best with the second worst, ...

    `labels[row]` ranks the rows of `group`; equal labels keep the group's order, rows without a finite label are left
    out. It ends where the labels no longer differ, or after `limit` pairs. With labels 0 and 1: right with wrong answers.
    """
    ranked = sorted((row for row in group if math.isfinite(labels[row])), key=lambda row: -labels[row])
    pairs = []
    for i in range(len(ranked) // 2):
        best, worst = ranked[i], ranked[-1 - i]
        if labels[best] > labels[worst] and (limit is None or i < limit):
            pairs.append((best, worst))
    return pairs


def ranking_accuracy(scores: Sequence[float], pairs: Sequence[tuple[int, int]]) -> float:
    """Share of pairs whose chosen row has the higher score; a tie counts half. Raises ZeroDivisionError without pairs."""
    margins = torch.tensor([scores[chosen] - scores[rejected] for chosen, rejected in pairs], dtype=torch.float64)
    return float((margins > 0).sum() + 0.5 * (margins == 0).sum()) / len(pairs)
