"""Inputs for the tests of losses, in float64, and the finite difference that gradients are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from grpo_megatron.algo.kl import kl_penalties
from grpo_megatron.algo.losses import LossInputs, MetricSum, policy_losses, total_loss
from grpo_megatron.algo.plan import token_weights
from grpo_megatron.config import ActorConfig

RATIOS = [[1, 1.5, 0.5, 1.25], [1, 1.5, 0.5, 4]]  # the published vector, with advantages SIGNS and old logprobs -1
SIGNS = [[1.0] * 4, [-1.0] * 4]
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}


def actor(**values: object) -> ActorConfig:
    return ActorConfig.model_validate({"use_kl_loss": False, "kl_loss_coef": 0.0} | values)


def make_inputs(
    logprobs: list[list[float]] | Tensor,
    *,
    old: float | Tensor = -1.0,
    rollout: float | Tensor = -1.0,
    ref: float | Tensor | None = None,
    advantages: list[list[float]] | Tensor | float = 0.0,
    mask: list[list[int]] | Tensor | None = None,
    correction: list[list[float]] | Tensor | None = None,
    mode: str = "token-mean",
    norm_length: float = 4,
) -> LossInputs:
    """Float64 [B, R] inputs; a number fills its tensor. Entropy is logprobs^2 / 2 for a gradient, NaN where masked."""
    current = torch.as_tensor(logprobs, dtype=torch.float64)
    if not current.requires_grad:
        current.requires_grad_()

    def full(value: object) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64).expand(current.shape)

    keep = torch.ones_like(current, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()
    lengths = keep.sum(-1).tolist()
    weights = token_weights(mode, lengths, norm_length)
    return LossInputs(
        logprobs=current,
        entropy=(0.5 * current.masked_fill(~keep, 0.0).square()).masked_fill(~keep, math.nan),
        old_logprobs=full(old),
        rollout_logprobs=full(rollout),
        ref_logprobs=None if ref is None else full(ref),
        advantages=full(advantages),
        mask=keep,
        token_weights=torch.tensor(weights, dtype=torch.float64)[:, None].expand(current.shape),
        correction=None if correction is None else full(correction),
    )


def ratio_inputs(ratios: list[list[float]], advantages: list[list[float]], **values: object) -> LossInputs:
    return make_inputs(torch.tensor(ratios, dtype=torch.float64).log() - 1, advantages=advantages, **values)  # type: ignore[arg-type]


def rows_of(whole: LossInputs, rows: list[int], width: int) -> LossInputs:
    """A micro-batch of some rows, trimmed."""
    parts = {name: None if value is None else value[rows, :width] for name, value in vars(whole).items()}
    return replace(whole, **parts)


def run(
    inputs: LossInputs, config: ActorConfig, loss: str = "vanilla", kl: str | None = None
) -> tuple[Tensor, dict[str, MetricSum]]:
    penalty = None if kl is None else kl_penalties.get(kl)
    return total_loss(inputs, config, policy_losses.get(loss), penalty)


def gradient_of(inputs: LossInputs, config: ActorConfig, loss: str, kl: str | None = None) -> Tensor:
    """The gradient with respect to the log-probabilities, as they are before the constructor masks them."""
    (gradient,) = torch.autograd.grad(run(inputs, config, loss, kl)[0], inputs.logprobs)
    return gradient.masked_fill(~inputs.mask, 0.0)


def value(metric: MetricSum) -> float:
    return float(metric.total) if metric.num_tokens is None else float(metric.total / metric.num_tokens)


def central_difference(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """The derivative of a scalar function by its definition: no autograd."""
    gradient = torch.zeros_like(at)
    with torch.no_grad():
        for i in range(at.numel()):
            shifted = [at.detach().clone() for _ in range(2)]
            for sign, point in zip((1.0, -1.0), shifted, strict=True):
                point.view(-1)[i] += sign * step
            up, down = (function(point) for point in shifted)
            gradient.view(-1)[i] = (up - down) / (2 * step)
    return gradient
