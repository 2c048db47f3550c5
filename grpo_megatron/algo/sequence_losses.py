"""Policy losses of whole responses: ratios of sequences, and pairs of sequences.

With d_t = logprobs - old_logprobs at token t, over the n loss tokens of a response, A its advantage:

    gspo        clip form of vanilla (no dual clip) with s = exp(mean of d_t)             arXiv 2507.18071
    gspo_token  the same with s_t = sg(s) exp(logprobs - sg(logprobs)): same value, and the same gradient where A is one
                number for the sequence; A may differ from token to token
    gmpo        -A exp(mean of g_t), g_t = the smaller of d_t and clamp(d_t, -clip_ratio_low, clip_ratio_high) where
                A > 0, the larger elsewhere; "geo_mean" in verl                           arXiv 2507.20673
    dpo         -log sigmoid(dpo_beta * margin), margin = sum of (logprobs - ref_logprobs) of the chosen response minus
                the same of the rejected one                                              arXiv 2305.18290

Every loss token of a sequence (of a pair) has the value of the sequence (of the pair). Under seq-mean-token-mean, with
weights 1 / (N n), the tokens of a sequence add up to 1/N of its value. The total is the mean over the N sequences **of
the optimizer step**, whatever the micro-batches and ranks. (Others average GMPO over a micro-batch.) For dpo, two
sequences of weight 1/N each make 2/N = 1 over the number of pairs. Each loss declares this aggregation as a fact.

Compared with vanilla, useful clip ratios are far smaller for gspo (3e-4 and 4e-4 in the paper). They are larger for gmpo
(0.4), whose bounds are in log space.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, LossMetrics, MetricSum, policy_losses, ratio_metrics
from grpo_megatron.algo.ratio import ratio_of
from grpo_megatron.config import ActorConfig

SEQUENCE_MEAN = ("seq-mean-token-mean",)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's loss tokens, [B, R] -> [B, 1]; 0 for a row without any. Masked entries must be 0."""
    return values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _clip_form(inputs: LossInputs, config: ActorConfig, ratio: Tensor, log_ratio: Tensor) -> tuple[Tensor, LossMetrics]:
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    return torch.maximum(unclipped, clipped), ratio_metrics(log_ratio, clipped > unclipped)


@policy_losses.register("gspo", is_proportional=True, aggregation=SEQUENCE_MEAN)
def gspo(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """One ratio per sequence, which is clipped as a whole."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = ratio_of(sequence_mean(log_ratio, inputs.mask)).expand_as(log_ratio)
    return _clip_form(inputs, config, ratio, log_ratio)


@policy_losses.register("gspo_token", is_proportional=True, aggregation=SEQUENCE_MEAN)
def gspo_token(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """The sequence's ratio with each token's own gradient."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = ratio_of(sequence_mean(log_ratio.detach(), inputs.mask))
    return _clip_form(inputs, config, ratio * (inputs.logprobs - inputs.logprobs.detach()).exp(), log_ratio)


@policy_losses.register("gmpo", "geo_mean", is_proportional=True, aggregation=SEQUENCE_MEAN, geometric_correction=True)
def gmpo(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """Geometric mean of token ratios that are clipped in log space. The advantage is the mean over the tokens.

    `actor/pg_clipfrac` and `_lower` are the shares of tokens outside the bounds where A > 0 and where A < 0 (as verl).
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    advantage = sequence_mean(inputs.advantages, inputs.mask)
    bounded = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    pessimistic = torch.where(advantage > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    ratio = ratio_of(sequence_mean(pessimistic, inputs.mask))
    outside = bounded != log_ratio
    metrics = ratio_metrics(log_ratio, outside & (advantage > 0), outside & (advantage < 0))
    return (-advantage * ratio).expand_as(log_ratio), metrics


@policy_losses.register("dpo", is_likelihood=True, paired=True, needs_reference=True, aggregation=SEQUENCE_MEAN)
def dpo(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """Rows 2i (chosen, advantage 1) and 2i + 1 (rejected, advantage -1) are a pair.

    Reports `actor/dpo_accuracy` (margin above 0) and `actor/dpo_margin` (nats, without beta), means over pairs.
    """
    assert inputs.ref_logprobs is not None, "the dpo loss needs ref_logprobs"
    assert len(inputs.mask) % 2 == 0, f"{len(inputs.mask)} rows are no pairs"
    side = torch.ones_like(inputs.advantages)
    side[1::2] = -1.0
    assert bool(((inputs.advantages == side) | ~inputs.mask).all()), (
        "rows are not chosen (+1) and rejected (-1) in turn"
    )
    log_ratio = (inputs.logprobs - inputs.ref_logprobs).sum(-1)  # [B]
    margin = log_ratio[0::2] - log_ratio[1::2]  # [B / 2]
    loss = _per_token(-functional.logsigmoid(config.dpo_beta * margin), inputs.mask)

    def pair_mean(value: Tensor) -> MetricSum:
        return MetricSum((inputs.token_weights * _per_token(value.detach(), inputs.mask)).sum(), None)

    return loss, {"actor/dpo_accuracy": pair_mean((margin > 0).to(margin.dtype)), "actor/dpo_margin": pair_mean(margin)}


def _per_token(pair_values: Tensor, mask: Tensor) -> Tensor:
    """Each pair's value at every token of both its rows: [B / 2] -> [B, R]."""
    return pair_values.repeat_interleave(2)[:, None].expand_as(mask)
