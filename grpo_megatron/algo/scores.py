"""Scores of reward models: pairs and their loss, calibration, and how scores become rewards.

Bradley-Terry: P(chosen beats rejected) = sigmoid(s_chosen - s_rejected), so the negative log-likelihood of a pair is

    -log sigmoid(s_chosen - s_rejected) = softplus(-(s_chosen - s_rejected))

(InstructGPT, arXiv:2203.02155, equation 1; DeepSeekMath, arXiv:2402.03300, trains its reward model with it). Departure
from InstructGPT: each response of a group is in at most one pair. InstructGPT takes all n (n - 1) / 2 pairs of n
responses. They are correlated, so it has to put them into one batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_megatron.types import GroupTable


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


# -- Calibration -------------------------------------------------------------------------------------------------------
# Do the probabilities of a reward model agree with how often it is right?
#
# A pair's probability is p = sigmoid(s_chosen - s_rejected), a step's p = sigmoid(s). The prediction is the more probable
# side. Its confidence is max(p, 1 - p), from 0.5 to 1. It is right where this side has the label (p = 1/2: half). With the
# predictions in bins of equal width by confidence (arXiv:1706.04599, equation 3):
#
#     ECE = sum over the bins of  (n_b / n) * |accuracy_b - confidence_b|
#
# log_loss is the mean of -log of the label's probability, brier the mean of (p - label)^2. Sums are exact (`fsum`), so
# neither order nor layout changes a bit.

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
    losses, rights, members = [], [], [([], []) for _ in range(NUM_BINS)]  # type: ignore[var-annotated]
    for odds, label in zip(log_odds, labels, strict=True):
        signed = odds if label else -odds
        losses.append(max(-signed, 0.0) + math.log1p(math.exp(-abs(signed))))  # softplus(-signed) for any size
        rights.append(0.5 if signed == 0 else float(signed > 0))
        confidence = 1.0 / (1.0 + math.exp(-abs(odds)))
        place = math.ceil((confidence - 0.5) * 2 * NUM_BINS) - 1
        for held, value in zip(members[min(max(place, 0), NUM_BINS - 1)], (rights[-1], confidence), strict=True):
            held.append(value)
    edges = [0.5 + i / (2 * NUM_BINS) for i in range(NUM_BINS + 1)]
    bins = [
        Bin(low, high, len(held[0]), *(math.fsum(values) / len(values) if values else math.nan for values in held))
        for low, high, held in zip(edges, edges[1:], members, strict=False)
    ]
    n = len(losses)
    return Calibration(
        count=n,
        accuracy=math.fsum(rights) / n,
        log_loss=math.fsum(losses) / n,
        brier=math.fsum((1.0 - math.exp(-loss)) ** 2 for loss in losses) / n,
        ece=math.fsum(b.count / n * abs(b.accuracy - b.confidence) for b in bins if b.count),
        bins=bins,
    )


def calibration_table(result: Calibration) -> str:
    """The bins that hold predictions, one line each."""
    rows = [
        f"{b.low:.3f} - {b.high:.3f} {b.count:>8,} {b.accuracy:>9.3f} {b.confidence:>16.3f}"
        for b in result.bins
        if b.count
    ]
    return "\n".join(["confidence       count  accuracy  mean confidence", *rows])


# -- Combination -------------------------------------------------------------------------------------------------------
# The reward of every sample from the scores of one or more reward models and, if asked for, the rule's reward.
#
#     r_i = sum over the models m of  coefficient_m * s_mi     (combine: replace)
#     r_i = the rule's reward + the same sum                   (combine: add)
#
# s_mi is the score of an outcome model. A process model gives p_ij = sigmoid(score), the probability that step j of response i is
# right; its s_mi is the smallest p_ij, which Math-Shepherd (arXiv:2312.08935, section 3.3) takes as the score of a solution. The
# step rewards, which `grpo_process` reads, are
#
#     coefficient_m * p_ij at the last token of step j, summed over the process models (and the rule's own steps, if added)
#
# and at the last step also what belongs to the whole response: the outcome models' part, and an added rule's reward if the rule
# gives no steps. A response without a step has no score of a process model: NaN.


@dataclass(frozen=True)
class ModelScores:
    """The scores of one model, one value per row of the table. `steps` is None for an outcome model."""

    values: list[float]
    coefficient: float = 1.0
    steps: list[list[tuple[int, float]]] | None = None  # (last response token of the step, probability), increasing


def process_scores(steps: Sequence[Sequence[tuple[int, float]]], coefficient: float) -> ModelScores:
    """`steps[row]`: (last response token of a step, log-odds that it is right)."""
    probabilities = [[(end, _sigmoid(score)) for end, score in row] for row in steps]
    values = [min((p for _, p in row), default=math.nan) for row in probabilities]
    return ModelScores(values, coefficient, probabilities)


def combined(table: GroupTable, models: Sequence[ModelScores], *, adds_rule: bool) -> GroupTable:
    """The table with the models' rewards, instead of the rule-based reward or added to it.

    Penalties, which are in the reward but not in `table.raw_reward`, are kept. If the rule-based reward is replaced, a row
    whose reward was NaN gets a reward.
    """
    rules = table.raw_reward or table.reward
    penalties = [_penalty(reward, rule) for reward, rule in zip(table.reward, rules, strict=True)]
    rule_part = rules if adds_rule else [0.0] * len(table)
    totals = [
        rule_part[row] + sum(model.coefficient * model.values[row] for model in models) for row in range(len(table))
    ]
    reward = [total + penalty for total, penalty in zip(totals, penalties, strict=True)]
    steps = table.step_rewards
    if any(model.steps is not None for model in models):
        steps = [_steps(table, models, row, rule_part[row], adds_rule=adds_rule) for row in range(len(table))]
    elif not adds_rule:
        steps = []
    return replace(table, reward=reward, raw_reward=totals if table.raw_reward else [], step_rewards=steps)


def _penalty(reward: float, rule: float) -> float:
    """What was subtracted from the rule's reward; 0 where the rule has none."""
    return reward - rule if math.isfinite(reward) and math.isfinite(rule) else 0.0


def _steps(
    table: GroupTable, models: Sequence[ModelScores], row: int, rule: float, *, adds_rule: bool
) -> list[tuple[int, float]]:
    """The step rewards of one row, by increasing token."""
    of_rule = table.step_rewards[row] if adds_rule and table.step_rewards else []
    parts: dict[int, list[float]] = {}
    for end, reward in of_rule:
        parts.setdefault(end, []).append(reward)
    for model in models:
        for end, probability in model.steps[row] if model.steps is not None else []:
            parts.setdefault(end, []).append(model.coefficient * probability)
    if not parts:
        return []
    whole = [model.coefficient * model.values[row] for model in models if model.steps is None]
    if adds_rule and not of_rule:
        whole.append(rule)
    parts[max(parts)] += whole
    return [(end, math.fsum(parts[end])) for end in sorted(parts)]


def _sigmoid(x: float) -> float:
    """Exact for large |x| too."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
