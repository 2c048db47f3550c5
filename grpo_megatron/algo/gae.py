"""Generalised advantage estimation (arXiv 1506.02438), for PPO with a critic (arXiv 1707.06347).

    delta_t = r_t + gamma V_{t+1} - V_t,    V_n = 0
    A_t     = delta_t + gamma lambda A_{t+1} = sum over s >= t of (gamma lambda)^(s - t) delta_s
    R_t     = A_t + V_t                       the critic's target, with the critic's own lambda

t numbers the n loss tokens of a response, which are the model's own tokens: text that an environment wrote is skipped, and
neither gamma nor lambda counts it. V_t is the value of the state before token t. A response that was cut off at the limit
ends like any other, with V_n = 0.

r_t has all that the table knows, as the returns of `reinforce_plus_plus` do: the reward falls on the last token, what a
turn has earned on the last token of that turn, and a penalty (KL in the reward) on its token. Where the reward function
scores steps, their rewards fall on the ends of the steps and take the place of the response's reward, as in `grpo_process`;
penalties of the whole response (overlong) stay on the last token.

The advantages, not the targets, are whitened over all loss tokens of the step on every rank: (A - mean) / sqrt(variance +
1e-8), ddof 1 (`returns.py`). Rows without a finite reward or without values are in no statistic.

Options. Decoupled lambda (VC-PPO, arXiv 2503.01491): targets with `critic.lam`, advantages with `algorithm.lam`. Lambda by
length (VAPO, arXiv 2504.05118): 1 - 1 / (alpha n), at least 0.

Departures: float64, and exact sums, so that no layout changes a bit of what the same values and rewards give. verl has the
same recursion and whitening, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_megatron.algo.advantages import (
    Advantages,
    advantage_estimators,
    at_loss_tokens,
    finite_steps,
    spread_over_response,
)
from grpo_megatron.algo.returns import token_rewards, whitened_advantages
from grpo_megatron.config import AlgorithmConfig
from grpo_megatron.types import GroupTable


def advantages_of(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """A_t of one response, from r_t and V_t of its loss tokens."""
    advantages: list[float] = []
    following = next_value = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + gamma * next_value - value + gamma * lam * following
        next_value = value
        advantages.append(following)
    return advantages[::-1]


@advantage_estimators.register("gae", needs_values=True)
def gae(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Whitened advantages, one per response token. Raises ValueError when the table has no values."""
    if not table.values and len(table):
        raise ValueError("algorithm.adv_estimator='gae' needs the values of a critic, and the table has none")
    rows = _rows_with_values(table)
    lams = table.lams or [config.lam] * len(table)
    return whitened_advantages(table, rows, [_advantages(table, row, config.gamma, lams[row]) for row in rows])


def value_targets(table: GroupTable, gamma: float, lam: float) -> dict[int, list[float]]:
    """Row -> what the critic should predict at each response token; 0 outside the loss. Rows that `gae` gives 0 are absent."""
    targets = {}
    for row in _rows_with_values(table):
        values = at_loss_tokens(table, row, table.values[row])
        advantages = _advantages(table, row, gamma, lam)
        targets[row] = spread_over_response(table, row, [a + v for a, v in zip(advantages, values, strict=True)])
    return targets


def length_adaptive_lams(table: GroupTable, alpha: float) -> list[float]:
    """Lambda of each row: 1 - 1 / (alpha * its loss tokens), at least 0."""
    return [max(0.0, 1.0 - 1.0 / (alpha * count)) if count else 0.0 for count in table.num_loss_tokens()]


def explained_variance(table: GroupTable, targets: dict[int, list[float]]) -> float | None:
    """1 - Var(target - value) / Var(target) over the loss tokens of the step; None where all targets are equal."""
    pairs = [
        (target, value)
        for row, of_row in targets.items()
        for target, value in zip(
            at_loss_tokens(table, row, of_row), at_loss_tokens(table, row, table.values[row]), strict=True
        )
    ]
    total = _squares([target for target, _ in pairs])
    return 1.0 - _squares([target - value for target, value in pairs]) / total if total else None


def _squares(numbers: Sequence[float]) -> float:
    """The sum of squared deviations from the mean."""
    mean = math.fsum(numbers) / max(1, len(numbers))
    return math.fsum((number - mean) ** 2 for number in numbers)


def _rows_with_values(table: GroupTable) -> list[int]:
    return [row for row, reward in enumerate(table.reward) if math.isfinite(reward) and table.values[row]]


def _advantages(table: GroupTable, row: int, gamma: float, lam: float) -> list[float]:
    values = at_loss_tokens(table, row, table.values[row])
    if not all(map(math.isfinite, values)):
        raise ValueError(
            f"the critic gives values that are not finite to table row {row}; lower critic.optim.lr, and go on from an"
            " earlier checkpoint"
        )
    return advantages_of(_rewards(table, row), values, gamma, lam)


def _rewards(table: GroupTable, row: int) -> list[float]:
    """r_t of the row's loss tokens."""
    reward = table.reward[row]
    if table.step_rewards and table.step_rewards[row]:
        penalty = table.raw_reward[row] - reward if table.raw_reward else 0.0
        return token_rewards(table, row, finite_steps(table, row), -penalty)
    turns = table.turn_rewards[row] if table.turn_rewards else []
    return token_rewards(table, row, turns, reward - math.fsum(part for _, part in turns))
