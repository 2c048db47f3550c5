"""Reward models: their losses, pairs and labels, their calibration, and how their scores become rewards.

The model that is trained has a scalar head. Its "log-probability" at a token is its score s there, and the loss mask is 1 at
the scored tokens only. The estimators put the labels into the advantages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_megatron.algo.advantages import Advantages, advantage_estimators, check_rewards
from grpo_megatron.algo.losses import SEQUENCE_MEAN, LossInputs, LossMetrics, policy_losses, sequence_mean
from grpo_megatron.algo.preference import best_worst, pair_mean, per_token
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.shapes import Float
from grpo_megatron.types import GroupTable


@policy_losses.register("bradley_terry", is_likelihood=True, paired=True, scores="response", aggregation=SEQUENCE_MEAN)
def bradley_terry(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes -log sigmoid(s_chosen - s_rejected - margin) of each pair (arXiv 2203.02155, equation 1; margin: 2307.09288).

    Rows 2i (chosen, advantage 1 + margin) and 2i + 1 (rejected) are a pair. The total is a mean over the pairs of the optimizer
    step: each response has one scored token. Reports `actor/pair_accuracy` (s_chosen > s_rejected; a tie counts half) and
    `actor/score_margin` (their difference), means over pairs.
    """
    assert len(inputs.mask) % 2 == 0, f"{len(inputs.mask)} rows are no pairs"
    scores, labels = (sequence_mean(x, inputs.mask).squeeze(-1) for x in (inputs.logprobs, inputs.advantages))  # [B]
    is_pair = (labels[0::2] == -labels[1::2]) & (labels[0::2] >= 1)
    assert bool((is_pair | ~inputs.mask.any(-1)[0::2]).all()), "rows are not chosen (1 or more) and rejected in turn"
    difference, margin = scores[0::2] - scores[1::2], labels[0::2] - 1.0  # [B / 2]
    correct = (difference > 0).to(difference.dtype) + 0.5 * (difference == 0).to(difference.dtype)
    return per_token(F.softplus(margin - difference), inputs.mask), {
        "actor/pair_accuracy": pair_mean(inputs, correct),
        "actor/score_margin": pair_mean(inputs, difference),
    }


