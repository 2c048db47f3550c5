"""Control of the entropy: tokens chosen by entropy or covariance (80/20, Clip-Cov, KL-Cov), and an adaptive bonus.

A choice is among all loss tokens of the step, on every rank, at the weights of its start. So neither micro-batches nor layouts
change it; implementations that rank the tokens of a micro-batch choose others. It needs the pass for old log-probabilities, and
sends 8 bytes per loss token to every rank. The tensors here are float64 [N], the step's loss tokens in table order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, LossMetrics, clamp_log_ratio, policy_losses, ratio_metrics, ratio_of
from grpo_megatron.algo.ppo import vanilla
from grpo_megatron.config import ActorConfig
from grpo_megatron.shapes import Bool, Float


def select_tokens(kind: str, values: Float[Tensor, "k N"], actor: ActorConfig) -> Bool[Tensor, " N"]:
    """Chooses tokens by `values`: their entropies (k = 1), or their advantages and log-probabilities (k = 2).

        entropy    the ceil(q N) tokens of highest entropy, q = top_entropy_quantile; ties stay   arXiv 2506.01939
        kl_cov     the max(1, floor(kl_cov_ratio N)) tokens of highest covariance                 arXiv 2505.22617
        clip_cov   max(1, floor(clip_cov_ratio N)) of those with clip_cov_lb < covariance < clip_cov_ub

    The covariance of a token is (A - mean A)(log pi - mean log pi). Clip-Cov draws among its candidates; here they are taken at
    even distances in table order, so that a run repeats.
    """
    size = values.shape[1]
    if kind == "entropy":
        lowest = values[0].topk(math.ceil(actor.top_entropy_quantile * size)).values.min()
        return values[0] >= lowest
    centred = values - values.mean(1, keepdim=True)
    covariance = centred[0] * centred[1]
    chosen = torch.zeros(size, dtype=torch.bool)
    if kind == "kl_cov":
        count = max(1, int(actor.kl_cov_ratio * size))
        chosen[covariance.argsort(descending=True, stable=True)[:count]] = True
        return chosen
    candidates = ((covariance > actor.clip_cov_lb) & (covariance < actor.clip_cov_ub)).nonzero()[:, 0]
    count = min(max(1, int(actor.clip_cov_ratio * size)), len(candidates))
    chosen[candidates[torch.arange(count) * len(candidates) // max(1, count)]] = True
    return chosen


@policy_losses.register("clip_cov", is_proportional=True)
def clip_cov(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes `vanilla` without the chosen tokens (Clip-Cov, arXiv 2505.22617). In verl, clipped tokens are no candidates.

    Tokens whose probability and advantage are high together make the entropy fall; a few of them have no gradient.
    """
    loss, metrics = vanilla(inputs, config)
    chosen = torch.zeros_like(loss) if inputs.selected is None else inputs.selected
    return loss * (1.0 - chosen), {**metrics, "actor/selected_frac": chosen}


@policy_losses.register("kl_cov")
def kl_cov(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes -A rho, plus ppo_kl_coef |log rho| at the chosen tokens (KL-Cov, arXiv 2505.22617; as in verl). No clip."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    chosen = torch.zeros_like(log_ratio) if inputs.selected is None else inputs.selected
    loss = -inputs.advantages * ratio_of(log_ratio) + chosen * config.ppo_kl_coef * clamp_log_ratio(log_ratio).abs()
    metrics = ratio_metrics(log_ratio, torch.zeros_like(inputs.mask))
    return loss, {**metrics, "actor/selected_frac": chosen}


class EntropyController:
    """The coefficient of the entropy bonus: fixed, or adapted to a target (Skywork-OR1, arXiv 2505.22312, 3.3; as in TRL).

        c <- min(max(c + delta, 0), max) where the step's mean entropy is below the target, else max(c - delta, 0)
        entropy_coeff of the next step: c where that entropy is at most the target, else 0

    The paper adapts in every optimizer step, and this in every training step. The first step has no bonus: no entropy is known.
    """

    def __init__(self, actor: ActorConfig) -> None:
        self.actor, self.coefficient, self.is_low = actor, actor.entropy_coeff, False

    def update(self, entropy: float) -> None:
        """Adapts the coefficient after a step with this mean entropy of a loss token, in nats."""
        assert self.actor.entropy_target is not None
        delta = self.actor.entropy_coef_delta
        moved = self.coefficient + (delta if entropy < self.actor.entropy_target else -delta)
        self.coefficient = min(max(moved, 0.0), self.actor.entropy_coef_max)
        self.is_low = entropy <= self.actor.entropy_target

    def applied(self) -> ActorConfig:
        """Returns the section with the coefficient of the next step."""
        if self.actor.entropy_target is None:
            return self.actor
        return self.actor.model_copy(update={"entropy_coeff": self.coefficient if self.is_low else 0.0})
