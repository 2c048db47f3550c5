"""GSPO and GMPO: one ratio per response.

With d_t = logprobs - old_logprobs over the n loss tokens of a response, every loss token has the value of its sequence. Under
seq-mean-token-mean, with weights 1 / (N n), the tokens of a sequence add up to 1/N of its value: the total is the mean over
the N sequences of the optimizer step, whatever the micro-batches and ranks. (Others average GMPO over a micro-batch.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_megatron.algo.losses import (
    SEQUENCE_MEAN,
    LossInputs,
    LossMetrics,
    clipped_surrogate,
    policy_losses,
    ratio_metrics,
    ratio_of,
    sequence_mean,
)
from grpo_megatron.config import ActorConfig
from grpo_megatron.shapes import Float


@policy_losses.register("gspo", is_proportional=True, aggregation=SEQUENCE_MEAN)
def gspo(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Clips one ratio per sequence, s = exp(mean of d_t), in the form of `vanilla` without the dual clip (arXiv 2507.18071).

    The ratio of whole sequences is exp(sum of d_t). GSPO takes the mean, as its paper defines it: for independent d_t of
    standard deviation 0.01, the sum over 4,096 tokens has 0.64, and more for longer responses, so that no bound suits all
    lengths and one token can clip a response. The mean has 0.00016, which is the scale of the paper's bounds, 3e-4 and 4e-4.
    The gradient of a response is then its tokens' mean: a long one weighs no more than a short one.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = ratio_of(sequence_mean(log_ratio, inputs.mask)).expand_as(log_ratio)
    return clipped_surrogate(inputs, config, ratio, log_ratio)


@policy_losses.register("gspo_token", is_proportional=True, aggregation=SEQUENCE_MEAN)
def gspo_token(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Clips s_t = sg(s) exp(logprobs - sg(logprobs)): the sequence's ratio with each token's own gradient (2507.18071).

    The value is that of `gspo`, and the gradient too where A is one number for the sequence. A may differ between tokens.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = ratio_of(sequence_mean(log_ratio.detach(), inputs.mask))
    return clipped_surrogate(inputs, config, ratio * (inputs.logprobs - inputs.logprobs.detach()).exp(), log_ratio)


@policy_losses.register("gmpo", "geo_mean", is_proportional=True, aggregation=SEQUENCE_MEAN, geometric_correction=True)
def gmpo(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes -A exp(mean of g_t), the geometric mean of ratios that are clipped in log space (arXiv 2507.20673).

    g_t = the smaller of d_t and clamp(d_t, -clip_ratio_low, clip_ratio_high) where A > 0, the larger elsewhere; A is the mean
    over the tokens. Useful bounds are larger than those of `vanilla`: 0.4 in the paper. "geo_mean" in verl, whose metrics
    these are: `actor/pg_clipfrac` and `_lower` are the shares of tokens outside the bounds where A > 0 and where A < 0.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    advantage = sequence_mean(inputs.advantages, inputs.mask)
    bounded = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    pessimistic = torch.where(advantage > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    ratio = ratio_of(sequence_mean(pessimistic, inputs.mask))
    outside = bounded != log_ratio
    metrics = ratio_metrics(log_ratio, outside & (advantage > 0), outside & (advantage < 0))
    return (-advantage * ratio).expand_as(log_ratio), metrics
