"""Advantage estimators: the table of a step's rewards in, one number per sample (or per response token) out.

    GRPO     A_i = (r_i - mean) / (std + 1e-6)           DeepSeekMath, arXiv 2402.03300, section 4.1.2
    Dr.GRPO  A_i = r_i - mean                            arXiv 2503.20783 (norm_adv_by_std_in_grpo=false)
    RLOO     A_i = r_i - mean of the others
                 = n / (n - 1) * (r_i - mean)            arXiv 2402.14740

mean, std and n are over the samples of one prompt. Where we are stricter than the papers, which give neither ddof nor
epsilon: ddof 1; float64; the mean first, then the squared deviations (never E[r^2] - E[r]^2, which cancels); sums by
`math.fsum`, whose result does not depend on the order, so neither sample order nor data-parallel layout moves a bit.
A group whose rewards are all equal gets exactly 0, decided on the rewards: the computed std of eight times 0.1 is
rounding noise, and dividing by it is how other codebases get advantages in the thousands.

A sample whose reward is not finite is unscorable: it is left out of mean, std and n, and gets 0. (The plan also leaves
it out of the loss.) An empty response that has a reward was drawn from the policy like any other and stays in.

Another estimator is one function with the signature of `AdvantageEstimator`, registered here or named
`package.module:function` in the config. It sees the whole step, so statistics over the global batch are exact too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from grpo_megatron.config import AlgorithmConfig
from grpo_megatron.registry import Registry
from grpo_megatron.types import GroupTable

EPSILON = 1e-6

# One entry per table row: a number for the whole response, or a list of response_length numbers.
Advantages = list[float | list[float]]
AdvantageEstimator = Callable[[GroupTable, AlgorithmConfig], Advantages]

advantage_estimators: Registry[AdvantageEstimator] = Registry("advantage estimator")


def informative_groups(table: GroupTable) -> Iterator[list[int]]:
    """Rows of the scorable samples of each prompt that can teach something: two or more, not all of equal reward."""
    for rows in table.groups():
        scorable = [row for row in rows if math.isfinite(table.reward[row])]
        if len({table.reward[row] for row in scorable}) > 1:
            yield scorable


def _deviations(rewards: list[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


@advantage_estimators.register("grpo")
def grpo(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """GRPO, or Dr.GRPO with `norm_adv_by_std_in_grpo=False`. One number per row, in units of standard deviations."""
    advantages: Advantages = [0.0] * len(table)
    for rows in informative_groups(table):
        deviations = _deviations([table.reward[row] for row in rows])
        scale = 1.0
        if config.norm_adv_by_std_in_grpo:
            scale = math.sqrt(math.fsum(d * d for d in deviations) / (len(rows) - 1)) + EPSILON
        for row, deviation in zip(rows, deviations, strict=True):
            advantages[row] = deviation / scale
    return advantages


@advantage_estimators.register("rloo")
def rloo(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Leave-one-out baseline. One number per row, in units of reward.

    The left-out set's std is never divided by: with seven equal rewards in it, the eighth would explode.
    """
    advantages: Advantages = [0.0] * len(table)
    for rows in informative_groups(table):
        n = len(rows)
        for row, deviation in zip(rows, _deviations([table.reward[row] for row in rows]), strict=True):
            advantages[row] = deviation * n / (n - 1)
    return advantages
