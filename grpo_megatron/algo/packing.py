"""Rows to data-parallel ranks and micro-batches: integers, the same on every rank.

Balance: Graham's LPT rule. The unit of the highest cost goes to the rank with the lowest; the heaviest rank exceeds the
lightest by at most one unit. A unit is what must stay in one micro-batch: a row, or a pair of rows.

The cost of a sequence of s tokens, r of them in the response, is its multiply-adds in a forward pass (models/flops.py
derives them; the output head reads response tokens only):

    P s + V h r + d H L s^2

It is used where the last term, attention, is at least a tenth of the mini-batch's cost. Elsewhere the cost is s: balanced
tokens are balanced memory too. First-fit decreasing packs by tokens in either case, since they are what fills a device.

Where `actor.share_prompts` is set, a unit may also be several rows of one prompt, which share a copy of it
(models/packing.py). Its later rows have no prompt tokens then, and cost the less. The plan takes such units if the
heaviest rank gets lighter by them: they are larger, so ranks may be less even.

A row without a gradient (`needs.forward_only_at_zero_advantage`) needs no backward pass, which costs twice the forward pass.
Such rows get micro-batches of their own, the last ones of a mini-batch, if that is cheaper. A micro-batch counts 3 with a
backward pass and 1 without. A full one is assumed: a step of one micro-batch stays as it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from grpo_megatron.config import ActorConfig
from grpo_megatron.types import GroupTable, MiniBatches, rows_of_mini_batch

# What must stay in one micro-batch, in this order: a row, or a pair of rows.
Unit = list[int]

LEAST_ATTENTION = 10  # attention counts where it is at least one part in so many


@dataclass(frozen=True)
class SequenceCost:
    """The factors of the header's formula: P, V h and d H L."""

    per_token: int
    per_response_token: int
    per_square: int

    def of(
        self, lengths: Sequence[int], response_lengths: Sequence[int], shared: Sequence[int] | None = None
    ) -> list[int]:
        """The cost of each sequence, from its tokens and its response tokens; the tokens where attention is cheap.

        `shared`: how many of its first tokens another sequence computes.
        """
        shared = shared or [0] * len(lengths)
        head = self.per_response_token * sum(response_lengths)
        attention = self.per_square * sum(s * s for s in lengths)
        if (LEAST_ATTENTION - 1) * attention < self.per_token * sum(lengths) + head:
            return [s - p for s, p in zip(lengths, shared, strict=True)]
        return [
            self.per_token * (s - p) + self.per_response_token * r + self.per_square * (s * s - p * p)
            for s, r, p in zip(lengths, response_lengths, shared, strict=True)
        ]


@dataclass(frozen=True)
class Assignment:
    """Ranks and micro-batches of a step: what `types.Plan` has, and the tokens and costs of each row that it is made from."""

    mini_batches: list[MiniBatches]
    num_forward_only: list[int]
    lengths: list[int]
    costs: list[int]

    def heaviest(self) -> int:
        """The cost of the heaviest rank, summed over the mini-batches."""
        return sum(max(of_rank) for of_rank in _costs_of_ranks(self.mini_batches, self.costs))


def assign(
    units_of_mini_batches: list[list[Unit]],
    dp: int,
    lengths: list[int],
    costs: list[int],
    actor: ActorConfig,
    forward_only: Collection[int] = (),
) -> Assignment:
    """One mini-batch for each list of units, none for an empty one. See `add_mini_batch`."""
    mini_batches: list[MiniBatches] = [[] for _ in range(dp)]
    counts = [
        add_mini_batch(mini_batches, units, lengths, actor, costs, forward_only)
        for units in units_of_mini_batches
        if units
    ]
    return Assignment(mini_batches, counts, lengths, costs)


def merge_prompts(
    units: list[Unit], table: GroupTable, actor: ActorConfig, forward_only: Collection[int] = ()
) -> list[Unit]:
    """Units of one row each -> units of rows that share one copy of their prompt, as many as a micro-batch has room for."""
    most = actor.ppo_micro_batch_size_per_gpu or len(units)
    merged: list[Unit] = []
    room = 0
    for [row] in sorted(units, key=lambda unit: (unit[0] in forward_only, unit)):
        first = merged[-1][0] if merged else None
        response = table.response_length[row]
        if (
            first is not None
            and table.prompt_index[first] == table.prompt_index[row]
            and (first in forward_only) == (row in forward_only)
            and response <= room
            and len(merged[-1]) < most
        ):
            merged[-1].append(row)
        else:
            merged.append([row])
            room = actor.ppo_max_token_len_per_gpu - table.prompt_length[row]
        room -= response
    return merged


def shared_tokens(units_of_mini_batches: list[list[Unit]], table: GroupTable) -> list[int]:
    """Counts for each row its prompt tokens that the first row of its unit computes."""
    shared = [0] * len(table)
    for units in units_of_mini_batches:
        for row in (row for unit in units for row in unit[1:]):
            shared[row] = table.prompt_length[row]
    return shared


