"""Losses for samples of an earlier policy, whose trust region is a mask or a weight instead of PPO's clip.

pi is the current policy and mu the one of `old_logprobs`: with `rollout_correction.bypass_mode`, which the named methods set,
the engine's. rho = pi / mu. Masks and weights have no gradient. The papers could not be read where this was written: the
formulas follow the public implementations that each docstring names.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_megatron.algo.distillation import discounted_sums
from grpo_megatron.algo.kl import binary_kl
from grpo_megatron.algo.losses import (
    LossInputs,
    LossMetrics,
    clamp_log_ratio,
    policy_losses,
    ratio_metrics,
    ratio_of,
)
from grpo_megatron.algo.ppo import vanilla
from grpo_megatron.config import ActorConfig
from grpo_megatron.shapes import Bool, Float

MIN_LOG_WEIGHT = math.log(1e-8)  # of VESPO's W, as in TRL


def masked_surrogate(
    inputs: LossInputs, config: ActorConfig, outside: Bool[Tensor, "B R"]
) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes -sg(min(rho, clip_ratio_c)) A logprobs, and 0 at tokens `outside` the trust region. clip_ratio_c null: no cap.

    A masked token has no gradient and stays in the denominators. `actor/pg_clipfrac` is the share of masked tokens,
    `actor/pg_clipfrac_lower` that of the other ones whose ratio is capped.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = ratio_of(log_ratio).detach()
    weight = ratio if config.clip_ratio_c is None else ratio.clamp(max=config.clip_ratio_c)
    loss = torch.where(outside, 0.0, -weight * inputs.advantages * inputs.logprobs)
    return loss, ratio_metrics(log_ratio, outside, (weight < ratio) & ~outside)


def _gap(inputs: LossInputs) -> Float[Tensor, "B R"]:
    """Computes pi - mu, a difference of probabilities."""
    return inputs.logprobs.detach().exp() - inputs.old_logprobs.exp()


@policy_losses.register("dppo_tv", is_proportional=True)
def dppo_tv(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Masks a token whose probability has moved too far where its advantage drives it (DPPO, arXiv 2602.04879).

        outside    pi - mu > clip_ratio_high where A > 0,    mu - pi > clip_ratio_low elsewhere

    |pi - mu| is the total variation of the two-event distributions (this token, any other). The bounds are differences of
    probabilities, not of ratios. As in verl, with its cap of the ratio at 20.
    """
    gap = _gap(inputs)
    return masked_surrogate(
        inputs, config, torch.where(inputs.advantages > 0, gap > config.clip_ratio_high, -gap > config.clip_ratio_low)
    )


