"""Distillation: the policy learns from the scores of teachers on its own responses, or on given ones.

Sampled reverse KL (on-policy distillation, arXiv 2306.13649 with GKD's lambda 1; MiniLLM, arXiv 2306.08543): with
d_t = log teacher(y_t) - log policy(y_t) of the sampled tokens, both at the rollout's temperature and without a gradient,

    A_t <- A_t + (w'_t / w_t) sum over s >= t of discount^(s - t) d_s        discount 0: d_t alone

A_t is the advantage that the rewards give, w_t the token's weight in the policy loss and w'_t the teacher's: its coefficient
times a token weight. Losses are multiples of w_t A_t, so that the term has the weights w'. t numbers loss tokens.

A divergence of distributions (below) is a term of its own, whose gradient goes through the policy's output head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, MetricSum
from grpo_megatron.shapes import Bool, Float

POSITIONS = (0, 64, 256, 1024, 4096, 16384)  # first response tokens of the buckets in the metrics


def with_teachers(inputs: LossInputs, names: Sequence[str], discount: float) -> tuple[LossInputs, dict[str, MetricSum]]:
    """Adds the sampled objective to the advantages, unless the objective is a divergence. Returns metrics, too.

    `names` are those of the teachers. `inputs.old_logprobs` must be the policy's, not the rollout engine's.
    """
    assert inputs.teacher_logprobs is not None and inputs.teacher_weights is not None
    difference = (inputs.teacher_logprobs - inputs.old_logprobs).detach()
    metrics = teacher_metrics(inputs, -difference, names)
    if inputs.divergence is not None:
        return inputs, metrics
    has_teacher = inputs.teacher_weights != 0
    if discount:
        difference = discounted_sums(difference, inputs.mask, discount)
    scale = inputs.teacher_weights / torch.where(has_teacher, inputs.token_weights, 1.0)
    added = torch.where(has_teacher, scale * difference, 0.0)  # rows without a teacher keep their bits
    return replace(inputs, advantages=inputs.advantages + added), metrics


def discounted_sums(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], discount: float) -> Float[Tensor, "B R"]:
    """Computes the sum over s >= t of discount^(s - t) values_s of each row, 0 where masked. t numbers tokens of the mask.

    The sums over 2^i tokens are made of two over 2^(i - 1), so that R columns take log2(R) steps.
    """
    order = (~mask).int().argsort(dim=1, stable=True)  # loss tokens first
    sums = values.masked_fill(~mask, 0.0).gather(1, order)
    size, width, factor = 1, values.shape[1], discount
    while size < width:
        sums = sums + torch.nn.functional.pad(factor * sums[:, size:], (0, size))
        size, factor = 2 * size, factor * factor
    return torch.zeros_like(sums).scatter(1, order, sums).masked_fill(~mask, 0.0)


def teacher_metrics(inputs: LossInputs, reverse_kl: Float[Tensor, "B R"], names: Sequence[str]) -> dict[str, MetricSum]:
    """Computes the token means of the sampled `reverse_kl`, log policy - log teacher: of all rows, teachers, positions.

    With a divergence: its mean, and the share of tokens whose best token is the same.
    """
    assert inputs.teacher_index is not None
    has_teacher = inputs.mask & (inputs.teacher_index >= 0)
    metrics = {"distillation/reverse_kl": _mean(reverse_kl, has_teacher)}
    if len(names) > 1:
        for number, name in enumerate(names):
            part = has_teacher & (inputs.teacher_index == number)
            metrics[f"distillation/reverse_kl/{name}"] = _mean(reverse_kl, part)
    for first, end in zip(POSITIONS, (*POSITIONS[1:], reverse_kl.shape[1]), strict=True):
        if first < reverse_kl.shape[1]:
            values = _mean(reverse_kl[:, first:end], has_teacher[:, first:end])
            metrics[f"distillation/reverse_kl/from_token_{first}"] = values
    for name in ("divergence", "agreement"):
        if (numbers := getattr(inputs, name)) is not None:
            metrics[f"distillation/{name}"] = _mean(numbers, has_teacher)
    return metrics


def _mean(values: Tensor, mask: Tensor) -> MetricSum:
    return MetricSum(torch.where(mask, values.detach(), 0.0).sum(), mask.sum())
