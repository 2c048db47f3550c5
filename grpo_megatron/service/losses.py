"""The losses of the protocol, of target tokens' log-probabilities. Each is a sum over tokens: nothing is normalised.

r = exp(logprobs - sampling logprobs), A = advantages, w = weights:

cross_entropy        -w logprobs
importance_sampling  -r A
ppo                  -min(r A, clip(r) A)                                   arXiv:1707.06347
cispo                -sg(clip(r)) A logprobs                                arXiv:2506.13585
dro                  -(A logprobs - beta / 2 (logprobs - sampling)^2)       arXiv:2405.19107
gspo                 -min(s A, clip(s) A), s = sg(r_seq) r / sg(r)          arXiv:2507.18071, the form of its section 4.3

r_seq is exp of the mean of log r over the tokens where sequence_ratio_mask is not 0. The defaults of ppo and cispo are those of
Tinker's documentation, which gives none for dro and gspo: 0.05 is its example, and gspo has ppo's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_megatron.shapes import Float

Inputs = Mapping[str, Float[Tensor, "B N"]]  # the tensors of data by the protocol's names, zeros after the end of each

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


def token_losses(
    name: str, logprobs: Float[Tensor, "B N"], inputs: Inputs, settings: Mapping[str, float]
) -> Float[Tensor, "B N"]:
    """Computes the loss of each token of data, one in a row. `settings`: all of DEFAULTS[name]."""
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
        mask = inputs["sequence_ratio_mask"] != 0
        mean = (log_ratio.detach() * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        ratio = (mean + logprobs - logprobs.detach()).exp()
    return -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
