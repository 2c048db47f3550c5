"""Ranking: which responses make a pair, and the pairwise loss of a reward model.

Bradley-Terry: P(chosen beats rejected) = sigmoid(s_chosen - s_rejected), so the negative log-likelihood of a pair is

    -log sigmoid(s_chosen - s_rejected) = softplus(-(s_chosen - s_rejected))

(InstructGPT, arXiv:2203.02155, equation 1; DeepSeekMath, arXiv:2402.03300, trains its reward model with it). Departure
from InstructGPT: each response of a group is in at most one pair. InstructGPT takes all n (n - 1) / 2 pairs of n
responses. They are correlated, so it has to put them into one batch.
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

    `labels[row]` ranks the rows of `group`. Equal labels keep the group's order; rows without a finite label are left
    out. The list ends where the labels no longer differ, or after `limit` pairs.
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
