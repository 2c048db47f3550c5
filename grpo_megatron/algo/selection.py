"""Estimators of the unified view: supervised learning, RFT and DPO as a selection of samples (DeepSeekMath, section 5).

    constant    1 for every sample                                                          SFT
    rft         1 where reward >= algorithm.rft_threshold; None elsewhere                   RFT, online RFT (2308.01825)
    preference  1 + margin for the chosen, -(1 + margin) for the rejected response          pairs for bradley_terry
    step_labels 1 at the last token of a right step, -1 at that of a wrong one              labels for step_labels
    best_worst  +1 for the best and -1 for the worst sample of a prompt; None elsewhere     pairs for DPO (2305.18290)

The methods differ in the source of the responses, in the reward, and in the coefficient of each log-probability's
gradient. These are the coefficients (of DPO: the sign; its loss determines the size). The losses for them are `sft` and
`dpo`. None is not an advantage of 0: a row with None is left out, and counts in no denominator.
"""

from __future__ import annotations

import math

from grpo_megatron.algo.advantages import (
    Advantages,
    advantage_estimators,
    check_rewards,
    is_informative,
    scorable_groups,
)
from grpo_megatron.config import AlgorithmConfig
from grpo_megatron.types import GroupTable


@advantage_estimators.register("constant", needs_rewards=False, ignores_token_penalties=True)
def constant(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """1 for every sample."""
    return [1.0] * len(table)


@advantage_estimators.register("rft", ignores_token_penalties=True)
def rft(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """1 for each right answer; None for a wrong one and for a sample without a reward."""
    return [1.0 if reward >= config.rft_threshold else None for reward in table.reward]


@advantage_estimators.register("best_worst", compares_group=True, makes_pairs=True, ignores_token_penalties=True)
def best_worst(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """One pair per prompt, by reward. Of equal rewards the lowest index is taken; all equal: no pair.

    A response without a loss token has no gradient and cannot be part of a pair.
    """
    advantages: Advantages = [None] * len(table)
    num_loss_tokens = table.num_loss_tokens()
    for group in scorable_groups(table, table.reward):
        rows = [row for row in group if num_loss_tokens[row]]
        if is_informative([table.reward[row] for row in rows]):
            advantages[min(rows, key=lambda row: (-table.reward[row], table.index[row]))] = 1.0
            advantages[min(rows, key=lambda row: (table.reward[row], table.index[row]))] = -1.0
    return advantages


@advantage_estimators.register(
    "preference", needs_rewards=False, makes_pairs=True, ignores_token_penalties=True, scores="response"
)
def preference(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """The pair of `best_worst`, with the difference of the two rewards in place of 1.

    Rows of a file have the rewards 1 + margin (chosen) and 0 (rejected), see data/scored.py.
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
def step_labels(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """One number per response token, from step rewards of 1 (right) and 0 (wrong)."""
    check_rewards(table.reward)
    advantages: Advantages = []
    for row, length in enumerate(table.response_length):
        values = [0.0] * length
        for token, label in table.step_rewards[row] if table.step_rewards else []:
            values[token] = 2.0 * label - 1.0
        advantages.append(values)
    return advantages
