"""PPO: the clipped surrogate, which is also the loss of GRPO and DAPO; and, with a critic, GAE and the value loss.

training/beside.py runs the critic: values, then targets and advantages (`gae`), then the update by `value_loss`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_megatron.algo.advantages import (
    Advantages,
    advantage_estimators,
    at_loss_tokens,
    finite_steps,
    spread_over_response,
)
from grpo_megatron.algo.losses import (
    LossInputs,
    LossMetrics,
    MaskedInputs,
    MetricSum,
    clipped_surrogate,
    policy_losses,
    ratio_of,
)
from grpo_megatron.algo.reinforce import token_rewards, whitened_advantages
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.shapes import Bool, Float
from grpo_megatron.types import GroupTable


@policy_losses.register("vanilla", is_proportional=True)
def vanilla(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes PPO's clipped surrogate (arXiv 1707.06347), with two bounds and the dual clip.

        max(-A rho, -A clamp(rho, 1 - clip_ratio_low, 1 + clip_ratio_high))
        where A < 0 also at most -A clip_ratio_c           dual clip, arXiv 1912.09729; null: off

    clip_ratio_high > clip_ratio_low is DAPO's clip-higher (arXiv 2503.14476). Reports `actor/pg_clipfrac` (clipped surrogate
    > unclipped one, as losses), `actor/pg_clipfrac_lower` (dual clip active), `actor/ppo_kl` (old - new, unclamped) and
    `actor/ratio_clamp_frac`.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    loss, metrics = clipped_surrogate(inputs, config, ratio_of(log_ratio), log_ratio)
    if config.clip_ratio_c is not None:
        bound = -inputs.advantages * config.clip_ratio_c
        dual_active = (inputs.advantages < 0) & (loss > bound)
        loss = torch.where(dual_active, bound, loss)
        metrics["actor/pg_clipfrac_lower"] = dual_active
    return loss, metrics


# -- GAE ---------------------------------------------------------------------------------------------------------------


@advantage_estimators.register("gae", needs_values=True)
def gae(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Computes whitened generalised advantages (arXiv 1506.02438), one per response token.

        delta_t = r_t + gamma V_{t+1} - V_t,    V_n = 0
        A_t     = delta_t + gamma lambda A_{t+1} = sum over s >= t of (gamma lambda)^(s - t) delta_s

    t numbers the n loss tokens of a response, the model's own: text that an environment wrote is skipped, and neither gamma
    nor lambda counts it. V_t is the value of the state before token t. A response that was cut off at the limit ends like
    any other, with V_n = 0. r_t are the rewards of `reinforce_plus_plus`, of turns and penalties too. Step rewards fall on
    the ends of the steps and take the place of the response's reward; penalties of the whole response (overlong) stay on the
    last token.

    The advantages, not the targets, are whitened over all loss tokens of the step on every rank. Rows without a finite
    reward or without values are in no statistic. lambda by length: VAPO (`length_adaptive_lams`). Departures: float64 and
    exact sums; verl has the same recursion and whitening in float32. Raises ValueError when the table has no values.
    """
    if not table.values and len(table):
        raise ValueError("algorithm.adv_estimator='gae' needs the values of a critic, and the table has none")
    rows = _rows_with_values(table)
    lams = table.lams or [config.lam] * len(table)
    return whitened_advantages(table, rows, [_advantages(table, row, config.gamma, lams[row]) for row in rows])


