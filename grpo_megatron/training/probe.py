"""Probe: engine and policy must compute the same log-probabilities of fixed tokens after a sync.

The measure is the mean |difference| over about 500 tokens. Two correct engines differ by rounding: 1e-6 in float32; 0.002
to 0.012 in bfloat16 for models of 4 to 12 layers (measured on CPU). It depends on model and layout, so the bound is relative:

    bound = FACTOR * max(FLOOR, the largest of the last healthy probes of this run and model)

Measured in bfloat16, 4 to 12 layers: healthy probes of neighbouring steps vary by a factor of 1.3, with experts by 2. One
wrong norm or value bias gives 2.9 to 35 times the healthy value, one wrong expert of 8 gives 2.7 to 6 times.
Below rounding, and left to the attestation (sync/attest.py): one wrong query or key bias, one expert of 64.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from grpo_megatron.types import Batch

NUM_SEQUENCES, LENGTH = 8, 64
NUM_HEALTHY = 8  # probes that are remembered
FACTOR = 2.5
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
        return FACTOR * max(FLOOR[self.dtype], *self._healthy[model])

    def problem(self, model: str, difference: Tensor, *, is_attested: bool) -> str | None:
        """What is wrong with the differences of the batch's log-probabilities. Remembers a healthy probe."""
        mean, bound = difference.abs().mean().item(), self.bound(model, is_attested=is_attested)
        if mean <= bound:  # false for NaN
            self._healthy.setdefault(model, deque(maxlen=NUM_HEALTHY)).append(mean)
            return None
        origin = "" if self.tolerance is None else "rollout.probe_tolerance="
        if self.tolerance is None and model in self._healthy:
            origin = f"{FACTOR:g} times that of healthy probes of this run: "
        return (
            "after the weight sync the engine's log-probabilities of fixed tokens differ from those of the model that was"
            f" sent by {mean:.3g} on average (at most {difference.abs().max().item():.3g}), more than {origin}{bound:.3g}: "
            "the engine does not hold that model's weights"
        )


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
