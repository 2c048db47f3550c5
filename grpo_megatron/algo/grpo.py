"""GRPO and its variants: advantages from the rewards of a prompt's samples, and losses. DAPO's penalty is in advantages.py.

GRPO's loss is PPO's clipped surrogate (`vanilla` in ppo.py); its KL is k3 (kl.py). Dr.GRPO is a switch of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from grpo_megatron.algo.advantages import (
    Advantages,
    advantage_estimators,
    check_rewards,
    deviations,
    finite_steps,
    group_scale,
    is_informative,
    penalised_rewards,
    per_group,
    scorable_groups,
)
from grpo_megatron.algo.losses import (
    SEQUENCE_MEAN,
    LossInputs,
    LossMetrics,
    clipped_surrogate,
    policy_losses,
    ratio_metrics,
    ratio_of,
    sequence_mean,
)
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.shapes import Float
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


@advantage_estimators.register("lite_ppo", compares_group=True)
def lite_ppo(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Computes A_i = (r_i - mean of the group) / (std of the step + 1e-6) (Lite PPO, arXiv 2508.08221).

    The std (ddof 1) is over all scorable rewards of the step, on every rank, as TRL's scale_rewards=batch. A group of equal
    rewards has exactly 0.
    """
    scorable = [reward for reward in penalised_rewards(table) if math.isfinite(reward)]
    scale = group_scale(deviations(scorable), config) if is_informative(scorable) else 1.0
    return per_group(table, lambda rewards, rows: [deviation / scale for deviation in deviations(rewards)])


