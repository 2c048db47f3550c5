"""Rounds: which parts travel together, and the memory that this takes.

Three rounds are in flight at a time: one is loaded, one travels within the nodes, one over the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_megatron.sync.plan import NETWORK, NODE, SyncPlan

PHASES = (NETWORK, NODE)
# Rounds whose messages are in memory at the same time, by (phase, is receiver)
DEPTH = {(NETWORK, False): 1, (NETWORK, True): 3, (NODE, False): 2, (NODE, True): 2}
PARTS_PER_BUDGET = 128  # no part is larger than this fraction of the budget, so that rounds fill it evenly


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
        self._sizes = np.array([plan.numel(part) for part in plan.parts], dtype=np.float64)  # exact below 2**53
        shape = (plan.grid.world_size, len(turns))
        self._sends, self._receipts = ({phase: np.zeros(shape) for phase in PHASES} for _ in range(2))
        for (kind, turn), column in turns.items():
            transfers = np.array(plan.routes[kind].transfers(turn), dtype=np.int64).reshape(-1, 3)
            for phase in PHASES:
                of_phase = transfers[transfers[:, 0] == phase]
                np.add.at(self._sends[phase][:, column], of_phase[:, 1], 1)
                np.add.at(self._receipts[phase][:, column], of_phase[:, 2], 1)

    def count(self, rounds: Sequence[range]) -> Traffic:
        sizes = np.zeros((self._sends[NODE].shape[1], len(rounds)))
        for number, parts in enumerate(rounds):
            here = slice(parts.start, parts.stop)
            np.add.at(sizes[:, number], self._turn_of[here], self._sizes[here])
        return Traffic(*({phase: side[phase] @ sizes for phase in PHASES} for side in (self._sends, self._receipts)))


def choose_rounds(plan: SyncPlan, budget: int) -> tuple[list[range], Traffic]:
    """The parts of each round: as few rounds as fit `budget` elements on every rank.

    Counted are the message buffers, and a round of whole tensors that the engine loads from. (A tensor larger than a round
    grows over several; it is in memory whole, whatever the budget.)
    """
    counter, limit = TrafficCounter(plan), budget
    while True:
        rounds = list(_cut(plan, limit))
        traffic = counter.count(rounds)
        if limit + traffic.buffers().max() <= budget or limit <= 1:
            return rounds, traffic
        limit = limit * 4 // 5


def _cut(plan: SyncPlan, limit: int) -> Iterable[range]:
    first, elements = 0, 0
    for index, part in enumerate(plan.parts):
        size = plan.numel(part)
        if index > first and elements + size > limit:
            yield range(first, index)
            first, elements = index, 0
        elements += size
    yield range(first, len(plan.parts))
