"""Advantage estimators that need more than the group's rewards: every token of the batch, or a greedy response.

    remax                         A_it = R_it - reward of the prompt's greedy response   arXiv 2310.10505
    reinforce_plus_plus           A_it = (R_it - m) / sqrt(v + 1e-8)                     arXiv 2501.03262
    reinforce_plus_plus_baseline  the same of r_i - mean of the prompt's rewards, at every token

    R_it = r_i gamma^(n_i - 1 - t) - sum over s >= t of gamma^(s - t) p_is

t and s number the n_i loss tokens of the response: a token outside the loss has neither advantage nor penalty, and the
discount skips it. r_i is the reward, which falls on the last loss token; parts of it that single turns have earned fall
on the last token of their turn, and the returns of later tokens do not have them. p_is is the penalty of token s (a KL
penalty in the reward), 0 where there is none. remax has gamma 1. m and v (ddof 1) are over **all loss tokens of the
step**, on every rank: long responses weigh more, by design.

Departures: sums are exact (`math.fsum`), so results are bit-identical in any order and layout. Where every token has the same
number, all advantages are exactly 0. Rows without a finite reward are in no statistic and get 0. A prompt whose samples
all have one reward has deviations of exactly 0, but the whitening may shift them: it centres the batch, not the group.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from grpo_megatron.algo.advantages import (
    Advantages,
    advantage_estimators,
    at_loss_tokens,
    check_rewards,
    deviations,
    finite_steps,
    is_informative,
    penalised_rewards,
    scorable_groups,
    spread_over_response,
)
from grpo_megatron.config import AlgorithmConfig
from grpo_megatron.types import GroupTable

VARIANCE_EPSILON = 1e-8


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """R_t = sum over s >= t of gamma^(s - t) * rewards[s]."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]


def whiten(values: Sequence[float | list[float]], lengths: Sequence[int]) -> list[float | list[float]]:
    """Centre and scale over all tokens. values[i]: one number for each of lengths[i] tokens, or a list of them."""
    flat: list[tuple[float, int]] = []  # (value, number of tokens that have it)
    for value, length in zip(values, lengths, strict=True):
        flat += [(v, 1) for v in value] if isinstance(value, list) else [(value, length)]
    flat = [(value, count) for value, count in flat if count]
    num_tokens = sum(count for _, count in flat)
    if not is_informative([value for value, _ in flat]):
        return [[0.0] * len(value) if isinstance(value, list) else 0.0 for value in values]
    mean = math.fsum(value * count for value, count in flat) / num_tokens
    variance = math.fsum(count * (value - mean) ** 2 for value, count in flat) / (num_tokens - 1)
    scale = math.sqrt(variance + VARIANCE_EPSILON)
    return [
        [(v - mean) / scale for v in value] if isinstance(value, list) else (value - mean) / scale for value in values
    ]