def advantages_of(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Computes A_t of one response, from r_t and V_t of its loss tokens."""
    advantages: list[float] = []
    following = next_value = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + gamma * next_value - value + gamma * lam * following
        next_value = value
        advantages.append(following)
    return advantages[::-1]


def value_targets(table: GroupTable, gamma: float, lam: float) -> dict[int, list[float]]:
    """Computes the critic's targets R_t = A_t + V_t, row -> one per response token, 0 outside the loss.

    `lam` is the critic's own: decoupled lambda, VC-PPO, arXiv 2503.01491. Rows that `gae` gives 0 are absent.
    """
    whole = table.joined()
    targets: list[float | list[float]] = [0.0] * len(whole)
    for row in _rows_with_values(whole):
        values = at_loss_tokens(whole, row, whole.values[row])
        advantages = _advantages(whole, row, gamma, lam)
        targets[row] = spread_over_response(whole, row, [a + v for a, v in zip(advantages, values, strict=True)])
    return {row: found for row, found in enumerate(table.spread(targets)) if isinstance(found, list)}


def length_adaptive_lams(table: GroupTable, alpha: float) -> list[float]:
    """Computes lambda of each row: 1 - 1 / (alpha * its loss tokens), at least 0 (VAPO, arXiv 2504.05118)."""
    counts = table.joined().num_loss_tokens()
    return table.spread([max(0.0, 1.0 - 1.0 / (alpha * count)) if count else 0.0 for count in counts])


def explained_variance(table: GroupTable, targets: dict[int, list[float]]) -> float | None:
    """Computes 1 - Var(target - value) / Var(target) over the step's loss tokens; None where all targets are equal."""
    pairs = [
        (target, value)
        for row, row_targets in targets.items()
        for target, value in zip(
            at_loss_tokens(table, row, row_targets), at_loss_tokens(table, row, table.values[row]), strict=True
        )
    ]
    total = _squares([target for target, _ in pairs])
    return 1.0 - _squares([target - value for target, value in pairs]) / total if total else None


def _squares(numbers: Sequence[float]) -> float:
    """Sums the squared deviations from the mean."""
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
    """Computes r_t of the row's loss tokens."""
    reward = table.reward[row]
    if table.step_rewards and table.step_rewards[row]:
        penalty = table.raw_reward[row] - reward if table.raw_reward else 0.0
        return token_rewards(table, row, finite_steps(table, row), -penalty)
    turns = table.turn_rewards[row] if table.turn_rewards else []
    return token_rewards(table, row, turns, reward - math.fsum(part for _, part in turns))


# -- The loss of the critic --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValueInputs(MaskedInputs):
    """The inputs of the value loss: one micro-batch of B whole responses, all `[B, R]`."""

    values: Float[Tensor, "B R"]  # of the current critic; carries the gradient
    old_values: Float[Tensor, "B R"]
    returns: Float[Tensor, "B R"]
    mask: Bool[Tensor, "B R"]  # the loss mask
    token_weights: Float[Tensor, "B R"]


def value_loss(inputs: ValueInputs, cliprange: float | None) -> tuple[Float[Tensor, ""], dict[str, MetricSum]]:
    """Computes the squared error with a bounded move per step, as PPO's reference implementation and verl do.

        v'   = clamp(v, v_old - c, v_old + c)
        loss = sum over tokens of  w * 1/2 max((v - R)^2, (v' - R)^2)

    v_old are the values before the step's first update, R their targets, c is `critic.cliprange_value` (None: no bound), w
    the token weights. The maximum takes the gradient from a value that has moved more than c and is still nearer to R than
    v'. Returns one micro-batch's share, a scalar with gradient, and of its metrics: `critic/vf_loss` aggregates like the
    loss; `critic/vf_clipfrac` (share of tokens whose loss is the clipped one) and `critic/vpred_mean` are token means.
    """
    values, old, returns = inputs.values, inputs.old_values, inputs.returns
    error = (values - returns).square()
    clipped_error = error
    if cliprange is not None:
        clipped_error = (torch.minimum(torch.maximum(values, old - cliprange), old + cliprange) - returns).square()
    loss = (inputs.token_weights * 0.5 * torch.maximum(error, clipped_error)).sum()
    count = inputs.mask.sum()
    is_clipped = (clipped_error > error).detach().to(values.dtype).sum()
    return loss, {
        "critic/vf_loss": MetricSum(loss.detach(), None),
        "critic/vf_clipfrac": MetricSum(is_clipped, count),
        "critic/vpred_mean": MetricSum(values.detach().sum(), count),
    }
