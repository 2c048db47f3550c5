"""CHORD (arXiv 2508.11408): rows that an expert has written, beside the policy's own, in one weighted sum.

    loss = (1 - mu) * (the sum of losses.py over the policy's rows) + mu / N * sum over the N expert tokens of -sg(phi) log pi

phi = p (1 - p), p = pi(token). N is of the optimizer step, on all ranks. Expert rows are outside the loss mask: no statistic,
correction, KL or entropy reads them. (1 - mu) is also on KL and entropy, as in ms-swift; in Trinity-RFT on the policy loss alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from grpo_megatron.algo.plan import weights_by_count
from grpo_megatron.config.algorithm import ChordConfig
from grpo_megatron.types import GroupTable, Plan

if TYPE_CHECKING:
    from torch import Tensor

OF_EVERY_ROW = ("prompt_index", "index", "prompt_length", "response_length", "truncated", "holder")


def mixing_weight(step: int, chord: ChordConfig) -> float:
    """Computes mu of a training step (from 0): mu_end + (mu - mu_end) (1 + cos(pi min(s, mu_steps) / mu_steps)) / 2."""
    if chord.mu_end is None:
        return chord.mu
    share = (1.0 + math.cos(math.pi * min(step, chord.mu_steps) / chord.mu_steps)) / 2.0
    return chord.mu_end + (chord.mu - chord.mu_end) * share


def with_experts(table: GroupTable, experts: GroupTable) -> GroupTable:
    """Appends the rows of `experts`: without a reward, outside the loss, and not in columns that only the policy's rows have."""
    nothing: list[list[tuple[int, int]]] = [[] for _ in range(max(len(table), len(experts)))]
    return replace(
        table,
        **{name: [*getattr(table, name), *getattr(experts, name)] for name in OF_EVERY_ROW},
        shared_length=[*table.shared_length, *experts.prompt_length] if table.shared_length else [],
        reward=[*table.reward, *[math.nan] * len(experts)],
        loss_spans=[*map(table.spans_of, range(len(table))), *nothing[: len(experts)]],
        expert_spans=[*nothing[: len(table)], *map(experts.spans_of, range(len(experts)))],
    )


def mix(plan: Plan, table: GroupTable, mu: float) -> tuple[Plan, list[float]]:
    """Returns the plan with (1 - mu) on its token weights, and mu / N for the expert tokens of each row, 0 in the policy's."""
    counts = [sum(end - start for start, end in spans) for spans in table.expert_spans]
    return replace(plan, token_weights=[(1.0 - mu) * weight for weight in plan.token_weights]), weights_by_count(
        plan, counts, mu
    )


def expert_loss(logprobs: Tensor, weights: Tensor, chord: ChordConfig) -> Tensor:
    """Computes the sum of -w sg(phi) log pi over tokens with a weight, a scalar; both [B, R]. `chord.phi` false: phi = 1."""
    logprobs = logprobs.masked_fill(weights == 0, 0.0)
    probabilities = logprobs.detach().exp()
    phi = probabilities * (1.0 - probabilities) if chord.phi else 1.0
    return -(weights * phi * logprobs).sum()
