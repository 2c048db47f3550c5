"""Policy losses per token, and the one function that composes policy loss, KL and entropy into a scalar.

With rho = exp(clamp(logprobs - old_logprobs, -20, 20)) and A the advantage:

    vanilla  max(-A rho, -A clamp(rho, 1 - clip_ratio_low, 1 + clip_ratio_high))         PPO, arXiv 1707.06347
             where A < 0 also at most -A clip_ratio_c (dual clip)                        arXiv 1912.09729
             clip_ratio_high > clip_ratio_low is DAPO's clip-higher                      arXiv 2503.14476
    sft      -logprobs

    total    sum over tokens of  w * (policy loss + kl_loss_coef * KL - entropy_coeff * entropy)

w are the weights of `token_weights.py`: already normalised over the optimizer step. The total is therefore a **plain
sum**: add it, and its gradient, over micro-batches and ranks; never average. Where we depart from the papers: the
log-ratio is clamped, so that one token cannot overflow exp (as in verl); `actor/ratio_clamp_frac` counts those tokens
and `actor/ppo_kl` is reported unclamped.

Another loss is one function with the signature of `PolicyLoss`. It sees whole sequences, so sequence-level ratios need
nothing else. Masked positions are 0 in every tensor it is given, whatever they held before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_megatron.algo.kl import KlPenalty
from grpo_megatron.config import ActorConfig
from grpo_megatron.registry import Registry

LOG_RATIO_CLAMP = 20.0


@dataclass(frozen=True)
class LossInputs:
    """What a loss may look at: one micro-batch of B whole responses, all `[B, R]`, column t = response token t.

    Making one replaces masked entries of every tensor by 0. This must happen before any exp: a -inf or NaN that is
    multiplied by a zero mask afterwards is NaN, in the value or in the gradient.
    """

    logprobs: Tensor  # current policy; carries the gradient
    entropy: Tensor  # current policy, nats
    old_logprobs: Tensor  # training engine, start of the update
    rollout_logprobs: Tensor  # inference engine
    ref_logprobs: Tensor | None  # None: no reference model
    advantages: Tensor
    mask: Tensor  # bool; true: a token of the loss
    token_weights: Tensor

    def __post_init__(self) -> None:
        assert self.mask.dtype == torch.bool, f"mask must be bool, not {self.mask.dtype}"
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or field.name == "mask":
                continue
            # A [B, 1] or [R] tensor would broadcast into a plausible, wrong loss.
            assert value.shape == self.mask.shape, f"{field.name} is {value.shape}, mask is {self.mask.shape}"
            object.__setattr__(self, field.name, value.masked_fill(~self.mask, 0.0))


class MetricSum(NamedTuple):
    """One micro-batch's share of a metric, detached. Add shares over micro-batches and ranks of a mini-batch; then

    num_tokens None: `total` is the value: its terms carried the token weights, so it aggregates as the loss does.
    num_tokens given: the value is total / num_tokens, a token mean.
    """

    total: Tensor  # []
    num_tokens: Tensor | None  # [], int64

    def plus(self, other: MetricSum) -> MetricSum:
        """The share of both micro-batches together."""
        if self.num_tokens is None or other.num_tokens is None:
            return MetricSum(self.total + other.total, None)
        return MetricSum(self.total + other.total, self.num_tokens + other.num_tokens)


# (inputs, config) -> (loss, metrics by name); all [B, R]. The metrics are averaged over unmasked tokens.
PolicyLoss = Callable[[LossInputs, ActorConfig], tuple[Tensor, dict[str, Tensor]]]

policy_losses: Registry[PolicyLoss] = Registry("policy loss")


@policy_losses.register("vanilla")
def vanilla(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate with asymmetric bounds and the dual clip; the loss GRPO and DAPO use.

    Reports `actor/pg_clipfrac` (clipped surrogate > unclipped one, as losses), `actor/pg_clipfrac_lower` (dual clip
    active), `actor/ppo_kl` (old - new, unclamped) and `actor/ratio_clamp_frac`.
    """
    advantages = inputs.advantages
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    loss = torch.maximum(unclipped, clipped)
    dual_active = torch.zeros_like(inputs.mask)
    if config.clip_ratio_c is not None:
        bound = -advantages * config.clip_ratio_c
        dual_active = (advantages < 0) & (loss > bound)
        loss = torch.where(dual_active, bound, loss)
    return loss, {
        "actor/pg_clipfrac": clipped > unclipped,
        "actor/pg_clipfrac_lower": dual_active,
        "actor/ppo_kl": -log_ratio,
        "actor/ratio_clamp_frac": log_ratio.abs() > LOG_RATIO_CLAMP,
    }


@policy_losses.register("sft")
def sft(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood; advantages and ratios play no part."""
    return -inputs.logprobs, {}


def total_loss(
    inputs: LossInputs, config: ActorConfig, policy_loss: PolicyLoss, kl_penalty: KlPenalty | None
) -> tuple[Tensor, dict[str, MetricSum]]:
    """One micro-batch's share of the mini-batch's loss, and of its metrics.

    Returns a scalar with gradient (0, with zero gradients, when everything is masked or B is 0), and sums: see
    `MetricSum`. `actor/pg_loss`, `actor/entropy_loss` and, with a penalty, `actor/kl_loss` are aggregated like the loss
    and before their coefficients; `actor/entropy` and metrics of the policy loss and of the penalty are token means.
    `kl_penalty` None: no KL term; else `inputs.ref_logprobs` must be there.
    """
    weights = inputs.token_weights
    per_token, token_metrics = policy_loss(inputs, config)
    per_token = torch.where(inputs.mask, per_token, 0.0)
    weighted = {"actor/pg_loss": per_token, "actor/entropy_loss": inputs.entropy}

    if kl_penalty is not None:
        assert inputs.ref_logprobs is not None, "a KL loss needs ref_logprobs"
        kl, kl_metrics = kl_penalty(inputs.logprobs, inputs.ref_logprobs)
        weighted["actor/kl_loss"] = kl
        token_metrics = token_metrics | kl_metrics
        # A coefficient of 0 leaves the term out: 0 * inf would be NaN.
        if config.kl_loss_coef != 0.0:
            per_token = per_token + config.kl_loss_coef * kl
    if config.entropy_coeff != 0.0:
        per_token = per_token - config.entropy_coeff * inputs.entropy

    metrics = {name: MetricSum((weights * value.detach()).sum(), None) for name, value in weighted.items()}
    token_metrics = token_metrics | {"actor/entropy": inputs.entropy}
    num_tokens = inputs.mask.sum()
    for name, value in token_metrics.items():
        masked = torch.where(inputs.mask, value.detach().to(weights.dtype), 0.0)
        metrics[name] = MetricSum(masked.sum(), num_tokens)
    return (weights * per_token).sum(), metrics
