"""The critic's loss: squared error with a bounded move per step, as in PPO's reference implementation and verl.

    v' = clamp(v, v_old - c, v_old + c)
    loss per token = 1/2 max((v - R)^2, (v' - R)^2)

v_old are the values before the step's first update, R their targets (`gae.py`), c is `critic.cliprange_value`. The maximum
takes the gradient from a value that has moved more than c and is still nearer to R than v'. Without c it is the squared
error. The total is a plain sum over tokens of weight x loss (`token_weights.py`), like the policy's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo_megatron.algo.losses import MetricSum


@dataclass(frozen=True)
class ValueInputs:
    """One micro-batch of B whole responses, all `[B, R]`. The constructor replaces masked entries by 0, as `LossInputs`."""

    values: Tensor  # of the current critic; carries the gradient
    old_values: Tensor
    returns: Tensor
    mask: Tensor  # bool, the loss mask
    token_weights: Tensor

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            assert value.shape == self.mask.shape, f"{field.name} is {value.shape}, mask is {self.mask.shape}"
            if field.name != "mask":
                object.__setattr__(self, field.name, value.masked_fill(~self.mask, 0.0))


def value_loss(inputs: ValueInputs, cliprange: float | None) -> tuple[Tensor, dict[str, MetricSum]]:
    """One micro-batch's share of the mini-batch's loss, a scalar with gradient, and of its metrics.

    `critic/vf_loss` aggregates like the loss. `critic/vf_clipfrac` (share of tokens whose loss is the clipped one) and
    `critic/vpred_mean` are means over the loss tokens.
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
