"""Estimators of the unified view: supervised learning, RFT and DPO as a choice of samples (DeepSeekMath, section 5).

    constant    1 for every sample                                            SFT
    rft         1 where reward >= algorithm.rft_threshold; the others leave   RFT, online RFT (arXiv 2308.01825)
    best_worst  of each prompt the best +1 and the worst -1; the others leave  pairs for DPO (arXiv 2305.18290)

Methods differ in the source of the responses, in the reward, and in the coefficient of each log-probability's gradient;
these are the coefficients (of DPO: its sign, the size is the loss's). The losses that go with them are `sft` and `dpo`.
Leaving (None) is not the same as an advantage of 0: who leaves counts in no denominator.
"""

from __future__ import annotations

from grpo_megatron.algo.advantages import Advantages, advantage_estimators, is_informative, scorable_groups
from grpo_megatron.config import AlgorithmConfig
from grpo_megatron.types import GroupTable


@advantage_estimators.register("constant")
def constant(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """1 for every sample."""
    return [1.0] * len(table)


@advantage_estimators.register("rft")
def rft(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """1 for the right answers, all alike; None for the others and for those without a reward."""
    return [1.0 if reward >= config.rft_threshold else None for reward in table.reward]


@advantage_estimators.register("best_worst")
def best_worst(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """One pair a prompt, by reward; of equal ones the sample of lowest index. No pair where all rewards are equal.

    Empty responses are no part of a pair: they have no token to learn from.
    """
    advantages: Advantages = [None] * len(table)
    for group in scorable_groups(table, table.reward):
        rows = [row for row in group if table.response_length[row]]
        if is_informative([table.reward[row] for row in rows]):
            advantages[min(rows, key=lambda row: (-table.reward[row], table.index[row]))] = 1.0
            advantages[min(rows, key=lambda row: (table.reward[row], table.index[row]))] = -1.0
    return advantages