@policy_losses.register("dppo_kl", is_proportional=True)
def dppo_kl(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Masks as `dppo_tv`, by the KL of the two-event distributions, in nats (DPPO, arXiv 2602.04879; as in verl).

    outside    D(mu, pi) > clip_ratio_high and pi > mu where A > 0,    D(mu, pi) > clip_ratio_low and pi < mu elsewhere
    """
    gap, drift = _gap(inputs), binary_kl(inputs.old_logprobs, inputs.logprobs.detach())
    rises, falls = (gap > 0) & (drift > config.clip_ratio_high), (gap < 0) & (drift > config.clip_ratio_low)
    return masked_surrogate(inputs, config, torch.where(inputs.advantages > 0, rises, falls))


@policy_losses.register("ipo", is_proportional=True)
def ipo(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Masks tokens with pi - mu outside [-clip_ratio_low, clip_ratio_high], whatever the advantage (INTELLECT's IPO).

    As in prime-rl, with both bounds eps. Its term kl_tau (log rho)^2, which is 0 by default since 2026-09-18, is not here.
    """
    gap = _gap(inputs)
    return masked_surrogate(inputs, config, (gap > config.clip_ratio_high) | (gap < -config.clip_ratio_low))


@policy_losses.register("icepop", is_proportional=True)
def icepop(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Masks tokens with rho outside [1 - clip_ratio_low, 1 + clip_ratio_high], on both sides (IcePop, arXiv 2510.18855).

    rho is of the current policy, as in prime-rl (arXiv 2512.16144, equation 1). `rollout_is: icepop` bounds the ratio of the
    policy at the start of the update to the engine instead, and clips what follows.
    """
    ratio = ratio_of(inputs.logprobs.detach() - inputs.old_logprobs)
    return masked_surrogate(
        inputs, config, (ratio > 1.0 + config.clip_ratio_high) | (ratio < 1.0 - config.clip_ratio_low)
    )


@policy_losses.register("kpop", is_proportional=True)
def kpop(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Masks tokens with D(pi, mu) > clip_ratio_high or D(mu, pi) > clip_ratio_low, in nats (KPop, Guo et al. 2026).

    D is the KL of the two-event distributions. The source has one bound for both; as in prime-rl. `rollout_rs: binary_kl` has
    the mask for the policy at the start of the update.
    """
    pi, mu = inputs.logprobs.detach(), inputs.old_logprobs
    outside = (binary_kl(pi, mu) > config.clip_ratio_high) | (binary_kl(mu, pi) > config.clip_ratio_low)
    return masked_surrogate(inputs, config, outside)


@policy_losses.register("vespo", is_proportional=True)
def vespo(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Weighs a response by a smooth kernel of its whole ratio (VESPO, arXiv 2602.10693; as in TRL).

        -sg(phi(W)) A logprobs,    phi(W) = W^k e^(lambda (1 - W)),    W = product of the response's rho

    phi(1) = 1, and phi falls to 0 on both sides. k and lambda are vespo_k_pos and vespo_lambda_pos where A >= 0, else
    vespo_k_neg and vespo_lambda_neg. log W is a sum of log-ratios in +-20, within log 1e-8 and 20.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    log_weight = clamp_log_ratio(log_ratio.detach()).sum(-1, keepdim=True).clamp(MIN_LOG_WEIGHT, 20.0)
    k = torch.full_like(log_ratio, config.vespo_k_neg).masked_fill(inputs.advantages >= 0, config.vespo_k_pos)
    decay = torch.full_like(log_ratio, config.vespo_lambda_neg)
    decay = decay.masked_fill(inputs.advantages >= 0, config.vespo_lambda_pos)
    phi = (k * log_weight + decay * (1.0 - log_weight.exp())).exp()
    metrics = ratio_metrics(log_ratio, torch.zeros_like(inputs.mask))
    return -phi * inputs.advantages * inputs.logprobs, {**metrics, "actor/vespo_weight": phi}


@policy_losses.register("fipo", is_proportional=True)
def fipo(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Weighs the clipped surrogate of a token by what the update has done to the later ones (FIPO, arXiv 2603.19835).

        f_t vanilla_t,    f_t = sg(clamp(exp(sum over s >= t of 2^(-(s - t) / fipo_decay_rate) log rho_s), low, high))
        high = 1 + fipo_clip_range,    low = 1 with fipo_clip_high_only, else 1 - fipo_clip_range

    Tokens with rho > clip_ratio_c are left out of the sum. f is within 0.8 and 1 where A < 0 and rho >
    fipo_safety_threshold. As in ms-swift, but s - t counts loss tokens, so that text of an environment has no distance. At the
    first update f = 1.
    """
    log_ratio = (inputs.logprobs - inputs.old_logprobs).detach()
    counted = clamp_log_ratio(log_ratio)
    if config.clip_ratio_c is not None:
        counted = counted.masked_fill(log_ratio > math.log(config.clip_ratio_c), 0.0)
    future = clamp_log_ratio(discounted_sums(counted, inputs.mask, 2.0 ** (-1.0 / config.fipo_decay_rate)))
    lowest = 1.0 if config.fipo_clip_high_only else 1.0 - config.fipo_clip_range
    factor = future.exp().clamp(lowest, 1.0 + config.fipo_clip_range)
    unsafe = (inputs.advantages < 0) & (log_ratio > math.log(config.fipo_safety_threshold))
    factor = torch.where(unsafe, factor.clamp(0.8, 1.0), factor)
    loss, metrics = vanilla(inputs, config)
    return factor * loss, {**metrics, "actor/fipo_weight": factor}


@policy_losses.register("dro")
def dro(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes -(A logprobs - dro_beta / 2 (log rho)^2), a policy gradient held near mu (DRO, arXiv 2405.19107; as in verl).

    The paper's advantage is soft, of a value model; here it is the estimator's.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    loss = -inputs.advantages * inputs.logprobs + 0.5 * config.dro_beta * clamp_log_ratio(log_ratio).square()
    return loss, ratio_metrics(log_ratio, torch.zeros_like(inputs.mask))
