"""Losses of a scalar head: the model that is trained scores responses, or steps of responses.

The "log-probability" of such a model at a token is its score there, and the loss mask is 1 at the scored tokens only:

    bradley_terry  -log sigmoid(s_chosen - s_rejected - margin)           arXiv:2203.02155, equation 1; margin: 2307.09288
    step_labels    -log sigmoid(s) of a right step, -log sigmoid(-s) of a wrong one: binary cross entropy with the probability
                   sigmoid(s) that the step is right                                            Math-Shepherd, arXiv:2312.08935

The estimators `preference` and `step_labels` (selection.py) put the labels into the advantages: 1 + margin for the chosen and
-(1 + margin) for the rejected response of a pair, 1 at the last token of a right step and -1 at that of a wrong one.

bradley_terry is a mean over the pairs of the optimizer step (seq-mean-token-mean; each response has one scored token). The
mean of step_labels is over all its steps (token-mean), or over the mean of each response (seq-mean-token-mean).
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, LossMetrics, MetricSum, policy_losses
from grpo_megatron.algo.sequence_losses import SEQUENCE_MEAN, sequence_mean
from grpo_megatron.config import ActorConfig


@policy_losses.register("bradley_terry", is_likelihood=True, paired=True, scores="response", aggregation=SEQUENCE_MEAN)
def bradley_terry(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """Rows 2i (chosen, advantage 1 + margin) and 2i + 1 (rejected) are a pair.

    Reports `actor/pair_accuracy` (s_chosen > s_rejected; a tie counts half) and `actor/score_margin` (their difference), means
    over pairs.
    """
    assert len(inputs.mask) % 2 == 0, f"{len(inputs.mask)} rows are no pairs"
    scores, labels = (sequence_mean(x, inputs.mask).squeeze(-1) for x in (inputs.logprobs, inputs.advantages))  # [B]
    is_pair = (labels[0::2] == -labels[1::2]) & (labels[0::2] >= 1)
    assert bool((is_pair | ~inputs.mask.any(-1)[0::2]).all()), "rows are not chosen (1 or more) and rejected in turn"
    difference, margin = scores[0::2] - scores[1::2], labels[0::2] - 1.0  # [B / 2]
    per_pair = functional.softplus(margin - difference)

    def pair_mean(value: Tensor) -> MetricSum:
        return MetricSum((inputs.token_weights * _at_both(value.detach(), inputs.mask)).sum(), None)

    correct = (difference > 0).to(difference.dtype) + 0.5 * (difference == 0).to(difference.dtype)
    return _at_both(per_pair, inputs.mask), {
        "actor/pair_accuracy": pair_mean(correct),
        "actor/score_margin": pair_mean(difference),
    }


@policy_losses.register(
    "step_labels", is_likelihood=True, scores="step", aggregation=("token-mean", "seq-mean-token-mean")
)
def step_labels(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """The advantage of a scored token is 1 (right) or -1 (wrong).

    Reports `actor/step_accuracy` (the sign of the score; 0 counts half) and `actor/step_right` (share of right steps), means over
    steps.
    """
    signed = inputs.logprobs * inputs.advantages
    correct = (signed > 0).to(signed.dtype) + 0.5 * (signed == 0).to(signed.dtype)
    return functional.softplus(-signed), {"actor/step_accuracy": correct, "actor/step_right": inputs.advantages > 0}


def _at_both(pair_values: Tensor, mask: Tensor) -> Tensor:
    """Each pair's value at the scored token of both its rows: [B / 2] -> [B, R]."""
    return torch.where(mask, pair_values.repeat_interleave(2)[:, None], 0.0)