@advantage_estimators.register("reinforce_plus_plus")
def reinforce_plus_plus(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Whitened returns. One number per row where all its tokens have the same return, else one per token."""
    rows = [row for row in range(len(table)) if math.isfinite(table.reward[row])]
    return whitened_advantages(table, rows, [_returns(table, row, config.gamma) for row in rows])


@advantage_estimators.register("reinforce_plus_plus_baseline", compares_group=True)
def reinforce_plus_plus_baseline(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Whitened deviations from the prompt's mean reward. One number per row; the discount has no effect."""
    rewards = penalised_rewards(table)
    rows: list[int] = []
    centred: list[float | list[float]] = []
    for group in scorable_groups(table, rewards):
        values = [rewards[row] for row in group]
        rows += group
        centred += deviations(values) if is_informative(values) else [0.0] * len(group)
    return whitened_advantages(table, rows, centred)


@advantage_estimators.register("remax", needs_greedy_reward=True)
def remax(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Reward minus that of the greedy response. Samples of a prompt whose greedy response has no reward get None.

    One number per row, or, with token penalties, one per token. Raises ValueError when no greedy response was drawn.
    """
    if not table.greedy_reward and len(table):
        raise ValueError(
            "algorithm.adv_estimator='remax' needs the reward of each prompt's greedy response, and none was drawn; "
            "draw one, or set adv_estimator='rloo', whose baseline is the other samples"
        )
    check_rewards(table.greedy_reward)
    advantages: Advantages = [0.0] * len(table)
    for row, baseline in enumerate(table.greedy_reward):
        if not math.isfinite(baseline):
            advantages[row] = None
        elif math.isfinite(table.reward[row]):
            returns = _returns(replace(table, turn_rewards=[]), row, 1.0)  # the baseline is of whole trajectories
            if isinstance(returns, list):
                advantages[row] = spread_over_response(table, row, [value - baseline for value in returns])
            else:
                advantages[row] = returns - baseline
    return advantages


def _returns(table: GroupTable, row: int, gamma: float) -> float | list[float]:
    """R_t at the loss tokens of one response: a single number where every token has the same."""
    reward = table.reward[row]
    check_rewards([reward])
    turn_rewards = table.turn_rewards[row] if table.turn_rewards else []
    if gamma == 1.0 and not table.token_penalties and not turn_rewards:
        return reward
    rest = reward - math.fsum(part for _, part in turn_rewards)
    rewards = token_rewards(table, row, turn_rewards, rest)
    return discounted_returns(rewards, gamma) if rewards else reward


def token_rewards(table: GroupTable, row: int, parts: Sequence[tuple[int, float]], rest: float) -> list[float]:
    """The reward of every loss token of a row: minus its penalty, plus what falls on it. [] without a loss token.

    `parts` are (response token, reward): a reward falls on the last loss token that is not behind its token. `rest` falls
    on the last loss token.
    """
    penalties = table.token_penalties[row] if table.token_penalties else [0.0] * table.response_length[row]
    rewards = [-penalty for penalty in at_loss_tokens(table, row, penalties)]
    check_rewards(rewards)
    if not rewards:
        return []
    for index, part in _at_loss_indices(table, row, parts):
        rewards[index] += part
    rewards[-1] += rest
    return rewards


def _at_loss_indices(
    table: GroupTable, row: int, turn_rewards: Sequence[tuple[int, float]]
) -> Iterator[tuple[int, float]]:
    """(index among the row's loss tokens, reward): of the last loss token that is not behind the turn's last token."""
    tokens = [token for start, end in table.spans_of(row) for token in range(start, end)]
    for token, reward in turn_rewards:
        yield max(0, bisect.bisect_right(tokens, token) - 1), reward


def whitened_advantages(table: GroupTable, rows: list[int], values: list[float | list[float]]) -> Advantages:
    """`values[i]`, one number or one per loss token, belongs to `rows[i]`. The other rows get 0."""
    num_loss_tokens = table.num_loss_tokens()
    advantages: Advantages = [0.0] * len(table)
    for row, value in zip(rows, whiten(values, [num_loss_tokens[row] for row in rows]), strict=True):
        advantages[row] = spread_over_response(table, row, value) if isinstance(value, list) else value
    return advantages


# -- Generalised advantage estimation ----------------------------------------------------------------------------------
# Generalised advantage estimation (arXiv 1506.02438), for PPO with a critic (arXiv 1707.06347).
#
#     delta_t = r_t + gamma V_{t+1} - V_t,    V_n = 0
#     A_t     = delta_t + gamma lambda A_{t+1} = sum over s >= t of (gamma lambda)^(s - t) delta_s
#     R_t     = A_t + V_t                       the critic's target, with the critic's own lambda
#
# t numbers the n loss tokens of a response, which are the model's own tokens: text that an environment wrote is skipped, and
# neither gamma nor lambda counts it. V_t is the value of the state before token t. A response that was cut off at the limit
# ends like any other, with V_n = 0.
#
# r_t has all that the table knows, as the returns of `reinforce_plus_plus` do: the reward falls on the last token, what a
# turn has earned on the last token of that turn, and a penalty (KL in the reward) on its token. Where the reward function
# scores steps, their rewards fall on the ends of the steps and take the place of the response's reward, as in `grpo_process`;
# penalties of the whole response (overlong) stay on the last token.
#
# The advantages, not the targets, are whitened over all loss tokens of the step on every rank: (A - mean) / sqrt(variance +
# 1e-8), ddof 1 (`returns.py`). Rows without a finite reward or without values are in no statistic.
#
# Options. Decoupled lambda (VC-PPO, arXiv 2503.01491): targets with `critic.lam`, advantages with `algorithm.lam`. Lambda by
# length (VAPO, arXiv 2504.05118): 1 - 1 / (alpha n), at least 0.
#
# Departures: float64, and exact sums, so that no layout changes a bit of what the same values and rewards give. verl has the
# same recursion and whitening, in float32.


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
