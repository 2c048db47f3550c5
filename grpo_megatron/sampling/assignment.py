"""Assignment: which rollout block draws which samples of a draw, and in which order.

Without any history the samples are ordered by prompt and cut into one contiguous range per block, of nearly equal length.
Once lengths of earlier responses are known, whole prompts are dealt out by expected length instead: longest first, each to the
block with the fewest expected tokens (Graham's LPT rule), which draws them in this order. So no block begins its longest
responses last. Requests have their own seeds: the assignment decides only where and when a sample is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.types import Prompt, Sample

MAX_REMEMBERED = 65_536  # prompts; the oldest are forgotten


@dataclass
class LengthHistory:
    """Mean tokens of the last responses to each prompt, by uid. The same on every rank."""

    lengths: dict[str, float] = field(default_factory=dict)

    def expected(self, prompts: Sequence[Prompt]) -> list[float]:
        """Tokens per response. Prompts without a history count as the mean of the others; all as 0 if none has one."""
        known = [self.lengths[prompt.uid] for prompt in prompts if prompt.uid in self.lengths]
        mean = sum(known) / len(known) if known else 0.0
        return [self.lengths.get(prompt.uid, mean) for prompt in prompts]

    def learn(self, prompts: Sequence[Prompt], num_tokens: Sequence[int], n: int) -> None:
        """`num_tokens`: of all n responses of each prompt together, on all ranks."""
        for prompt, total in zip(prompts, num_tokens, strict=True):
            self.lengths.pop(prompt.uid, None)  # to the end of the order
            self.lengths[prompt.uid] = total / n
        for uid in list(self.lengths)[: max(0, len(self.lengths) - MAX_REMEMBERED)]:
            del self.lengths[uid]

    def state(self) -> dict[str, Any]:
        return dict(self.lengths)

    def load_state(self, state: dict[str, Any]) -> None:
        self.lengths = {str(uid): float(length) for uid, length in state.items()}


def token_sums(samples: Sequence[Sample], num_prompts: int) -> list[int]:
    """Response tokens of each prompt's samples here."""
    sums = [0] * num_prompts
    for sample in samples:
        sums[sample.prompt_index] += len(sample.response_ids)
    return sums


def assign_samples(
    num_prompts: int, per_prompt: int, num_blocks: int, expected: Sequence[float] | None = None
) -> list[list[int]]:
    """For each block the numbers of its samples, in the order to draw them. Sample i of prompt p is p * per_prompt + i."""
    total = num_prompts * per_prompt
    if expected is None or len(set(expected)) <= 1 or num_prompts < num_blocks:
        cuts = [block * total // num_blocks for block in range(num_blocks + 1)]
        return [list(range(start, end)) for start, end in zip(cuts, cuts[1:], strict=False)]
    queues: list[list[int]] = [[] for _ in range(num_blocks)]
    loads = [0.0] * num_blocks
    for prompt in sorted(range(num_prompts), key=lambda p: -expected[p]):
        block = loads.index(min(loads))
        queues[block].extend(range(prompt * per_prompt, (prompt + 1) * per_prompt))
        loads[block] += expected[prompt] * per_prompt
    return queues