def add_mini_batch(
    mini_batches: list[MiniBatches],
    units: list[Unit],
    lengths: list[int],
    actor: ActorConfig,
    costs: list[int] | None = None,
    forward_only: Collection[int] = (),
) -> int:
    """Append one mini-batch made of `units` to the mini-batches of every rank. No units: no mini-batch.

    `costs` per row; None: the lengths. `forward_only`: the rows without a gradient. Returns how many of the appended
    micro-batches, the last ones of each rank, have only such rows.
    """
    dp, costs = len(mini_batches), costs or lengths
    packed = pack_units(balance(units, costs, dp), lengths, actor)
    without = frozenset(forward_only)
    kinds: tuple[list[Unit], list[Unit]] = ([], [])  # with a gradient, without
    for unit in units:
        kinds[without.issuperset(unit)].append(unit)
    if kinds[True]:
        with_gradient, silent = (pack_units(balance(kind, costs, dp), lengths, actor) for kind in kinds)
        if 3 * len(with_gradient[0]) + len(silent[0]) < 3 * len(packed[0]):
            _append(mini_batches, [a + b for a, b in zip(with_gradient, silent, strict=True)])
            return len(silent[0])
    _append(mini_batches, packed)
    return 0


def add_packed(
    mini_batches: list[MiniBatches], units_of_rank: list[list[Unit]], lengths: list[int], actor: ActorConfig
) -> None:
    """Append one mini-batch made of the units of each rank, which stay on it."""
    _append(mini_batches, pack_units(units_of_rank, lengths, actor))


def _append(mini_batches: list[MiniBatches], packed: MiniBatches) -> None:
    if any(map(rows_of_mini_batch, packed)):
        for rank_mini_batches, micro_batches in zip(mini_batches, packed, strict=True):
            rank_mini_batches.append(micro_batches)


def balance(units: list[Unit], costs: list[int], dp: int) -> list[list[Unit]]:
    """The units of each rank. Ties go to the lower row and the lower rank."""
    units_of_rank: list[list[Unit]] = [[] for _ in range(dp)]
    loads = [(0, rank) for rank in range(dp)]  # sorted, hence a heap
    for cost, unit in _highest_first(units, costs):
        load, rank = loads[0]
        units_of_rank[rank].append(unit)
        heapq.heapreplace(loads, (load + cost, rank))
    return units_of_rank


def pack_units(units_of_rank: list[list[Unit]], lengths: list[int], actor: ActorConfig) -> MiniBatches:
    """The micro-batches of each rank, as many on each: at least one, and empty ones at the end."""
    packed = [_pack(units, lengths, actor) for units in units_of_rank]
    count = max(1, *map(len, packed))
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in packed]


def _highest_first(units: list[Unit], values: list[int]) -> list[tuple[int, Unit]]:
    """(sum of its rows' values, unit), highest first."""
    lowest_first = [(-values[unit[0]] if len(unit) == 1 else -sum(values[row] for row in unit), unit) for unit in units]
    return [(-value, unit) for value, unit in sorted(lowest_first)]


def _pack(units: list[Unit], lengths: list[int], actor: ActorConfig) -> list[list[int]]:
    """First-fit decreasing into micro-batches under both caps, with the padding of context parallelism."""
    cp = actor.megatron.context_parallel_size
    if cp > 1:
        lengths = [n + (-n % (2 * cp)) for n in lengths]
    max_sequences = actor.ppo_micro_batch_size_per_gpu or sum(map(len, units))
    packed: list[list[int]] = []
    room: list[int] = []  # tokens left in each; may be negative for a unit above the cap
    for size, unit in _highest_first(units, lengths):
        for i, micro in enumerate(packed):
            if size <= room[i] and len(micro) + len(unit) <= max_sequences:
                break
        else:
            i = len(packed)
            packed.append([])
            room.append(actor.ppo_max_token_len_per_gpu)
        packed[i].extend(unit)
        room[i] -= size
    return packed


def imbalance(mini_batches: list[MiniBatches], costs: list[int]) -> float:
    """The heaviest rank's cost, as a fraction above the mean rank's. Ranks wait for each other at every mini-batch."""
    of_ranks = _costs_of_ranks(mini_batches, costs)
    heaviest, total = sum(map(max, of_ranks)), sum(map(sum, of_ranks))
    return heaviest * len(mini_batches) / total - 1.0 if total else 0.0


def _costs_of_ranks(mini_batches: list[MiniBatches], costs: list[int]) -> list[list[int]]:
    """[mini-batch][rank]"""
    return [
        [sum(costs[row] for row in rows_of_mini_batch(per_rank[mini])) for per_rank in mini_batches]
        for mini in range(len(mini_batches[0]))
    ]
