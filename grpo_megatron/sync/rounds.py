"""Rounds: which parts travel together, and the memory that this takes.

Four rounds are in flight at a time: one is loaded, one travels within the nodes, two over the network. (Of two, the
network is busy with the first while the ranks agree on the second.)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.sync.plan import NETWORK, NODE, SyncPart, SyncPlan
from grpo_megatron.sync.tensors import EngineSpans, Interval, Share, SyncParameter, SyncTensor

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
    """Choose as few rounds as fit `budget` elements on every rank, but enough of them to overlap.

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


# -- One rank's side of a sync plan: its messages round by round, and the parts it takes from its own parameters -------


class Copy(NamedTuple):
    """`[start, stop)` of a tensor's axis, at `local_start` of the parameter that has it."""

    tensor: int
    start: int
    stop: int
    local_start: int


class Slot(NamedTuple):
    """Elements `[start, stop)` of a buffer: a part, in its shape. `origin`: where the sender of the part has it, in its own
    parameter or among what it has received over the network."""

    part: int
    start: int
    stop: int
    shape: tuple[int, ...]
    origin: Copy | Slot | None = None


@dataclass
class Message:
    """Parts that travel together, end to end in the order of their numbers. All messages of a phase share a buffer."""

    peer: int
    parts: list[int] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)

    @property
    def span(self) -> Interval:
        """Elements of the buffer."""
        return self.slots[0].start, self.slots[-1].stop


@dataclass
class Round:
    """What one rank sends and receives in a round, by phase and peer, and the tensors that are complete after it."""

    sends: dict[int, dict[int, Message]]
    receives: dict[int, dict[int, Message]]
    complete: list[int]

    def elements(self, phase: int, is_receiver: bool) -> int:
        """The size of a buffer for the messages of a phase."""
        messages = (self.receives if is_receiver else self.sends)[phase]
        return max((message.span[1] for message in messages.values()), default=0)

    def messages(self) -> int:
        return sum(len(side[phase]) for side in (self.sends, self.receives) for phase in (NETWORK, NODE))


