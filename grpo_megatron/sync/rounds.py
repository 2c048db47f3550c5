"""Rounds: which parts travel together, and the memory that this takes.

Four rounds are in flight at a time: one is loaded, one travels within the nodes, two over the network. (Of two, the
network is busy with the first while the ranks agree on the second.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_megatron.parallel.grid import Grid
from grpo_megatron.sync.plan import NETWORK, NODE, SyncPlan
from grpo_megatron.sync.tensors import EngineSpans, SyncParameter

PHASES = (NETWORK, NODE)
# Rounds whose messages are in memory at the same time, by (phase, is receiver)
AHEAD = 2  # rounds over the network
DEPTH = {(NETWORK, False): AHEAD, (NETWORK, True): AHEAD + 2, (NODE, False): 2, (NODE, True): 2}
PARTS_PER_BUDGET = 64  # no part is larger than this fraction of the budget, so that rounds fill it evenly
FEWEST_ROUNDS = 32  # fewer would not overlap: the first and the last are alone
SMALLEST_ROUND = 1 << 20  # elements: small models have few rounds


@dataclass(frozen=True)
class Traffic:
    """Elements per phase, rank and round: `sent[phase][rank, round]`."""

    sent: dict[int, np.ndarray]
    received: dict[int, np.ndarray]

    def buffers(self) -> np.ndarray:
        """Elements of all message buffers of each rank, [ranks]."""
        total = np.zeros(len(self.sent[NODE]))
        for (phase, is_receiver), depth in DEPTH.items():
            total += depth * (self.received if is_receiver else self.sent)[phase].max(axis=1, initial=0)
        return total


class TrafficCounter:
    """Counts what every rank sends and receives, for any division of a plan's parts into rounds."""

    def __init__(self, plan: SyncPlan) -> None:
        turns = {turn: i for i, turn in enumerate(dict.fromkeys((part.kind, part.turn) for part in plan.parts))}
        self._turn_of = np.array([turns[part.kind, part.turn] for part in plan.parts])
        self.sizes = np.array([plan.numel(part) for part in plan.parts])
        shape = (len(turns), plan.grid.world_size)
        self._sends, self._receipts = ({phase: np.zeros(shape) for phase in PHASES} for _ in range(2))
        for (kind, turn), row in turns.items():
            for transfer in plan.routes[kind].transfers(turn):
                self._sends[transfer.phase][row, transfer.source] += 1
                self._receipts[transfer.phase][row, transfer.target] += 1

    def count(self, rounds: Sequence[range]) -> Traffic:
        sides = (self._sends, self._receipts)
        return Traffic(*({phase: self._sum(side[phase], rounds) for phase in PHASES} for side in sides))

    def _sum(self, table: np.ndarray, rounds: Sequence[range]) -> np.ndarray:
        """Elements per rank and round, [ranks, rounds]. `table`: how often each rank sends, or receives, in each turn."""
        out = np.empty((len(rounds), table.shape[1]))
        for number, parts in enumerate(rounds):
            here = slice(parts.start, parts.stop)
            out[number] = self.sizes[here] @ table[self._turn_of[here]]  # exact below 2**53
        return out.T


def plan_rounds(
    parameters: Sequence[SyncParameter], spans: EngineSpans, grid: Grid, budget: int
) -> tuple[SyncPlan, list[range], Traffic]:
    """A sync within `budget` elements. Half of them may be kept by an engine as parts of modules that are not complete."""
    plan = SyncPlan(parameters, spans, grid, max(1, budget // PARTS_PER_BUDGET), open_modules=budget // 2)
    return plan, *choose_rounds(plan, budget)


def choose_rounds(plan: SyncPlan, budget: int) -> tuple[list[range], Traffic]:
    """The parts of each round: as few rounds as fit `budget` elements on every rank, but enough of them to overlap.

    Counted are the message buffers, a round of whole tensors that the engine loads from, and the modules that it keeps
    where stages send side by side. (A module larger than a round grows over several; an engine keeps one, whatever the
    budget.)
    """
    counter = TrafficCounter(plan)
    limit = min(budget, max(SMALLEST_ROUND, int(counter.sizes.sum()) // FEWEST_ROUNDS))
    while True:
        rounds = _cut(counter.sizes, limit)
        traffic = counter.count(rounds)
        needed = plan.open_modules + limit + traffic.buffers().max()
        if needed <= budget or limit <= 1:
            return rounds, traffic
        free = (budget - plan.open_modules) / (needed - plan.open_modules)
        limit = max(1, min(int(limit * free), limit * 9 // 10))


def _cut(sizes: np.ndarray, limit: int) -> list[range]:
    """Consecutive parts of at most `limit` elements together, or a single one."""
    ends = np.cumsum(sizes)
    rounds, first = [], 0
    while first < len(sizes):
        sent = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, sent + limit, side="right")))
        rounds.append(range(first, last))
        first = last
    return rounds