@policy_losses.register(
    "step_labels", is_likelihood=True, scores="step", aggregation=("token-mean", "seq-mean-token-mean")
)
def step_label_loss(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes -log sigmoid(s) of a right step, -log sigmoid(-s) of a wrong one (Math-Shepherd, arXiv 2312.08935).

    This is binary cross entropy with the probability sigmoid(s) that the step is right. The advantage of a scored token is 1
    (right) or -1 (wrong). The mean is over all steps of the optimizer step (token-mean), or over the mean of each response
    (seq-mean-token-mean). Reports `actor/step_accuracy` (the sign of the score; 0 counts half) and `actor/step_right` (share of
    right steps), means over steps.
    """
    signed = inputs.logprobs * inputs.advantages
    correct = (signed > 0).to(signed.dtype) + 0.5 * (signed == 0).to(signed.dtype)
    return F.softplus(-signed), {"actor/step_accuracy": correct, "actor/step_right": inputs.advantages > 0}


@advantage_estimators.register(
    "preference", needs_rewards=False, makes_pairs=True, ignores_token_penalties=True, scores="response"
)
def preference_labels(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Gives the pair of `best_worst` 1 + margin (chosen) and -(1 + margin) (rejected): the difference of their rewards.

    Rows of a file have the rewards 1 + margin and 0, see data/responses.py.
    """
    check_rewards(table.reward)
    advantages = best_worst(table, config)
    for group in table.groups():
        pair = [row for row in group if advantages[row] is not None]
        if pair:
            difference = max(table.reward[row] for row in pair) - min(table.reward[row] for row in pair)
            for row in pair:
                advantages[row] = math.copysign(difference, advantages[row])  # type: ignore[arg-type]
    return advantages


@advantage_estimators.register("step_labels", needs_rewards=False, ignores_token_penalties=True, scores="step")
def labels_of_steps(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Gives 1 to the last token of a right step (reward 1), -1 to that of a wrong one (reward 0), 0 to all others."""
    check_rewards(table.reward)
    advantages: Advantages = []
    for row, length in enumerate(table.response_length):
        values = [0.0] * length
        for token, label in table.step_rewards[row] if table.step_rewards else []:
            values[token] = 2.0 * label - 1.0
        advantages.append(values)
    return advantages


def pairwise_loss(chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
    """Computes -log sigmoid(chosen - rejected) of scores [pairs] -> [pairs], exact for any margin.

    Bradley-Terry: P(chosen beats rejected) = sigmoid(s_chosen - s_rejected). InstructGPT (arXiv 2203.02155, equation 1) and
    DeepSeekMath (arXiv 2402.03300) train their reward models with it.
    """
    return F.softplus(rejected - chosen)


def ranked_pairs(labels: Sequence[float], group: Sequence[int], limit: int | None = None) -> list[tuple[int, int]]:
    """Pairs (chosen, rejected) rows of one group: the best with the worst, the second best with the second worst, ...

    Departure from InstructGPT: each response is in at most one pair. InstructGPT takes all n (n - 1) / 2 pairs of n responses,
    which are correlated, so it has to put them into one batch.
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
    """Counts the share of pairs whose chosen row has the higher score; a tie is half. Raises ZeroDivisionError without pairs."""
    margins = torch.tensor([scores[chosen] - scores[rejected] for chosen, rejected in pairs], dtype=torch.float64)
    return float((margins > 0).sum() + 0.5 * (margins == 0).sum()) / len(pairs)


# -- Calibration -------------------------------------------------------------------------------------------------------

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
    """Measures how well probabilities agree with how often they are right. `log_odds[i]` is of label True.

        ECE = sum over the bins of  (n_b / n) * |accuracy_b - confidence_b|            arXiv 1706.04599, equation 3

    A pair's probability is p = sigmoid(s_chosen - s_rejected), a step's p = sigmoid(s). The prediction is the more probable
    side, its confidence max(p, 1 - p), from 0.5 to 1; the bins have equal width. It is right where this side has the label
    (p = 1/2: half). log_loss is the mean of -log of the label's probability, brier the mean of (p - label)^2. Sums are exact
    (`fsum`), so neither order nor layout changes a bit. Raises ZeroDivisionError without predictions.
    """
    losses, rights, members = [], [], [([], []) for _ in range(NUM_BINS)]  # type: ignore[var-annotated]
    for odds, label in zip(log_odds, labels, strict=True):
        signed = odds if label else -odds
        losses.append(max(-signed, 0.0) + math.log1p(math.exp(-abs(signed))))  # softplus(-signed) for any size
        rights.append(0.5 if signed == 0 else float(signed > 0))
        confidence = 1.0 / (1.0 + math.exp(-abs(odds)))
        place = math.ceil((confidence - 0.5) * 2 * NUM_BINS) - 1
        for values, value in zip(members[min(max(place, 0), NUM_BINS - 1)], (rights[-1], confidence), strict=True):
            values.append(value)
    edges = [0.5 + i / (2 * NUM_BINS) for i in range(NUM_BINS + 1)]
    bins = [
        Bin(low, high, len(pair[0]), *(math.fsum(values) / len(values) if values else math.nan for values in pair))
        for low, high, pair in zip(edges, edges[1:], members, strict=False)
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
    """Writes the bins that have predictions, one line each."""
    rows = [
        f"{b.low:.3f} - {b.high:.3f} {b.count:>8,} {b.accuracy:>9.3f} {b.confidence:>16.3f}"
        for b in result.bins
        if b.count
    ]
    return "\n".join(["confidence       count  accuracy  mean confidence", *rows])


# -- Scores as rewards -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelScores:
    """The scores of one model, one value per row of the table. `steps` is None for an outcome model."""

    values: list[float]
    coefficient: float = 1.0
    steps: list[list[tuple[int, float]]] | None = None  # (last response token of the step, probability), increasing


def process_scores(steps: Sequence[Sequence[tuple[int, float]]], coefficient: float) -> ModelScores:
    """Makes the scores of a process model. `steps[row]`: (last response token of a step, log-odds that it is right).

    p_ij = sigmoid(log-odds) is the probability that step j of response i is right; the response's score is the smallest p_ij
    (Math-Shepherd, arXiv 2312.08935, section 3.3). A response without a step has none: NaN.
    """
    probabilities = [[(end, _sigmoid(score)) for end, score in row] for row in steps]
    values = [min((p for _, p in row), default=math.nan) for row in probabilities]
    return ModelScores(values, coefficient, probabilities)


def combined(table: GroupTable, models: Sequence[ModelScores], *, adds_rule: bool) -> GroupTable:
    """Puts the models' rewards into the table, instead of the rule-based reward or added to it.

        r_i = sum over the models m of  coefficient_m * s_mi      (combine: replace)
        r_i = the rule's reward + the same sum                    (combine: add)

    The step rewards, for `grpo_process`, are coefficient_m * p_ij at the last token of step j, summed over the process models
    (and the rule's steps, if added). The last step also gets what belongs to the whole response: the outcome models' part,
    and an added rule's reward if the rule gives no steps. Penalties, which are in the reward but not in `table.raw_reward`,
    are kept. If the rule-based reward is replaced, a row whose reward was NaN gets a reward.
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
    """Computes the part of the reward that is no rule's; 0 where the rule gives none."""
    return reward - rule if math.isfinite(reward) and math.isfinite(rule) else 0.0


def _steps(
    table: GroupTable, models: Sequence[ModelScores], row: int, rule: float, *, adds_rule: bool
) -> list[tuple[int, float]]:
    """Lists the step rewards of one row, by increasing token."""
    rule_steps = table.step_rewards[row] if adds_rule and table.step_rewards else []
    parts: dict[int, list[float]] = {}
    for end, reward in rule_steps:
        parts.setdefault(end, []).append(reward)
    for model in models:
        for end, probability in model.steps[row] if model.steps is not None else []:
            parts.setdefault(end, []).append(model.coefficient * probability)
    if not parts:
        return []
    response_parts = [model.coefficient * model.values[row] for model in models if model.steps is None]
    if adds_rule and not rule_steps:
        response_parts.append(rule)
    parts[max(parts)] += response_parts
    return [(end, math.fsum(parts[end])) for end in sorted(parts)]


def _sigmoid(x: float) -> float:
    """Computes the sigmoid, exact for large |x| too."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
