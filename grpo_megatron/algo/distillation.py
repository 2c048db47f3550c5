"""Distillation: the policy learns from the scores of teachers on its own responses, or on given ones.

Sampled reverse KL (on-policy distillation, arXiv 2306.13649 with GKD's lambda 1; MiniLLM, arXiv 2306.08543): with
d_t = log teacher(y_t) - log policy(y_t) of the sampled tokens, both at the rollout's temperature and without a gradient,

    A_t <- A_t + (w'_t / w_t) sum over s >= t of discount^(s - t) d_s        discount 0: d_t alone

A_t is the advantage that the rewards give, w_t the token's weight in the policy loss and w'_t the teacher's: its coefficient
times a token weight. Losses are multiples of w_t A_t, so that the term has the weights w'. t numbers loss tokens.

A divergence of distributions (`Divergence`) is a term of its own, whose gradient goes through the policy's output head
(models/layers/divergence.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, MetricSum
from grpo_megatron.shapes import Bool, Float

POSITIONS = (0, 64, 256, 1024, 4096, 16384)  # first response tokens of the buckets in the metrics

LEAST_LOGPROB = math.log(torch.finfo(torch.float32).tiny)  # of a bucket's log-probability: -87.3
CLAMP = 60.0  # of a log-ratio before exp; e^-60 of the mass is behind it

# The field's names of the divergences of a policy p from a teacher q; "sampled" is the sampled reverse KL
OBJECTIVES = ("sampled", "forward", "reverse", "jsd")


@dataclass(frozen=True)
class Divergence:
    """A divergence of p, the policy's distribution, from q, the teacher's: a sum over tokens or buckets of f(p, q).

        forward    KL(q || p)     f = q log(q / p)                                        u = df / dp = -q / p
        reverse    KL(p || q)     f = p log(p / q)                                        u = log(p / q) + 1
        jsd        GKD, 2306.13649:  beta KL(q || M) + (1 - beta) KL(p || M),  M = beta q + (1 - beta) p
                                  f = beta q log(q / M) + (1 - beta) p log(p / M)         u = (1 - beta) log(p / M)

    `beta` is read by jsd alone, in (0, 1). Where p = q, all terms of the value and of the gradient are exactly 0.
    """

    kind: str
    beta: float = 0.5

    def terms(
        self, logp: Float[Tensor, "n buckets"], logq: Float[Tensor, "n buckets"]
    ) -> tuple[Float[Tensor, "n buckets"], Float[Tensor, "n buckets"]]:
        """Computes f and p u of each bucket; u without constants, which do not change a gradient of a softmax."""
        difference = logq - logp
        if self.kind == "forward":
            q = logq.exp()
            return q * difference, -q
        if self.kind == "reverse":
            value = -logp.exp() * difference
            return value, value
        of_policy = (1 - self.beta) * logp.exp() * self._log_mixture(difference, self.beta)
        of_teacher = self.beta * logq.exp() * self._log_mixture(-difference, 1 - self.beta)
        return -of_policy - of_teacher, -of_policy

    @staticmethod
    def _log_mixture(difference: Tensor, share: float) -> Tensor:
        """Computes log(((1 - share) a + share b) / a) from log(b / a)."""
        return torch.log1p(share * torch.expm1(difference.clamp(max=CLAMP)))

    def mean_slope(self, slopes: Float[Tensor, "n buckets"]) -> Float[Tensor, " n"]:
        """Computes m, the sum of p u over the buckets: -1 exactly for the forward KL."""
        total = slopes.sum(1)
        return torch.full_like(total, -1.0) if self.kind == "forward" else total


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

    With a divergence: of it, too, and of the agreement, the share of tokens whose best token is the same.
    """
    assert inputs.teacher_index is not None
    has_teacher, metrics = inputs.mask & (inputs.teacher_index >= 0), dict[str, MetricSum]()
    columns = {"reverse_kl": reverse_kl, "divergence": inputs.divergence, "agreement": inputs.agreement}
    for column, values in columns.items():
        if values is None:
            continue
        metrics[f"distillation/{column}"] = _mean(values, has_teacher)
        for number, name in enumerate(names if len(names) > 1 else ()):
            part = has_teacher & (inputs.teacher_index == number)
            metrics[f"distillation/{column}/{name}"] = _mean(values, part)
        for first, end in zip(POSITIONS, (*POSITIONS[1:], values.shape[1]), strict=True):
            if first < values.shape[1]:
                part = values[:, first:end]
                metrics[f"distillation/{column}/from_token_{first}"] = _mean(part, has_teacher[:, first:end])
    return metrics


def _mean(values: Tensor, mask: Tensor) -> MetricSum:
    return MetricSum(torch.where(mask, values.detach(), 0.0).sum(), mask.sum())
