"""Combination: the reward of every sample from the scores of one or more reward models and, if asked for, the rule's reward.

    r_i = sum over the models m of  coefficient_m * s_mi     (combine: replace)
    r_i = the rule's reward + the same sum                   (combine: add)

s_mi is the score of an outcome model. A process model gives p_ij = sigmoid(score), the probability that step j of response i is
right; its s_mi is the smallest p_ij, which Math-Shepherd (arXiv:2312.08935, section 3.3) takes as the score of a solution. The
step rewards, which `grpo_process` reads, are

    coefficient_m * p_ij at the last token of step j, summed over the process models (and the rule's own steps, if added)

and at the last step also what belongs to the whole response: the outcome models' part, and an added rule's reward if the rule
gives no steps. A response without a step has no score of a process model: NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_megatron.types import GroupTable


@dataclass(frozen=True)
class ModelScores:
    """What one model says of every row of the table. `steps` is empty for an outcome model."""

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
