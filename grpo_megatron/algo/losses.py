"""Policy losses per token, and the one function that composes policy loss, KL and entropy into a scalar.

With rho = exp(clamp(logprobs - old_logprobs, -20, 20)), A the advantage and sg the stop of the gradient:

    vanilla   max(-A rho, -A clamp(rho, 1 - clip_ratio_low, 1 + clip_ratio_high))        PPO, arXiv 1707.06347
              where A < 0 also at most -A clip_ratio_c (dual clip)                       arXiv 1912.09729
              clip_ratio_high > clip_ratio_low is DAPO's clip-higher                     arXiv 2503.14476
    cispo     -sg(clamp(rho, 1 - cispo_clip_ratio_low, 1 + clip_ratio_high)) A logprobs  arXiv 2506.13585
    sapo      -A 4/tau sigmoid(tau (rho - 1)), tau = tau_pos where A > 0, else tau_neg   arXiv 2511.20347
    gpg, sft  -A logprobs                                    arXiv 2504.02546; A = 1: maximum likelihood

    total     sum over tokens of  w * (c * policy loss + kl_loss_coef * KL - entropy_coeff * entropy)

`sequence_losses.py` has those that know a whole response. c is the correction of `correction.py` (1 without); w are the
weights of `token_weights.py`: already normalised over the optimizer step. The total is therefore a **plain sum**: add
it, and its gradient, over micro-batches and ranks; never average. Where we depart from the papers: the log-ratio is
clamped, so that one token cannot overflow exp (as in verl); `actor/ratio_clamp_frac` counts those tokens and
`actor/ppo_kl` is reported unclamped. CISPO's lower bound is off unless it is asked for, as in its paper.

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
    correction: Tensor | None = None  # multiplies the policy loss alone; None: 1

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


# A metric by name: [B, R], averaged over unmasked tokens, or a MetricSum that the loss has made itself.
LossMetrics = dict[str, Tensor | MetricSum]
PolicyLoss = Callable[[LossInputs, ActorConfig], tuple[Tensor, LossMetrics]]  # the loss is [B, R]

policy_losses: Registry[PolicyLoss] = Registry("policy loss")

LIKELIHOOD_LOSSES = ("sft", "dpo")  # no ratio to the weights that drew the sample: nothing to correct
PAIRED_LOSSES = ("dpo",)  # rows 2i (chosen) and 2i + 1 (rejected) of a micro-batch belong together


# Losses with one value for a sequence, to which the correction is a sequence's geometric mean (GMPO).
geometric_correction: set[PolicyLoss] = set()


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of the clamped log-ratio."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def ratio_metrics(log_ratio: Tensor, clipped: Tensor, lower: Tensor | None = None) -> LossMetrics:
    """The metrics of every loss with a ratio. `log_ratio` per token, unclamped; None: a loss without a lower clip."""
    return {
        "actor/pg_clipfrac": clipped,
        "actor/pg_clipfrac_lower": torch.zeros_like(clipped) if lower is None else lower,
        "actor/ppo_kl": -log_ratio,
        "actor/ratio_clamp_frac": log_ratio.abs() > LOG_RATIO_CLAMP,
    }


@policy_losses.register("vanilla")
def vanilla(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """PPO's clipped surrogate with asymmetric bounds and the dual clip; the loss GRPO and DAPO use.

    Reports `actor/pg_clipfrac` (clipped surrogate > unclipped one, as losses), `actor/pg_clipfrac_lower` (dual clip
    active), `actor/ppo_kl` (old - new, unclamped) and `actor/ratio_clamp_frac`.
    """
    advantages = inputs.advantages
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = ratio_of(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    loss = torch.maximum(unclipped, clipped)
    dual_active = torch.zeros_like(inputs.mask)
    if config.clip_ratio_c is not None:
        bound = -advantages * config.clip_ratio_c
        dual_active = (advantages < 0) & (loss > bound)
        loss = torch.where(dual_active, bound, loss)
    return loss, ratio_metrics(log_ratio, clipped > unclipped, dual_active)


@policy_losses.register("cispo")
def cispo(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """REINFORCE with a clipped importance weight: a clipped token keeps its gradient, at a bounded weight.

    `actor/pg_clipfrac` is the share of tokens whose ratio is outside the bounds, whatever the advantage.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = ratio_of(log_ratio).detach()
    weight = ratio.clamp(max(0.0, 1.0 - config.cispo_clip_ratio_low), 1.0 + config.clip_ratio_high)
    return -weight * inputs.advantages * inputs.logprobs, ratio_metrics(log_ratio, weight != ratio)


@policy_losses.register("sapo")
def sapo(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """A sigmoid gate in place of the clip: its slope is 1 at ratio 1 and falls off smoothly on both sides."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    tau = torch.full_like(log_ratio, config.tau_neg).masked_fill(inputs.advantages > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (ratio_of(log_ratio) - 1.0)) * 4.0 / tau
    return -inputs.advantages * gate, ratio_metrics(log_ratio, torch.zeros_like(inputs.mask))


@policy_losses.register("gpg")
@policy_losses.register("sft")
def log_likelihood(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """Log-likelihood weighted by the advantage: supervised learning where it is 1, plain policy gradient otherwise."""
    return -inputs.advantages * inputs.logprobs, {}


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
    per_token, loss_metrics = policy_loss(inputs, config)
    per_token = torch.where(inputs.mask, per_token, 0.0)
    if inputs.correction is not None:
        per_token = per_token * _correction(inputs, inputs.correction, policy_loss)
    weighted = {"actor/pg_loss": per_token, "actor/entropy_loss": inputs.entropy}

    if kl_penalty is not None:
        assert inputs.ref_logprobs is not None, "a KL loss needs ref_logprobs"
        kl, kl_metrics = kl_penalty(inputs.logprobs, inputs.ref_logprobs)
        weighted["actor/kl_loss"] = kl
        loss_metrics = {**loss_metrics, **kl_metrics}
        # A coefficient of 0 leaves the term out: 0 * inf would be NaN.
        if config.kl_loss_coef != 0.0:
            per_token = per_token + config.kl_loss_coef * kl
    if config.entropy_coeff != 0.0:
        per_token = per_token - config.entropy_coeff * inputs.entropy

    metrics = {name: MetricSum((weights * value.detach()).sum(), None) for name, value in weighted.items()}
    num_tokens = inputs.mask.sum()
    for name, metric in {**loss_metrics, "actor/entropy": inputs.entropy}.items():
        if isinstance(metric, Tensor):
            masked = torch.where(inputs.mask, metric.detach().to(weights.dtype), 0.0)
            metric = MetricSum(masked.sum(), num_tokens)
        metrics[name] = metric
    return (weights * per_token).sum(), metrics


def _correction(inputs: LossInputs, correction: Tensor, policy_loss: PolicyLoss) -> Tensor:
    """What multiplies the policy loss: [B, R], or [B, 1] for losses in `geometric_correction`."""
    if policy_loss not in geometric_correction:
        return correction
    logs = torch.where(inputs.mask, correction, 1.0).log()  # a weight of 0 takes the whole sequence out
    return (logs.sum(-1, keepdim=True) / inputs.mask.sum(-1, keepdim=True).clamp(min=1)).exp()
