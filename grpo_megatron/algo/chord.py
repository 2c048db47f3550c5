"""CHORD (arXiv 2508.11408): rows that an expert has written, beside the policy's own, in one weighted sum.

    loss = (1 - mu) * (the sum of losses.py over the policy's rows) + mu / N * sum over the N expert tokens of -sg(phi) log pi

phi = p (1 - p), p = pi(token): tokens that are certain, or that the policy finds impossible, teach little. N is of the optimizer
step, on all ranks. Expert rows are outside the loss mask: no statistic, correction, KL or entropy reads them. The (1 - mu) is
also on the policy's KL and entropy, as in ms-swift; in Trinity-RFT it is on the policy loss alone. Log-probabilities are at the
rollout's temperature.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from grpo_megatron.config.algorithm import ChordConfig
from grpo_megatron.types import GroupTable, Plan, rows_on_all_ranks

if TYPE_CHECKING:
    from torch import Tensor


KNOWN = ("prompt_index", "index", "prompt_length", "response_length", "truncated", "holder")  # of every sample


def mixing_weight(step: int, chord: ChordConfig) -> float:
    """Computes mu of a training step (from 0): mu_end + (mu - mu_end) (1 + cos(pi min(s, mu_steps) / mu_steps)) / 2."""
    if chord.mu_end is None:
        return chord.mu
    share = (1.0 + math.cos(math.pi * min(step, chord.mu_steps) / chord.mu_steps)) / 2.0
    return chord.mu_end + (chord.mu - chord.mu_end) * share


def with_experts(table: GroupTable, experts: GroupTable) -> GroupTable:
    """Appends the rows of `experts`: without a reward, outside the loss, with their loss tokens in `expert_spans`."""
    size, count = len(table), len(experts)
    columns: dict[str, Any] = {}
    for one in fields(GroupTable):
        own, given = getattr(table, one.name), getattr(experts, one.name)
        filler = [] if own and isinstance(own[0], list) else math.nan
        columns[one.name] = [*own, *(given or [filler] * count)] if own or one.name in KNOWN else []
    columns["reward"] = [*table.reward, *[math.nan] * count]
    columns["loss_spans"] = [*map(table.spans_of, range(size)), *[[] for _ in range(count)]]
    columns["expert_spans"] = [*[[] for _ in range(size)], *map(experts.spans_of, range(count))]
    return GroupTable(**columns)


def with_policy_share(plan: Plan, mu: float) -> Plan:
    """Multiplies the token weights by 1 - mu."""
    return replace(plan, token_weights=[(1.0 - mu) * weight for weight in plan.token_weights])


def expert_weights(plan: Plan, table: GroupTable, mu: float) -> list[float]:
    """The weight of each row's expert tokens: mu / their number in the mini-batch, on all ranks; 0 in the policy's rows."""
    counts = [sum(end - start for start, end in spans) for spans in table.expert_spans]
    weights = [0.0] * len(table)
    for mini in range(len(plan.mini_batches[0])):
        rows = [row for row in rows_on_all_ranks(plan.mini_batches, mini) if counts[row]]
        for row in rows:
            weights[row] = mu / sum(counts[row] for row in rows)
    return weights


def expert_loss(logprobs: Tensor, weights: Tensor, chord: ChordConfig) -> Tensor:
    """Computes the sum of -w sg(phi) log pi over tokens with a weight, a scalar; both [B, R]. `chord.phi` false: phi = 1."""
    logprobs = logprobs.masked_fill(weights == 0, 0.0)
    probabilities = logprobs.detach().exp()
    phi = probabilities * (1.0 - probabilities) if chord.phi else 1.0
    return -(weights * phi * logprobs).sum()
