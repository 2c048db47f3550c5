"""GRPO: advantages from the rewards of a prompt's samples. Dr.GRPO is a switch of it; pass@k and process supervision follow.

GRPO's loss is PPO's clipped surrogate (`vanilla` in ppo.py); its KL is k3 (kl.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_megatron.algo.advantages import (
    Advantages,
    advantage_estimators,
    deviations,
    finite_steps,
    group_scale,
    is_informative,
    per_group,
    scorable_groups,
)
from grpo_megatron.config import AlgorithmConfig
from grpo_megatron.types import GroupTable


@advantage_estimators.register("grpo", compares_group=True)
def grpo(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Computes GRPO's advantages (DeepSeekMath, arXiv 2402.03300, 4.1.2), or Dr.GRPO's without the std (2503.20783).

        grpo      A_i = (r_i - mean) / (std + 1e-6)
        Dr.GRPO   A_i = r_i - mean                     norm_adv_by_std_in_grpo=false

    mean and std are over the samples of one prompt. The papers give neither ddof nor epsilon: ours are 1 and 1e-6. Equal
    rewards give exactly 0.
    """

    def estimate(rewards: list[float], rows: list[int]) -> list[float]:
        centred = deviations(rewards)
        scale = group_scale(centred, config)
        return [deviation / scale for deviation in centred]

    return per_group(table, estimate)


@advantage_estimators.register("grpo_passk", compares_group=True)
def grpo_passk(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Gives the best sample its lead over the second best, and 0 to the others (arXiv 2503.19595).

        A_best = (r_1st - r_2nd) / (std + 1e-6)

    With two best samples all get 0. k is n, the number of samples.
    """

    def estimate(rewards: list[float], rows: list[int]) -> list[float]:
        second, first = sorted(range(len(rewards)), key=rewards.__getitem__)[-2:]
        lead = (rewards[first] - rewards[second]) / group_scale(deviations(rewards), config)
        return [lead if i == first else 0.0 for i in range(len(rewards))]

    return per_group(table, estimate)


@advantage_estimators.register(
    "grpo_process", compares_group=True, needs_step_rewards=True, ignores_token_penalties=True
)
def grpo_process(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Computes one number per response token from the rewards s of steps (DeepSeekMath, arXiv 2402.03300, 4.1.3).

        A_it = sum of (s - mean) / (std + 1e-6) over the steps of response i that end at or after token t

    mean and std are over every step of the prompt's scorable samples, so the sum grows with the number of steps. Equal
    step rewards give exactly 0; steps that are not finite are left out. A step that ends at a token outside the loss counts,
    too: its reward belongs to the tokens before it. Raises ValueError when the table has no steps.
    """
    if not table.step_rewards and len(table):
        raise ValueError(
            "algorithm.adv_estimator='grpo_process' needs step rewards, and the reward function gives none; set a "
            "reward.function that scores steps, or adv_estimator='grpo' for one reward per response"
        )
    advantages: Advantages = [0.0] * len(table)
    for rows in scorable_groups(table, table.reward):
        steps = {row: finite_steps(table, row) for row in rows}
        pool = [reward for row in rows for _, reward in steps[row]]
        if not is_informative(pool):
            continue
        centred = deviations(pool)
        scale = group_scale(centred, config)
        normalised = iter([deviation / scale for deviation in centred])
        for row in rows:
            advantages[row] = _rewards_to_go(
                [(end, next(normalised)) for end, _ in steps[row]], table.response_length[row]
            )
    return advantages


def _rewards_to_go(steps: Sequence[tuple[int, float]], length: int) -> list[float]:
    """Sums for every token the rewards of the steps that end at or after it; 0 after the last step."""
    result: list[float] = []
    for i, (end, _) in enumerate(steps):
        result += [math.fsum(reward for _, reward in steps[i:])] * (end + 1 - len(result))
    return result + [0.0] * (length - len(result))
