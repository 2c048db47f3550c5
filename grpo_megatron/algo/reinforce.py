"""REINFORCE with baselines: RLOO, OPO, GPG, ReMax, REINFORCE++. Most go with the loss `gpg`, the plain policy gradient.

t and s number the n_i loss tokens of response i. A token outside the loss has neither advantage nor penalty, and the discount
skips it. Where all tokens of the batch have the same number, whitened advantages are exactly 0.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from grpo_megatron.algo.advantages import (
    Advantages,
    advantage_estimators,
    at_loss_tokens,
    check_rewards,
    deviations,
    informative_groups,
    is_informative,
    penalised_rewards,
    per_group,
    scorable_groups,
    spread_over_response,
)
from grpo_megatron.algo.losses import LossInputs, LossMetrics, policy_losses
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.shapes import Float
from grpo_megatron.types import GroupTable

VARIANCE_EPSILON = 1e-8


@policy_losses.register("gpg", is_proportional=True)
def policy_gradient(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes -A logprobs: the plain policy gradient on the policy's own samples, without a ratio (arXiv 2504.02546)."""
    return -inputs.advantages * inputs.logprobs, {}


@advantage_estimators.register("rloo", compares_group=True)
def rloo(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Subtracts the mean reward of the other samples (arXiv 2402.14740): A_i = n / (n - 1) (r_i - mean).

    There is no division by the std of the other samples: it is 0 where they all have the same reward.
    """

    def estimate(rewards: list[float], rows: list[int]) -> list[float]:
        return [deviation * len(rewards) / (len(rewards) - 1) for deviation in deviations(rewards)]

    return per_group(table, estimate)


@advantage_estimators.register("opo", compares_group=True)
def opo(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Subtracts the length-weighted mean (arXiv 2505.23585): A_i = r_i - sum(l_j r_j) / sum(l_j), l loss tokens.

    This baseline has the least variance if a response's squared gradient norm grows with its length. A group without any
    loss token, which the plan leaves out anyway, gets 0.
    """
    lengths = table.num_loss_tokens()

    def estimate(rewards: list[float], rows: list[int]) -> list[float]:
        num_tokens = sum(lengths[row] for row in rows)
        if not num_tokens:
            return [0.0] * len(rows)
        baseline = math.fsum(lengths[row] * reward for row, reward in zip(rows, rewards, strict=True)) / num_tokens
        return [reward - baseline for reward in rewards]

    return per_group(table, estimate)


@advantage_estimators.register("optimal_token_baseline", compares_group=True, needs_score_norms=True)
def optimal_token_baseline(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Subtracts a baseline of its own at each token (OTB, arXiv 2602.07078; as in verl, whose two estimators are this one).

        A_it = G_it - B_t,    B_t = sum_j W_jt G_jt / sum_j W_jt,    W_jt = sum over s <= t of 1 - 2 pi_js + sum_v pi(v)^2

    t counts the loss tokens of a response, over all its turns; G is the return from t on, without discount; sums are over the
    group's responses with a token t. The summand is the squared norm of the gradient of log pi_js by the logits. Where one
    response goes on alone, B is 0, as by verl's default; verl's weights of importance sampling in W are not here.
    """
    advantages: Advantages = [0.0] * len(table)
    lengths = table.num_loss_tokens()
    for rows in informative_groups(table, penalised_rewards(table)):
        returns, energies = [], []
        for row in rows:
            gain = _returns(table, row, 1.0)
            returns.append(gain if isinstance(gain, list) else [gain] * lengths[row])
            energies.append(list(itertools.accumulate(at_loss_tokens(table, row, table.score_norms[row]))))
        baselines = []
        for t in range(max(lengths[row] for row in rows)):
            columns = ((w[t], g[t]) for w, g in zip(energies, returns, strict=True) if t < len(w))
            pairs = [(w, g) for w, g in columns if w > 0]  # 0: a row that is in no batch
            total = math.fsum(w for w, _ in pairs) if len(pairs) > 1 else 0.0
            baselines.append(math.fsum(w * g for w, g in pairs) / total if total else 0.0)
        for row, gains in zip(rows, returns, strict=True):
            values = [gain - baseline for gain, baseline in zip(gains, baselines, strict=False)]
            advantages[row] = spread_over_response(table, row, values)
    return advantages


@advantage_estimators.register("gpg", compares_group=True)
def gpg(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Scales deviations by the share of rewards that are not 0 (arXiv 2504.02546): A_i = a (r_i - mean).

    a = #samples / #{r != 0} over the step, as verl counts; the paper counts samples that have a gradient.
    """
    scorable = [reward for reward in penalised_rewards(table) if math.isfinite(reward)]
    alpha = len(scorable) / max(1, sum(reward != 0 for reward in scorable))
    return per_group(table, lambda rewards, rows: [alpha * deviation for deviation in deviations(rewards)])


@advantage_estimators.register("remax", needs_greedy_reward=True)
def remax(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Subtracts the reward of the prompt's greedy response (arXiv 2310.10505): A_it = R_it - greedy reward, gamma 1.

    One number per row, or, with token penalties, one per token. Samples of a prompt whose greedy response has no reward get
    None. Raises ValueError without greedy responses.
    """
    if not table.greedy_reward and len(table):
        raise ValueError(
            "algorithm.adv_estimator='remax' needs the reward of each prompt's greedy response, and none was generated; "
            "generate one, or set adv_estimator='rloo', whose baseline is the other samples"
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


@advantage_estimators.register("reinforce_plus_plus")
def reinforce_plus_plus(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Whitens the returns over all loss tokens of the step (arXiv 2501.03262): long responses weigh more, by design.

        A_it = (R_it - m) / sqrt(v + 1e-8)          m, v (ddof 1): over all loss tokens of the step, on every rank
        R_it = r_i gamma^(n_i - 1 - t) - sum over s >= t of gamma^(s - t) p_is

    p_is is the penalty of token s (a KL in the reward), 0 where there is none. The reward falls on the last loss token;
    parts of it that single turns have earned fall on the last token of their turn, and later tokens do not have them.
    Rows without a finite reward are in no statistic and get 0.
    """
    rows = [row for row in range(len(table)) if math.isfinite(table.reward[row])]
    return whitened_advantages(table, rows, [_returns(table, row, config.gamma) for row in rows])


@advantage_estimators.register("reinforce_plus_plus_baseline", compares_group=True)
def reinforce_plus_plus_baseline(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Whitens r_i - mean of the prompt's rewards in the same way (arXiv 2501.03262). The discount has no effect.

    A prompt whose samples all have one reward has deviations of exactly 0, but the whitening may shift them: it centres the
    batch, not the group.
    """
    rewards = penalised_rewards(table)
    rows: list[int] = []
    centred: list[float | list[float]] = []
    for group in scorable_groups(table, rewards):
        values = [rewards[row] for row in group]
        rows += group
        centred += deviations(values) if is_informative(values) else [0.0] * len(group)
    return whitened_advantages(table, rows, centred)


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Computes R_t = sum over s >= t of gamma^(s - t) * rewards[s]."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]


def whiten(values: Sequence[float | list[float]], lengths: Sequence[int]) -> list[float | list[float]]:
    """Centres and scales over all tokens. values[i]: one number for each of lengths[i] tokens, or a list of them."""
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


def whitened_advantages(table: GroupTable, rows: list[int], values: list[float | list[float]]) -> Advantages:
    """Whitens `values[i]`, one number or one per loss token, of `rows[i]`. The other rows get 0."""
    num_loss_tokens = table.num_loss_tokens()
    advantages: Advantages = [0.0] * len(table)
    for row, value in zip(rows, whiten(values, [num_loss_tokens[row] for row in rows]), strict=True):
        advantages[row] = spread_over_response(table, row, value) if isinstance(value, list) else value
    return advantages


def _returns(table: GroupTable, row: int, gamma: float) -> float | list[float]:
    """Computes R_t at the loss tokens of one response: a single number where every token has the same."""
    reward = table.reward[row]
    check_rewards([reward])
    turn_rewards = table.turn_rewards[row] if table.turn_rewards else []
    if gamma == 1.0 and not table.token_penalties and not turn_rewards:
        return reward
    rest = reward - math.fsum(part for _, part in turn_rewards)
    rewards = token_rewards(table, row, turn_rewards, rest)
    return discounted_returns(rewards, gamma) if rewards else reward


def token_rewards(table: GroupTable, row: int, parts: Sequence[tuple[int, float]], rest: float) -> list[float]:
    """Computes the reward of every loss token of a row: minus its penalty, plus its share of `parts` and `rest`.

    `parts` are (response token, reward): each falls on the last loss token that is not behind its token. `rest` falls on the
    last loss token. [] without a loss token.
    """
    penalties = table.token_penalties[row] if table.token_penalties else [0.0] * table.response_length[row]
    rewards = [-penalty for penalty in at_loss_tokens(table, row, penalties)]
    check_rewards(rewards)
    if not rewards:
        return []
    tokens = [token for start, end in table.spans_of(row) for token in range(start, end)]
    for token, part in parts:
        rewards[max(0, bisect.bisect_right(tokens, token) - 1)] += part
    rewards[-1] += rest
    return rewards
