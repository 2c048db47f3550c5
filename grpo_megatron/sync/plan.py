"""The plan of a weight sync: which rank sends which part of which tensor to whom, and when. The same on every rank.

Both layouts cut a tensor along one dimension, its `axis`, and both along the same one. A part of a tensor is therefore an
interval of that dimension: rows (axis 0) or columns (axis 1) of the whole Hugging Face tensor. Tensors are cut into parts, so
that all of a part has the same holders (training ranks with a copy) and the same readers (ranks of the engines). For every
part and every node:
  1. A reader that holds the part takes it from its own memory.
  2. If a rank of the node holds it, the other readers get it from such a rank.
  3. If none does, one reader of the node receives it over the network, once, and passes it on within the node.
So no rank receives anything twice, and no byte crosses a node's border twice.

Who sends, receives and passes on rotates from part to part. The rotation has a period, so a **route** (the transfers of
one turn) is computed once for many parts, and the plan's size does not grow with ranks x tensors.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # mesh.py imports torch
    from grpo_megatron.parallel.mesh import Grid

# -- What a sync moves: tensors, and who has and who needs which part of them. Plain numbers ---------------------------

Interval = tuple[int, int]  # [start, stop) of a tensor's axis


@dataclass(frozen=True)
class SyncTensor:
    """A whole Hugging Face tensor. One of more than two dimensions (a convolution) is never cut."""

    name: str
    shape: tuple[int, ...]
    axis: int

    @property
    def length(self) -> int:
        return self.shape[self.axis]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """`[start, stop)` of a tensor, kept at `local_start` of a parameter, along the same dimension."""

    tensor: int  # index in SyncParameter.tensors
    start: int
    stop: int
    local_start: int


@dataclass(frozen=True)
class SyncParameter:
    """A parameter of the training model, and the tensors in it.

    `pieces[tp_rank]` is what a tensor-parallel rank holds, in the parameter's order; ranks with a copy of the same part
    each list it. `stages` and `ep_rank` (None: not an expert's) say on which ranks the parameter exists: in one stage, or
    a tied embedding in the first and, as its head, in the last.
    """

    name: str
    tensors: tuple[SyncTensor, ...]
    stages: tuple[int, ...]
    ep_rank: int | None
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def stage(self) -> int:
        """The one in whose turn the parameter is sent."""
        return self.stages[0]


# Tensor name -> per tensor-parallel rank of the engine the part that it reads. An empty span: nothing.
EngineSpans = Mapping[str, tuple[Interval, ...]]


@dataclass(frozen=True)
class EngineTensors:
    """What an engine gets: every tensor of a complete weight stream, and the part of it that each engine rank reads.

    An engine that reads whole tensors has the span [0, length) on each rank. `stacks` names, for each tensor that is loaded
    and digested together with others, the stack that it belongs to: one linear layer of all experts (sync/stacks.py).
    """

    tensors: Mapping[str, SyncTensor]
    spans: EngineSpans
    stacks: Mapping[str, str] = field(default_factory=dict)

    def units(self, rank: int) -> dict[str, list[str]]:
        """What a rank loads in one call, and digests in one: the stack or tensor -> the tensors in it that it reads."""
        units: dict[str, list[str]] = {}
        for name, spans in self.spans.items():
            if spans[rank][0] < spans[rank][1]:
                units.setdefault(self.stacks.get(name, name), []).append(name)
        return units


def shortened(problems: Sequence[str]) -> str:
    """A list in one line: a heading and at most 10 items."""
    if len(problems) > 11:
        problems = [*problems[:11], f"and {len(problems) - 11} more"]
    return ", ".join(problems)


# -- The order in which a sync sends -----------------------------------------------------------------------------------
# With pipeline stages, all ranks of a stage send at the same time as those of every other stage, to other receivers:
#
# slot                  0         1         2         3
# ranks of stage 0      stage 1   stage 2   stage 3   stage 0
# ranks of stage 1      stage 2   stage 3   stage 0   stage 1    receive
# ranks of stage 2      stage 3   stage 0   stage 1   stage 2
# ranks of stage 3      stage 0   stage 1   stage 2   stage 3
#
# So each stage sends to as many ranks as it has itself, and an engine keeps no more than one incomplete module. In the last
# slot everything comes from the own stage, and mostly from the own node. Ranks that pass parts on to each other have the
# same order, that of a **lane**: all of a node, or of an engine where there is a single node.


def module_of(parameter: SyncParameter) -> tuple[int, str]:
    """Stage and name of a parameter's module, as an engine loads it. All experts of a layer are one."""
    name = parameter.name
    return parameter.stage, name.split(".experts.")[0] if ".experts." in name else name.rpartition(".")[0]


def _in_sync_order(parameters: Sequence[SyncParameter]) -> list[SyncParameter]:
    """Stage by stage, and each stage module by module.

    A module (attention input with its bias, all experts of a layer) is never interrupted: an engine keeps what it has of
    a module until all of it has arrived.
    """
    first: dict[tuple[int, str], int] = {}
    for number, parameter in enumerate(parameters):
        first.setdefault(module_of(parameter), number)
    return sorted(parameters, key=lambda parameter: (parameter.stage, first[module_of(parameter)]))


def _first_stage(rank: int, stages: Sequence[int], grid: Grid) -> int:
    """Index in `stages` of the one that a rank receives first: the one after its own. This is the number of its lane."""
    if grid.num_drawing:  # no stage is its own: nodes take turns
        return max(0, rank - grid.num_training) // grid.ranks_per_node % len(stages)
    size = grid.ranks_per_node if grid.num_nodes > 1 else grid.rollout_tp
    return bisect.bisect_right(stages, grid.stage(rank - rank % size)) % len(stages)


# -- Routes ------------------------------------------------------------------------------------------------------------

NETWORK, NODE = PHASES = 0, 1  # of a transfer
# No part is larger than this share of what one sender sends on average: the rest of a rotation is then small.
LARGEST_SHARE = 1 / 16
LONGEST_ROTATION = 4096  # turns; more only if the sizes of the world have many different prime factors


class PartKind(NamedTuple):
    """What parts have in common that travel alike. `holders` are tensor-parallel ranks of the training layout."""

    stages: tuple[int, ...]  # that hold the parts; they travel in the turn of the first
    ep_rank: int | None
    holders: tuple[int, ...]
    readers: tuple[int, ...]  # tensor-parallel ranks of an engine


class Transfer(NamedTuple):
    """A part travels from rank `source` to rank `target`, in phase NETWORK or NODE."""

    phase: int
    source: int
    target: int


class SyncPart(NamedTuple):
    """`[start, stop)` of a tensor's axis, and the turn of the rotation in which it travels."""

    tensor: int  # index in SyncPlan.tensors
    start: int
    stop: int
    kind: int  # index in SyncPlan.kinds
    turn: int


class Routes:
    """The transfers of one kind in each turn of its rotation."""

    def __init__(self, kind: PartKind, grid: Grid) -> None:
        self.holders = sorted(r for s in kind.stages for tp in kind.holders for r in grid.ranks(tp, s, kind.ep_rank))
        holding, reading = set(self.holders), set(kind.readers)
        self._tasks: list[
            tuple[list[int], list[int]]
        ] = []  # of a node: readers that hold nothing, ranks that hold the part
        for ranks in grid.nodes():
            readers = [r for r in ranks if grid.engine_rank(r) in reading and r not in holding]
            if readers:
                self._tasks.append((readers, [r for r in ranks if r in holding]))
        local = [len(holders or readers) for readers, holders in self._tasks]
        self.period = min(math.lcm(len(self.holders), *local), LONGEST_ROTATION)
        self._turns: dict[int, list[Transfer]] = {}

    def transfers(self, turn: int) -> list[Transfer]:
        if turn not in self._turns:
            self._turns[turn] = list(self._make(turn))
        return self._turns[turn]

    def _make(self, turn: int) -> Iterator[Transfer]:
        for number, (readers, holders) in enumerate(self._tasks):
            if holders:
                for index, reader in enumerate(readers):
                    yield Transfer(NODE, holders[(turn + index) % len(holders)], reader)
                continue
            first = readers[turn % len(readers)]
            yield Transfer(NETWORK, self.holders[(turn + number) % len(self.holders)], first)
            yield from (Transfer(NODE, first, reader) for reader in readers if reader != first)

    def smallest_load(self) -> float:
        """How often a rank sends a part, on average over the ranks that can: the least of all groups of such ranks."""
        network = sum(not holders for _, holders in self._tasks)
        shares = [network / len(self.holders)] if network else []
        for readers, holders in self._tasks:
            if holders:
                shares.append(len(readers) / len(holders))
            elif len(readers) > 1:
                shares.append((len(readers) - 1) / len(readers))
        return min(shares, default=0.0)


# -- The plan ----------------------------------------------------------------------------------------------------------


class SyncPlan:
    """`tensors` are in the order of the sync; `parts` cut all of them completely.

    A lane's ranks receive the parts in this order too, but begin with another stage. `lanes` [ranks].
    """

    def __init__(
        self,
        parameters: Sequence[SyncParameter],
        spans: EngineSpans,
        grid: Grid,
        largest_part: int,
    ) -> None:
        """`largest_part`: elements."""
        self.grid, self.spans, self._largest_part = grid, spans, largest_part
        self.parameters = _in_sync_order(parameters)
        self.tensors: list[SyncTensor] = [tensor for p in self.parameters for tensor in p.tensors]
        self.owner = [index for index, p in enumerate(self.parameters) for _ in p.tensors]  # tensor -> parameter
        ends = itertools.accumulate(len(p.tensors) for p in self.parameters)
        self.first = [end - len(p.tensors) for end, p in zip(ends, self.parameters, strict=True) for _ in p.tensors]
        self.kinds: list[PartKind] = []
        self.routes: list[Routes] = []
        modules = itertools.groupby(self._make_parts(), key=lambda p: module_of(self.parameters[self.owner[p.tensor]]))
        self.parts = [part for _, parts in modules for part in self._side_by_side(list(parts))]
        # Stage -> its parts, which are neighbours
        stages = [self.kinds[part.kind].stages[0] for part in self.parts]
        borders = [0, *(i for i in range(1, len(stages)) if stages[i] != stages[i - 1]), len(stages)]
        self.stages = {stages[low]: range(low, high) for low, high in itertools.pairwise(borders)}
        self.lanes = [_first_stage(rank, list(self.stages), grid) for rank in range(grid.world_size)]

    def numel(self, part: SyncPart) -> int:
        tensor = self.tensors[part.tensor]
        return tensor.numel // tensor.length * (part.stop - part.start)

    @cached_property
    def witnesses(self) -> dict[tuple[int, int], int]:
        """(tensor, kind) -> the rank that digests all such parts: of their holders the one with the fewest elements so far.

        Whole shards, because digests of column slices are four times slower on CPU (measured).
        """
        sizes: Counter[tuple[int, int]] = Counter()
        for part in self.parts:
            sizes[part.tensor, part.kind] += self.numel(part)
        load: Counter[int] = Counter()
        out = {}
        for key, size in sorted(sizes.items(), key=lambda item: -item[1]):
            out[key] = min(self.routes[key[1]].holders, key=load.__getitem__)
            load[out[key]] += size
        return out

    @cached_property
    def digest(self) -> str:
        """Equal on all ranks exactly if they have the same plan."""
        text = repr((self.grid, self.kinds, self.tensors, self.parts))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _make_parts(self) -> Iterator[SyncPart]:
        atoms = [list(self._atoms(tensor)) for tensor in range(len(self.tensors))]  # as large as they can be
        numbers = {
            kind: n for n, kind in enumerate(dict.fromkeys(kind for of_tensor in atoms for *_, kind in of_tensor))
        }
        self.kinds = list(numbers)
        self.routes = [Routes(kind, self.grid) for kind in self.kinds]
        widths = [tensor.numel // tensor.length for tensor in self.tensors]
        total = [0] * len(self.kinds)
        for width, of_tensor in zip(widths, atoms, strict=True):
            for start, stop, kind in of_tensor:
                total[numbers[kind]] += width * (stop - start)
        limits = [  # elements that a part of each kind may have
            min(LARGEST_SHARE * size * routes.smallest_load() or math.inf, self._largest_part)
            for size, routes in zip(total, self.routes, strict=True)
        ]
        # Parts of equal size take turns among themselves, beginning where another size has stopped.
        following: dict[tuple[int, int], int] = {}
        begun = [0] * len(self.kinds)
        for tensor, (width, of_tensor) in enumerate(zip(widths, atoms, strict=True)):
            # The first piece of every atom, then the second: neighbours in the order have different senders and readers.
            pieces = []
            for start, stop, kind in of_tensor:
                number, length = numbers[kind], stop - start
                count = min(math.ceil(width * length / max(limits[number], 1)), length)
                cuts = [start + length * i // count for i in range(count + 1)]
                pieces += [(i, *span, number, width * length) for i, span in enumerate(itertools.pairwise(cuts))]
            pieces.sort(key=operator.itemgetter(0))
            for _, start, stop, number, size in pieces:
                turn = following.get((number, size), begun[number])
                following[number, size] = turn + 1
                begun[number] = max(begun[number], turn + 1)
                yield SyncPart(tensor, start, stop, number, turn % self.routes[number].period)

    def _side_by_side(self, parts: list[SyncPart]) -> list[SyncPart]:
        """The parts of a module, so that all expert-parallel ranks are equally far at any time, each in its order.

        They send side by side, as an engine keeps all experts of a layer anyway.
        """
        ranks = [self.kinds[part.kind].ep_rank for part in parts]
        if len(set(ranks)) == 1:
            return parts
        sent: Counter[int | None] = Counter()
        middles = []
        for rank, part in zip(ranks, parts, strict=True):
            size = self.numel(part)
            middles.append(sent[rank] + size / 2)
            sent[rank] += size
        shares = [middle / sent[rank] for rank, middle in zip(ranks, middles, strict=True)]
        return [parts[i] for i in sorted(range(len(parts)), key=shares.__getitem__)]

    def _atoms(self, tensor: int) -> Iterator[tuple[int, int, PartKind]]:
        parameter = self.parameters[self.owner[tensor]]
        index = tensor - self.first[tensor]
        held = tuple(tuple((p.start, p.stop) for p in pieces if p.tensor == index) for pieces in parameter.pieces)
        for start, stop, holders, readers in _intervals(held, self.spans[self.tensors[tensor].name]):
            yield start, stop, PartKind(parameter.stages, parameter.ep_rank, holders, readers)


@functools.lru_cache(maxsize=65536)
def _intervals(
    held: tuple[tuple[Interval, ...], ...], read: tuple[Interval, ...]
) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """(start, stop, holders, readers): the largest intervals of which each rank has, or reads, all or nothing."""
    borders = sorted({border for span in (*read, *(span for spans in held for span in spans)) for border in span})
    out = []
    for start, stop in itertools.pairwise(borders):
        holders = tuple(rank for rank, spans in enumerate(held) if any(low <= start < high for low, high in spans))
        readers = tuple(rank for rank, (low, high) in enumerate(read) if low <= start < high)
        out.append((start, stop, holders, readers))
    return out


# -- Rounds: which parts travel together, and the memory that this takes -----------------------------------------------
# Four rounds are posted or loaded at a time: one is loaded, one is posted within the nodes, two over the network. Loading
# overlaps with messages. What else overlaps depends on the backend: gloo sends all posted messages side by side, and NCCL
# runs a rank's messages one after the other, in the order in which they were posted (`point_to_point` of exchange.py).

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
            routes = [r for r, kind in zip(self._plan.routes, self._plan.kinds, strict=True) if kind.stages[0] == stage]
            holders = np.isin(np.arange(shape[0]), [rank for route in routes for rank in route.holders])
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
    """A sync in as few rounds as fit `budget` elements on every rank, but in enough of them to overlap.

    Counted are the message buffers and a round of whole tensors that the engine loads from. (A module larger than a round
    grows over several; an engine keeps one, whatever the budget.)
    """
    plan = SyncPlan(parameters, spans, grid, max(1, budget // PARTS_PER_BUDGET))
    counter = TrafficCounter(plan)
    stages = [counter.sizes[parts.start : parts.stop] for parts in plan.stages.values()]
    limit = min(budget, max(SMALLEST_ROUND, int(counter.sizes.sum()) // FEWEST_ROUNDS))
    per_stage = max(math.ceil(sizes.sum() / limit) for sizes in stages)
    while True:
        rounds = Rounds(plan, per_stage)
        traffic = counter.count(rounds)
        needed = max(sizes.sum() for sizes in stages) / per_stage + traffic.buffers().max()
        if needed <= budget or per_stage >= max(map(len, stages)):
            return plan, rounds, traffic
        per_stage = max(math.ceil(per_stage * needed / budget), per_stage * 10 // 9 + 1)


def _cut(sizes: Sequence[int], parts: range, count: int) -> list[range]:
    """Consecutive parts as `count` ranges of about the same number of elements."""
    ends = np.cumsum(sizes)
    shares = np.arange(1, count) * (ends[-1] / count)
    borders = [0, *np.searchsorted(ends, shares, side="left").tolist(), len(parts)]
    return [range(parts.start + low, parts.start + high) for low, high in itertools.pairwise(borders)]