class RankPlan:
    """`own[tensor]`: what this rank's engine reads and the rank itself holds. `held[part]`: where the rank has a part that
    it sends or witnesses. Elements are counted by `SyncPlan.numel`."""

    def __init__(self, plan: SyncPlan, rounds: Rounds, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self._lane = plan.lanes[rank]
        self.engine_rank = plan.grid.engine_rank(rank)
        self._stage, self._tp_rank = plan.grid.stage(rank), rank % plan.grid.tp
        self._holds = [rank in set(routes.holders) for routes in plan.routes]
        self._mine: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}
        self.own: dict[int, list[Copy]] = {}
        self.rounds = [self._round(rounds, number) for number in range(rounds.count)]
        self._find_own()
        last = {
            plan.parts[index].tensor: number
            for number in range(rounds.count)
            for index in rounds.parts(self._lane, number)
        }
        for tensor in range(len(plan.tensors)):
            self.rounds[last[tensor]].complete.append(tensor)

    def holds(self, part: SyncPart) -> bool:
        return self._holds[part.kind]

    def local(self, part: SyncPart) -> Copy:
        """Where this rank, which holds the part, has it."""
        parameter, tensor = self.parameter(part.tensor), self.plan.tensors[part.tensor]
        index = part.tensor - self.plan.first[part.tensor]
        for piece in parameter.pieces[self._tp_rank]:
            if piece.tensor == index and piece.start <= part.start < piece.stop:
                return Copy(part.tensor, part.start, part.stop, piece.local_start + part.start - piece.start)
        raise AssertionError(f"rank {self.rank} does not hold {tensor.name} {part.span}")

    def parameter(self, tensor: int) -> SyncParameter:
        return self.plan.parameters[self.plan.owner[tensor]]

    def tensor(self, number: int) -> SyncTensor:
        return self.plan.tensors[number]

    def parameters(self) -> list[SyncParameter]:
        """The parameters that this rank has."""
        held = {self.plan.owner[part.tensor] for part in self.plan.parts if self.holds(part)}
        return [self.plan.parameters[index] for index in sorted(held)]

    def shares(self) -> list[Share]:
        """What this rank digests for the attestation, those of a parameter next to each other."""
        witnessed = [p for p in self.plan.parts if self.plan.witnesses[p.tensor, p.kind] == self.rank]
        shares: list[Share] = []
        for part in sorted(witnessed):
            share = self._share(part)
            if shares and _continues(share, shares[-1]):
                share = dataclasses.replace(shares.pop(), stop=share.stop)
            shares.append(share)
        return shares

    def sent(self) -> list[int]:
        """The parts that this rank sends from its own parameters, each once."""
        messages = (m for current in self.rounds for phase in current.sends.values() for m in phase.values())
        return sorted({part for m in messages for part in m.parts if self.holds(self.plan.parts[part])})

    def received(self) -> list[int]:
        """The parts that this rank receives."""
        messages = (m for current in self.rounds for phase in current.receives.values() for m in phase.values())
        return sorted(part for m in messages for part in m.parts)

    def _share(self, part: SyncPart) -> Share:
        name, tensor = self.parameter(part.tensor).name, self.plan.tensors[part.tensor]
        readers = self.plan.kinds[part.kind].readers
        return Share(name, tensor, part.start, part.stop, self.local(part).local_start, readers)

    def _round(self, rounds: Rounds, number: int) -> Round:
        sends: dict[int, dict[int, Message]] = {NETWORK: {}, NODE: {}}
        receives: dict[int, dict[int, Message]] = {NETWORK: {}, NODE: {}}
        for lane in range(rounds.num_lanes):
            if lane != self._lane and rounds.stage(lane, number) != self._stage:
                continue  # other lanes receive only what this rank holds
            for index in rounds.parts(lane, number):
                part = self.plan.parts[index]
                for phase, peer, is_sender in self._transfers(part.kind, part.turn):
                    if lane != (self.plan.lanes[peer] if is_sender else self._lane):
                        continue
                    side = (sends if is_sender else receives)[phase]
                    if peer not in side:
                        side[peer] = Message(peer)
                    side[peer].parts.append(index)
        for phase in (NETWORK, NODE):
            self._lay_out(receives[phase])
        forwarded = {slot.part: slot for message in receives[NETWORK].values() for slot in message.slots}
        for phase in (NETWORK, NODE):
            self._lay_out(sends[phase], forwarded)
        return Round(sends, receives, [])

    def _lay_out(self, messages: dict[int, Message], forwarded: dict[int, Slot] | None = None) -> None:
        """Give every part its place in the buffer of the phase. `forwarded`: for messages that this rank sends."""
        end = 0
        for message in messages.values():
            for number in message.parts:
                part = self.plan.parts[number]
                whole = self.plan.tensors[part.tensor]
                shape = (*whole.shape[: whole.axis], part.stop - part.start, *whole.shape[whole.axis + 1 :])
                origin: Copy | Slot | None = None
                if forwarded is not None:
                    origin = self.local(part) if self.holds(part) else forwarded[number]
                start, end = end, end + self.plan.numel(part)
                message.slots.append(Slot(number, start, end, shape, origin))

    def _transfers(self, kind: int, turn: int) -> list[tuple[int, int, bool]]:
        """(phase, peer, is this rank the sender) of this rank's transfers in a turn."""
        key = (kind, turn)
        if key not in self._mine:
            self._mine[key] = [
                (t.phase, t.target if t.source == self.rank else t.source, t.source == self.rank)
                for t in self.plan.routes[kind].transfers(turn)
                if self.rank in (t.source, t.target)
            ]
        return self._mine[key]

    def _find_own(self) -> None:
        for part in self.plan.parts:
            if self.holds(part) and self.engine_rank in self.plan.kinds[part.kind].readers:
                self.own.setdefault(part.tensor, []).append(self.local(part))
        self.own = {tensor: _merged(copies) for tensor, copies in self.own.items()}


def _continues(share: Share, last: Share) -> bool:
    return (share.tensor, share.engine_ranks, share.start) == (
        last.tensor,
        last.engine_ranks,
        last.stop,
    ) and share.local_start - last.local_start == share.start - last.start


def _merged(copies: list[Copy]) -> list[Copy]:
    """Neighbours become one, so that a tensor's own rows are copied at once."""
    out: list[Copy] = []
    for copy in sorted(copies, key=lambda c: c.start):
        if out and out[-1].stop == copy.start and copy.local_start - out[-1].local_start == copy.start - out[-1].start:
            out[-1] = Copy(copy.tensor, out[-1].start, copy.stop, out[-1].local_start)
        else:
            out.append(copy)
    return out