@advantage_estimators.register("maxrl", compares_group=True)
def maxrl(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Computes A_i = (r_i - mean) / mean, for rewards that are not negative (MaxRL, arXiv 2602.02710).

    With rewards 0 and 1 this is the gradient of the likelihood, cut off at order n: a prompt of pass rate p weighs 1 / p. A
    group with a mean of 0 or less gets 0, as in prime-rl.
    """

    def estimate(rewards: list[float], rows: list[int]) -> list[float]:
        mean = math.fsum(rewards) / len(rewards)
        return [deviation / mean if mean > 0 else 0.0 for deviation in deviations(rewards)]

    return per_group(table, estimate)


@advantage_estimators.register("gdpo", compares_group=True, needs_reward_parts=True, ignores_token_penalties=True)
def gdpo(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Normalises each part of the reward apart, and sums the results with weights (GDPO, arXiv 2601.05242).

        z_ik = (r_ik - mean) / (std + 1e-6) over the group,   a_i = sum of w_k z_ik,   A_i = a_i / (std of the step's a + 1e-6)

    Large parts do not hide small ones: rewards (1, 0) and (0, 1) of equal sums differ. The paper also subtracts the mean of a,
    which is 0. verl whitens over tokens, TRL as here. An overlong penalty is one more part, of weight 1. Without
    `norm_adv_by_std_in_grpo` nothing is divided. Raises ValueError when the table has no parts.
    """
    check_rewards(table.reward)
    if not table.reward_parts and len(table):
        raise ValueError("algorithm.adv_estimator='gdpo' needs the parts of the rewards, and the table has none")
    columns: list[list[float]] = [list(column) for column in zip(*table.reward_parts, strict=True)]
    weights = list(config.gdpo_reward_weights or [1.0] * len(columns))
    if table.raw_reward:
        columns.append([reward - raw for reward, raw in zip(table.reward, table.raw_reward, strict=True)])
        weights.append(1.0)
    is_scorable = [math.isfinite(reward) for reward in table.reward]
    sums = [0.0] * len(table)
    for weight, column in zip(weights, columns, strict=True):
        part = [value if keep else math.nan for value, keep in zip(column, is_scorable, strict=True)]
        normalised = grpo(replace(table, reward=part, token_penalties=[]), config)
        sums = [total + weight * z for total, z in zip(sums, normalised, strict=True) if isinstance(z, float)]
    scorable = [total for total, keep in zip(sums, is_scorable, strict=True) if keep]
    scale = group_scale(deviations(scorable), config) if is_informative(scorable) else 1.0
    return [total / scale for total in sums]


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


# -- GSPO and GMPO: one ratio per response -----------------------------------------------------------------------------
# With d_t = logprobs - old_logprobs over the n loss tokens of a response, every loss token has the value of its sequence.
# Under seq-mean-token-mean, with weights 1 / (N n), the tokens of a sequence add up to 1/N of its value: the total is the
# mean over the N sequences of the optimizer step, whatever the micro-batches and ranks. (Others average GMPO over a
# micro-batch.)


@policy_losses.register("gspo", is_proportional=True, aggregation=(*SEQUENCE_MEAN, "seq-mean-token-sum"))
def gspo(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Clips one ratio per sequence, s = exp(mean of d_t), in the form of `vanilla` without the dual clip (arXiv 2507.18071).

    The ratio of whole sequences is exp(sum of d_t). GSPO takes the mean, as its paper defines it: for independent d_t of
    standard deviation 0.01, the sum over 4,096 tokens has 0.64, and more for longer responses, so that no bound suits all
    lengths and one token can clip a response. The mean has 0.00016, which is the scale of the paper's bounds, 3e-4 and 4e-4.
    The gradient of a response is then its tokens' mean: a long one weighs no more than a short one. With
    `seq-mean-token-sum` the value of a response is multiplied by its length: LUSPO (arXiv 2602.05261; as in TRL).
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = ratio_of(sequence_mean(log_ratio, inputs.mask)).expand_as(log_ratio)
    return clipped_surrogate(inputs, config, ratio, log_ratio)


@policy_losses.register("gspo_token", is_proportional=True, aggregation=SEQUENCE_MEAN)
def gspo_token(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Clips s_t = sg(s) exp(logprobs - sg(logprobs)): the sequence's ratio with each token's own gradient (2507.18071).

    The value is that of `gspo`, and the gradient too where A is one number for the sequence. A may differ between tokens.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = ratio_of(sequence_mean(log_ratio.detach(), inputs.mask))
    return clipped_surrogate(inputs, config, ratio * (inputs.logprobs - inputs.logprobs.detach()).exp(), log_ratio)


@policy_losses.register("gmpo", "geo_mean", is_proportional=True, aggregation=SEQUENCE_MEAN, geometric_correction=True)
def gmpo(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes -A exp(mean of g_t), the geometric mean of ratios that are clipped in log space (arXiv 2507.20673).

    g_t = the smaller of d_t and clamp(d_t, -clip_ratio_low, clip_ratio_high) where A > 0, the larger elsewhere; A is the mean
    over the tokens. Useful bounds are larger than those of `vanilla`: 0.4 in the paper. "geo_mean" in verl, whose metrics
    these are: `actor/pg_clipfrac` and `_lower` are the shares of tokens outside the bounds where A > 0 and where A < 0.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    advantage = sequence_mean(inputs.advantages, inputs.mask)
    bounded = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    pessimistic = torch.where(advantage > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    ratio = ratio_of(sequence_mean(pessimistic, inputs.mask))
    outside = bounded != log_ratio
    metrics = ratio_metrics(log_ratio, outside & (advantage > 0), outside & (advantage < 0))
    return (-advantage * ratio).expand_as(log_ratio), metrics


# -- CISPO and SAPO: token ratios, without the hard clip that takes a token out of the gradient ------------------------


@policy_losses.register("cispo", is_proportional=True)
def cispo(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes REINFORCE with a bounded importance weight (arXiv 2506.13585): a clipped token keeps its gradient.

        -sg(clamp(rho, 1 - cispo_clip_ratio_low, 1 + clip_ratio_high)) A logprobs

    The lower bound is off by default, as in the paper. `actor/pg_clipfrac` is the share of tokens whose ratio is outside the
    bounds, whatever the advantage.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = ratio_of(log_ratio).detach()
    weight = ratio.clamp(max(0.0, 1.0 - config.cispo_clip_ratio_low), 1.0 + config.clip_ratio_high)
    return -weight * inputs.advantages * inputs.logprobs, ratio_metrics(log_ratio, weight != ratio)


@policy_losses.register("sapo", is_proportional=True, aggregation=("seq-mean-token-mean",))
def sapo(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes a sigmoid gate in place of the clip (arXiv 2511.20347).

        -A 4/tau sigmoid(tau (rho - 1)),   tau = tau_pos where A > 0, else tau_neg

    Its slope is 1 at ratio 1 and decreases smoothly on both sides.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    tau = torch.full_like(log_ratio, config.tau_neg).masked_fill(inputs.advantages > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (ratio_of(log_ratio) - 1.0)) * 4.0 / tau
    return -inputs.advantages * gate, ratio_metrics(log_ratio, torch.zeros_like(inputs.mask))
