"""CISPO and SAPO: token ratios, without the hard clip that takes a token out of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, LossMetrics, policy_losses, ratio_metrics, ratio_of
from grpo_megatron.config import ActorConfig
from grpo_megatron.shapes import Float


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
