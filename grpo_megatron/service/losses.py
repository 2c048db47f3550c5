"""The losses of the protocol, of target tokens' log-probabilities. Each is a sum over tokens: nothing is normalised.

r = exp(logprobs - sampling logprobs), A = advantages, w = weights:

cross_entropy        -w logprobs
importance_sampling  -r A
ppo                  -min(r A, clip(r) A)                                   arXiv:1707.06347
cispo                -sg(clip(r)) A logprobs                                arXiv:2506.13585
dro                  -(A logprobs - beta / 2 (logprobs - sampling)^2)       arXiv:2405.19107
gspo                 -min(s A, clip(s) A), s = sg(r_seq) r / sg(r)          arXiv:2507.18071, the form of its section 4.3

r_seq is exp of the mean of log r over the tokens of sequence_ratio_mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from grpo_megatron.shapes import Float

Inputs = Mapping[str, Float[Tensor, " N"]]  # the tensors of one datum by the protocol's names, of one length
DatumLoss = Callable[[Float[Tensor, " N"], Inputs, Mapping[str, float]], Float[Tensor, " N"]]

DEFAULTS: dict[str, dict[str, float]] = {  # loss -> its settings
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}
NEEDED: dict[str, tuple[str, ...]] = dict.fromkeys(DEFAULTS, ("logprobs", "advantages")) | {
    "cross_entropy": ("weights",),
    "gspo": ("logprobs", "advantages", "sequence_ratio_mask"),
}


def datum_loss(name: str, logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Float[Tensor, " N"]:
    """Computes the loss of each token of one datum. `settings`: all of DEFAULTS[name]."""
    if name == "cross_entropy":
        return -inputs["weights"] * logprobs
    advantages, log_ratio = inputs["advantages"], logprobs - inputs["logprobs"]
    ratio = log_ratio.exp()
    if name == "importance_sampling":
        return -ratio * advantages
    if name == "dro":
        return -(advantages * logprobs - 0.5 * settings["beta"] * log_ratio.square())
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    if name == "cispo":
        return -ratio.detach().clamp(low, high) * advantages * logprobs
    if name == "gspo":
        mask = inputs["sequence_ratio_mask"]
        mean = (log_ratio.detach() * mask).sum() / mask.sum().clamp(min=1)
        ratio = (mean + logprobs - logprobs.detach()).exp()
    return -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
