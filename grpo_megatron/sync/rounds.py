"""Rounds: which parts travel together, and the memory that this takes.

Four rounds are in flight at a time: one is loaded, one travels within the nodes, two over the network. (Of two, the
network is busy with the first while the ranks agree on the second.)
"""

from __future__ import annotations

import itertools
import math
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


class Rounds:
    """Which parts travel in a round. Each stage is cut into as many pieces, so that all lanes go over to their next stage
    in the same round."""

    def __init__(self, plan: SyncPlan, per_stage: int) -> None:
        """`pieces[stage]`: numbers of parts. Stages without a part are left out here, and in the numbers of lanes."""
        self.per_stage, self._stages = per_stage, list(plan.stages)
        self.pieces = [_cut([plan.numel(plan.parts[i]) for i in r], r, per_stage) for r in plan.stages.values()]

    @property
    def num_lanes(self) -> int:
        return len(self._stages)

    @property
    def count(self) -> int:
        return self.per_stage * len(self._stages)

    def parts(self, lane: int, number: int) -> range:
        """Numbers of the parts that the ranks of a lane receive in a round."""
        return self.pieces[self._index(lane, number)][number % self.per_stage]

    def stage(self, lane: int, number: int) -> int:
        """The pipeline stage of these parts."""
        return self._stages[self._index(lane, number)]

    def numbers(self, lane: int, index: int) -> slice:
        """The rounds in which a lane receives the stage with this index."""
        first = (index - lane) % len(self._stages) * self.per_stage
        return slice(first, first + self.per_stage)

    def _index(self, lane: int, number: int) -> int:
        return (lane + number // self.per_stage) % len(self._stages)


class TrafficCounter:
    """Counts what every rank sends and receives, for any division of a plan's parts into rounds."""

    def __init__(self, plan: SyncPlan) -> None:
        turns = {turn: i for i, turn in enumerate(dict.fromkeys((part.kind, part.turn) for part in plan.parts))}
        self._plan, self._lanes = plan, np.array(plan.lanes)
        self._turn_of = np.array([turns[part.kind, part.turn] for part in plan.parts])
        self.sizes = np.array([plan.numel(part) for part in plan.parts], dtype=np.float64)  # exact below 2**53
        shape = (len(turns), plan.grid.world_size)
        self._received = {phase: np.zeros(shape, np.uint16) for phase in PHASES}  # parts per turn and rank
        self._sent_within = np.zeros(shape, np.uint16)
        self._sent_over = np.zeros((len(plan.stages), *shape), np.uint16)  # over the network, to each lane
        for (kind, turn), row in turns.items():
            for phase, source, target in plan.routes[kind].transfers(turn):
                self._received[phase][row, target] += 1
                if phase == NODE:
                    self._sent_within[row, source] += 1
                else:
                    self._sent_over[plan.lanes[target], row, source] += 1

    def count(self, rounds: Rounds) -> Traffic:
        shape = (self._plan.grid.world_size, rounds.count)
        sent, received = ({phase: np.zeros(shape) for phase in PHASES} for _ in range(2))
        for index, stage in enumerate(self._plan.stages):
            turns, elements = self._elements(rounds.pieces[index])
            holders = np.array([self._plan.grid.stage(rank) == stage for rank in range(shape[0])])
            for lane in range(rounds.num_lanes):
                members, numbers = self._lanes == lane, rounds.numbers(lane, index)
                for phase in PHASES:
                    received[phase][members, numbers] = _total(elements, self._received[phase][turns], members)
                sent[NODE][members, numbers] = _total(elements, self._sent_within[turns], members)
                sent[NETWORK][holders, numbers] += _total(elements, self._sent_over[lane, turns], holders)
        return Traffic(sent, received)

    def _elements(self, pieces: list[range]) -> tuple[slice, np.ndarray]:
        """The turns of a stage, and the elements that travel in each, [pieces, turns]."""
        parts = slice(pieces[0].start, pieces[-1].stop)
        turns = self._turn_of[parts]
        first, last = turns.min(), turns.max() + 1
        numbers = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        elements = np.zeros((len(pieces), last - first))
        np.add.at(elements, (numbers, turns - first), self.sizes[parts])
        return slice(first, last), elements


def _total(elements: np.ndarray, counts: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """[ranks, pieces] from [pieces, turns] and [turns, all ranks]. In float64, as BLAS multiplies no integers."""
    return (elements @ counts[:, ranks].astype(np.float64)).T


def plan_rounds(
    parameters: Sequence[SyncParameter], spans: EngineSpans, grid: Grid, budget: int
) -> tuple[SyncPlan, Rounds, Traffic]:
    """A sync within `budget` elements."""
    plan = SyncPlan(parameters, spans, grid, max(1, budget // PARTS_PER_BUDGET))
    return plan, *choose_rounds(plan, budget)


def choose_rounds(plan: SyncPlan, budget: int) -> tuple[Rounds, Traffic]:
    """As few rounds as fit `budget` elements on every rank, but enough of them to overlap.

    Counted are the message buffers and a round of whole tensors that the engine loads from. (A module larger than a round
    grows over several; an engine keeps one, whatever the budget.)
    """
    counter = TrafficCounter(plan)
    stages = [counter.sizes[parts.start : parts.stop] for parts in plan.stages.values()]
    limit = min(budget, max(SMALLEST_ROUND, int(counter.sizes.sum()) // FEWEST_ROUNDS))
    per_stage = max(math.ceil(sizes.sum() / limit) for sizes in stages)
    while True:
        rounds = Rounds(plan, per_stage)
        traffic = counter.count(rounds)
        needed = max(sizes.sum() for sizes in stages) / per_stage + traffic.buffers().max()
        if needed <= budget or per_stage >= max(map(len, stages)):
            return rounds, traffic
        per_stage = max(math.ceil(per_stage * needed / budget), per_stage * 10 // 9 + 1)


def _cut(sizes: Sequence[int], parts: range, count: int) -> list[range]:
    """Consecutive parts as `count` ranges of about the same number of elements."""
    ends = np.cumsum(sizes)
    shares = np.arange(1, count) * (ends[-1] / count)
    borders = [0, *np.searchsorted(ends, shares, side="left").tolist(), len(parts)]
    return [range(parts.start + low, parts.start + high) for low, high in itertools.pairwise(borders)]
