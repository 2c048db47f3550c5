"""Probe: engine and policy must compute the same log-probabilities of fixed tokens after a sync.

The measure is the mean |difference| over about 500 tokens. Two correct engines differ by rounding: 1e-6 in float32; 0.002
to 0.012 in bfloat16 for models of 4 to 12 layers (measured on CPU). It depends on model and layout, so the bound is relative:

    bound = factor * max(FLOOR, the largest of the last healthy probes of this run and model)

The factor is larger where an attestation has proven the weights: only an engine that computes something else is left to find,
and a false alarm would end a healthy run.

Measured in bfloat16, 4 to 12 layers: healthy probes of neighbouring steps vary by a factor of 1.3, with experts by 2. One
wrong norm or value bias gives 2.9 to 35 times the healthy value, one wrong expert of 8 gives 2.7 to 6 times.
Below rounding, and left to the attestation (sync/digest.py): one wrong query or key bias, one expert of 64.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_megatron.types import Batch

NUM_SEQUENCES, LENGTH = 8, 64
NUM_HEALTHY = 8  # probes that are remembered
FACTOR, FACTOR_ATTESTED = 2.5, 5.0
FLOOR = {"float32": 1e-5, "bfloat16": 0.002}
FIRST = {"float32": 1e-4, "bfloat16": 0.03}  # bound of a first probe
FIRST_ATTESTED = {"float32": 1e-4, "bfloat16": 0.1}  # the same where the weights are known to be equal


class Probe:
    """`tolerance`: a fixed bound instead of the relative one, or None. `dtype`: of the models."""

    def __init__(self, vocab_size: int, max_length: int, *, dtype: str, tolerance: float | None) -> None:
        self.batch = fixed_tokens(vocab_size, min(LENGTH, max_length - 1))
        self.dtype, self.tolerance = dtype, tolerance
        self._healthy: dict[str, deque[float]] = {}  # model -> means of its last healthy probes

    def bound(self, model: str, *, is_attested: bool) -> float:
        """The largest mean |difference| that the next probe of a model may have."""
        if self.tolerance is not None:
            return self.tolerance
        if model not in self._healthy:
            return (FIRST_ATTESTED if is_attested else FIRST)[self.dtype]
        return _factor(is_attested) * max(FLOOR[self.dtype], *self._healthy[model])

    def problem(self, model: str, difference: Tensor, *, is_attested: bool) -> str | None:
        """What is wrong with the differences of the batch's log-probabilities. Remembers a healthy probe."""
        mean, bound = difference.abs().mean().item(), self.bound(model, is_attested=is_attested)
        if mean <= bound:  # false for NaN
            self._healthy.setdefault(model, deque(maxlen=NUM_HEALTHY)).append(mean)
            return None
        origin = "" if self.tolerance is None else "rollout.probe_tolerance="
        if self.tolerance is None and model in self._healthy:
            origin = f"{_factor(is_attested):g} times that of healthy probes of this run: "
        return (
            "after the weight sync the engine's log-probabilities of fixed tokens differ from those of the model that was"
            f" sent by {mean:.3g} on average (at most {difference.abs().max().item():.3g}), more than {origin}{bound:.3g}: "
            "the engine does not hold that model's weights"
        )


def weights_problem(model: str, step: int, non_finite: Sequence[str], *, is_first: bool) -> str | None:
    """Why the weights of a model cannot be sent: they are wrong themselves. `is_first`: no update was made before."""
    if not non_finite:
        return None
    others = f" (and {len(non_finite) - 1} more)" if len(non_finite) > 1 else ""
    origin = "they were loaded so; check the model's folder or the checkpoint"
    if not is_first:
        origin = (
            f"the update of step {step - 1} was too large; resume from the last checkpoint with a lower actor.optim.lr or"
            " actor.optim.clip_grad"
        )
    return f"step {step}: the {model}'s own weights are not finite: {non_finite[0]}{others}. No sync was made: {origin}"


def logprobs_problem(model: str, logprobs: Tensor) -> str | None:
    """Why log-probabilities of the trained model, whose weights are finite, cannot be compared with those of the engine."""
    wrong = int((~logprobs.isfinite()).sum())
    if not wrong:
        return None
    return (
        f"the {model}'s own log-probabilities are not finite for {wrong} of {logprobs.numel()} fixed tokens, although its"
        " weights are: they are too large to be computed with, or config.json describes another model; lower"
        " actor.optim.lr, or check config.json (the engine has not been asked yet)"
    )


def _factor(is_attested: bool) -> float:
    return FACTOR_ATTESTED if is_attested else FACTOR


def fixed_tokens(vocab_size: int, length: int) -> Batch:
    """Random but fixed tokens: the first of each sequence is the prompt, the others get log-probabilities."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (NUM_SEQUENCES, length), generator=generator)
    shape = (NUM_SEQUENCES, length - 1)
    zeros = torch.zeros(shape)
    return Batch(
        tokens=list(tokens),
        prompt_lengths=[1] * NUM_SEQUENCES,
        response_mask=torch.ones(shape, dtype=torch.bool),
        loss_mask=torch.ones(shape, dtype=torch.bool),
        rollout_logprobs=zeros,
        advantages=zeros,
        token_weights=zeros,
        mini_batches=[[list(range(NUM_SEQUENCES))]],
    )
