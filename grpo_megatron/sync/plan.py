"""The plan of a weight sync: which rank sends which slice of which tensor to whom, and when. The same on every rank.

SyncPlan cuts tensors into slices and routes them. Rounds and `plan_rounds` decide which slices travel together.
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

# -- The tensors of a model, and the ranks that have and need them. Plain numbers --------------------------------------

Interval = tuple[int, int]  # [start, stop) of a tensor's axis


@dataclass(frozen=True)
class SyncTensor:
    """A complete Hugging Face tensor. One of more than two dimensions (a convolution) is never cut."""

    name: str
    shape: tuple[int, ...]
    axis: int  # the dimension along which both layouts cut it

    @property
    def length(self) -> int:
        return self.shape[self.axis]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Shard(NamedTuple):
    """`[start, stop)` of a tensor's axis, at `local_start` of the parameter that has it, along the same dimension."""

    tensor: int  # index in SyncParameter.tensors; in a RankPlan, in SyncPlan.tensors
    start: int
    stop: int
    local_start: int


@dataclass(frozen=True)
class SyncParameter:
    """A parameter of the training model, and the tensors in it.

    `shards[tp_rank]` are those of a tensor-parallel rank, in the parameter's order. `stages` and `ep_rank` (None: not an
    expert's) say on which ranks the parameter exists: in one stage, or a tied embedding in the first and, as its head, in
    the last.
    """

    name: str
    tensors: tuple[SyncTensor, ...]
    stages: tuple[int, ...]
    ep_rank: int | None
    shards: tuple[tuple[Shard, ...], ...]

    @property
    def stage(self) -> int:
        """The stage with which the parameter is sent."""
        return self.stages[0]

    @property
    def module(self) -> tuple[int, str]:
        """Stage and name of the parameter's module, as an engine loads it. All experts of a layer are one."""
        name = self.name
        return self.stage, name.split(".experts.")[0] if ".experts." in name else name.rpartition(".")[0]


# Tensor name -> per tensor-parallel rank of the engine the interval that it reads. An empty one: nothing.
EngineSpans = Mapping[str, tuple[Interval, ...]]


@dataclass(frozen=True)
class EngineTensors:
    """The tensors of a complete weight stream, and the interval of each that each engine rank reads.

    An engine that reads complete tensors has the span [0, length) on each rank. `groups` names, for each tensor that is
    loaded and digested together with others, its group: one linear layer of all experts (digest.py). `kept`: tensors of which
    an engine rank reads everything and keeps several intervals, which it has one after the other.
    """

    tensors: Mapping[str, SyncTensor]
    spans: EngineSpans
    groups: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, tuple[tuple[Interval, ...], ...]] = field(default_factory=dict)  # per engine rank

    def intervals(self, name: str, rank: int) -> tuple[Interval, ...]:
        """Returns what an engine rank has of a tensor after loading."""
        return self.kept[name][rank] if name in self.kept else (self.spans[name][rank],)

    def units(self, rank: int) -> dict[str, list[str]]:
        """Return what a rank loads, and digests, in one call: name of the group or tensor -> the tensors that it reads."""
        units: dict[str, list[str]] = {}
        for name, spans in self.spans.items():
            if spans[rank][0] < spans[rank][1]:
                units.setdefault(self.groups.get(name, name), []).append(name)
        return units


def shortened(problems: Sequence[str]) -> str:
    """Join a heading and at most 10 items in one line."""
    if len(problems) > 11:
        problems = [*problems[:11], f"and {len(problems) - 11} more"]
    return ", ".join(problems)


# -- Routes ------------------------------------------------------------------------------------------------------------

NETWORK, NODE = PHASES = 0, 1  # of a transfer
RELAY = 2  # a transfer over the network from a rank that has received the slice over the network
# No slice is larger than this share of what one sender sends on average: the rest of a rotation is then small.
LARGEST_SHARE = 1 / 16
LONGEST_ROTATION = 4096  # more only if the sizes of the world have many different prime factors


class SliceKind(NamedTuple):
    """The common properties of slices that travel alike. `holders` are tensor-parallel ranks of the training layout."""

    stages: tuple[int, ...]  # that have the slices; they are sent with the first
    ep_rank: int | None
    holders: tuple[int, ...]
    readers: tuple[int, ...]  # tensor-parallel ranks of an engine


class Transfer(NamedTuple):
    """One way of a slice, from rank `source` to rank `target`. `phase`: NETWORK, RELAY or NODE."""

    phase: int
    source: int
    target: int


class Slice(NamedTuple):
    """`[start, stop)` of a tensor's axis, with the same holders and the same readers everywhere."""

    tensor: int  # index in SyncPlan.tensors
    start: int
    stop: int
    kind: int  # index in SyncPlan.kinds
    rotation: int  # its place in the rotation of senders and receivers


class Routes:
    """The transfers of one kind of slices. For every slice and every node:

    1. A reader that has the slice takes it from its own memory.
    2. If a rank of the node has it, the other readers get it from such a rank.
    3. If none does, one reader of the node receives it over the network, once, and passes it on within the node.

    So no rank receives anything twice, and no byte enters a node twice. Senders, receivers and relays rotate from slice to
    slice, with a period. So the plan's size does not grow with ranks x tensors.

    Between two roles a slice leaves the ranks that train once, for the first node, and every node relays it to the next one.
    """

    def __init__(self, kind: SliceKind, grid: Grid) -> None:
        self.holders = sorted(r for s in kind.stages for tp in kind.holders for r in grid.ranks(tp, s, kind.ep_rank))
        holding, reading = set(self.holders), set(kind.readers)
        self._nodes: list[tuple[list[int], list[int]]] = []  # of each: readers without the slice, ranks that have it
        for ranks in grid.nodes():
            readers = [r for r in ranks if grid.engine_rank(r) in reading and r not in holding]
            if readers:
                self._nodes.append((readers, [r for r in ranks if r in holding]))
        self._has_relays = grid.num_rollout_ranks > 0
        local = [len(holders or readers) for readers, holders in self._nodes]
        self.period = min(math.lcm(len(self.holders), *local), LONGEST_ROTATION)
        self._transfers: dict[int, list[Transfer]] = {}

    def transfers(self, rotation: int) -> list[Transfer]:
        if rotation not in self._transfers:
            self._transfers[rotation] = list(self._make(rotation))
        return self._transfers[rotation]

    def _make(self, rotation: int) -> Iterator[Transfer]:
        entry: int | None = None  # where a slice is in the node before
        for number, (readers, holders) in enumerate(self._nodes):
            if holders:
                for index, reader in enumerate(readers):
                    yield Transfer(NODE, holders[(rotation + index) % len(holders)], reader)
                continue
            first = readers[rotation % len(readers)]
            if entry is None:
                yield Transfer(NETWORK, self.holders[(rotation + number) % len(self.holders)], first)
            else:
                yield Transfer(RELAY, entry, first)
            entry = first if self._has_relays else None
            yield from (Transfer(NODE, first, reader) for reader in readers if reader != first)

    def smallest_load(self) -> float:
        """Count how often a rank sends a slice, on average over the ranks that can: the least of all groups of such ranks."""
        network = sum(not holders for _, holders in self._nodes)
        shares = [(1 if self._has_relays else network) / len(self.holders)] if network else []
        for readers, holders in self._nodes:
            if holders:
                shares.append(len(readers) / len(holders))
            elif len(readers) > 1:
                shares.append((len(readers) - 1) / len(readers))
        return min(shares, default=0.0)


# -- The plan ----------------------------------------------------------------------------------------------------------
# With pipeline stages, all ranks of a stage send at the same time as those of every other stage, to other receivers:
#
# time                  0         1         2         3
# ranks of stage 0      stage 1   stage 2   stage 3   stage 0
# ranks of stage 1      stage 2   stage 3   stage 0   stage 1    receive
# ranks of stage 2      stage 3   stage 0   stage 1   stage 2
# ranks of stage 3      stage 0   stage 1   stage 2   stage 3
#
# So each stage sends to as many ranks as it has itself, and an engine keeps no more than one incomplete module. At the end
# everything comes from the rank's own stage, and mostly from its own node. Ranks that pass slices on to each other have the
# same order: all of a node, of an engine where there is a single node, or of a role. Their *offset* is the stage that they
# begin with.


class SyncPlan:
    """`tensors` are in the order of the sync; `slices` cut all of them completely.

    Every rank receives the slices in this order, but begins with the stage of its offset. `offsets` [ranks].
    """

    def __init__(self, parameters: Sequence[SyncParameter], spans: EngineSpans, grid: Grid, largest_slice: int) -> None:
        """`largest_slice`: elements."""
        self.grid, self.spans, self._largest_slice = grid, spans, largest_slice
        # Stage by stage, and module by module (attention input with its bias, all experts of a layer): an engine keeps
        # what it has of a module until all of it has arrived.
        first: dict[tuple[int, str], int] = {}
        for number, parameter in enumerate(parameters):
            first.setdefault(parameter.module, number)
        self.parameters = sorted(parameters, key=lambda parameter: (parameter.stage, first[parameter.module]))
        self.tensors: list[SyncTensor] = [tensor for p in self.parameters for tensor in p.tensors]
        self.owner = [index for index, p in enumerate(self.parameters) for _ in p.tensors]  # tensor -> parameter
        ends = itertools.accumulate(len(p.tensors) for p in self.parameters)
        self.first = [end - len(p.tensors) for end, p in zip(ends, self.parameters, strict=True) for _ in p.tensors]
        self.kinds: list[SliceKind] = []
        self.routes: list[Routes] = []
        modules = itertools.groupby(self._cut_tensors(), key=lambda s: self.parameters[self.owner[s.tensor]].module)
        self.slices = [slice_ for _, slices in modules for slice_ in self._interleaved(list(slices))]
        stages = [self.kinds[slice_.kind].stages[0] for slice_ in self.slices]
        borders = [0, *(i for i in range(1, len(stages)) if stages[i] != stages[i - 1]), len(stages)]
        self.stages = {stages[low]: range(low, high) for low, high in itertools.pairwise(borders)}  # -> its slices
        self.offsets = [_offset(rank, list(self.stages), grid) for rank in range(grid.world_size)]

    def numel(self, slice_: Slice) -> int:
        tensor = self.tensors[slice_.tensor]
        return tensor.numel // tensor.length * (slice_.stop - slice_.start)

    @cached_property
    def digest(self) -> str:
        """Equal on all ranks exactly if they have the same plan."""
        text = repr((self.grid, self.kinds, self.tensors, self.slices))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _cut_tensors(self) -> Iterator[Slice]:
        intervals = [list(self._intervals(tensor)) for tensor in range(len(self.tensors))]
        kinds = dict.fromkeys(kind for of_tensor in intervals for *_, kind in of_tensor)
        numbers = {kind: number for number, kind in enumerate(kinds)}
        self.kinds = list(numbers)
        self.routes = [Routes(kind, self.grid) for kind in self.kinds]
        widths = [tensor.numel // tensor.length for tensor in self.tensors]
        total = [0] * len(self.kinds)
        for width, of_tensor in zip(widths, intervals, strict=True):
            for start, stop, kind in of_tensor:
                total[numbers[kind]] += width * (stop - start)
        limits = [  # elements that a slice of each kind may have
            min(LARGEST_SHARE * size * routes.smallest_load() or math.inf, self._largest_slice)
            for size, routes in zip(total, self.routes, strict=True)
        ]
        # Slices of equal size rotate among themselves, beginning where another size has stopped.
        following: dict[tuple[int, int], int] = {}
        begun = [0] * len(self.kinds)
        for tensor, (width, of_tensor) in enumerate(zip(widths, intervals, strict=True)):
            # The first slice of every interval, then the second: neighbours have different senders and readers.
            cuts = []
            for start, stop, kind in of_tensor:
                number, length = numbers[kind], stop - start
                count = min(math.ceil(width * length / max(limits[number], 1)), length)
                borders = [start + length * i // count for i in range(count + 1)]
                cuts += [(i, *span, number, width * length) for i, span in enumerate(itertools.pairwise(borders))]
            cuts.sort(key=operator.itemgetter(0))
            for _, start, stop, number, size in cuts:
                rotation = following.get((number, size), begun[number])
                following[number, size] = rotation + 1
                begun[number] = max(begun[number], rotation + 1)
                yield Slice(tensor, start, stop, number, rotation % self.routes[number].period)

    def _interleaved(self, slices: list[Slice]) -> list[Slice]:
        """Order the slices of a module so that all expert-parallel ranks, which send side by side, progress equally.

        An engine keeps all experts of a layer anyway.
        """
        ranks = [self.kinds[slice_.kind].ep_rank for slice_ in slices]
        if len(set(ranks)) == 1:
            return slices
        sent: Counter[int | None] = Counter()
        middles = []
        for rank, slice_ in zip(ranks, slices, strict=True):
            size = self.numel(slice_)
            middles.append(sent[rank] + size / 2)
            sent[rank] += size
        shares = [middle / sent[rank] for rank, middle in zip(ranks, middles, strict=True)]
        return [slices[i] for i in sorted(range(len(slices)), key=shares.__getitem__)]

    def _intervals(self, tensor: int) -> Iterator[tuple[int, int, SliceKind]]:
        parameter = self.parameters[self.owner[tensor]]
        index = tensor - self.first[tensor]
        has = tuple(tuple((s.start, s.stop) for s in shards if s.tensor == index) for shards in parameter.shards)
        for start, stop, holders, readers in _largest_intervals(has, self.spans[self.tensors[tensor].name]):
            yield start, stop, SliceKind(parameter.stages, parameter.ep_rank, holders, readers)


@functools.lru_cache(maxsize=65536)
def _largest_intervals(
    has: tuple[tuple[Interval, ...], ...], reads: tuple[Interval, ...]
) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """(start, stop, holders, readers): the largest intervals of which each rank has, or reads, all or nothing."""
    borders = sorted({border for span in (*reads, *(span for spans in has for span in spans)) for border in span})
    out = []
    for start, stop in itertools.pairwise(borders):
        holders = tuple(rank for rank, spans in enumerate(has) if any(low <= start < high for low, high in spans))
        readers = tuple(rank for rank, (low, high) in enumerate(reads) if low <= start < high)
        out.append((start, stop, holders, readers))
    return out


def _offset(rank: int, stages: Sequence[int], grid: Grid) -> int:
    """Index in `stages` of the stage that a rank receives first: the one after its own."""
    if grid.num_rollout_ranks:  # ranks of an engine alone have no stage, and relay to each other
        return 0
    size = grid.ranks_per_node if grid.num_nodes > 1 else grid.rollout_tp
    return bisect.bisect_right(stages, grid.stage(rank - rank % size)) % len(stages)


# -- Rounds: which slices travel together, and the memory that this takes ----------------------------------------------
# Four rounds are posted or loaded at a time: one is loaded, one is posted within the nodes, two over the network. Loading
# overlaps with messages. What else overlaps depends on the backend: gloo sends all posted messages side by side, and NCCL
# runs a rank's messages one after the other, in the order in which they were posted (`point_to_point` of exchange.py). So a
# node relays a round together with the receives of the round that is AHEAD of it, in one group of operations.

AHEAD = 2  # rounds over the network
# Rounds whose messages are in memory at the same time, by (phase, is receiver). What is relayed is received in phase NETWORK
DEPTH = {(NETWORK, False): AHEAD, (RELAY, False): AHEAD, (NETWORK, True): AHEAD + 2, (NODE, False): 2, (NODE, True): 2}
SLICES_PER_BUDGET = 64  # no slice is larger than this fraction of the budget, so that rounds fill it evenly
FEWEST_ROUNDS = 32  # fewer would not overlap: the first and the last are alone
SMALLEST_ROUND = 1 << 20  # elements: small models have few rounds


@dataclass(frozen=True)
class Traffic:
    """Elements per phase, rank and round: `sent[phase][rank, round]`. What is relayed is received in phase NETWORK."""

    sent: dict[int, np.ndarray]
    received: dict[int, np.ndarray]

    def buffers(self) -> np.ndarray:
        """Elements of all message buffers of each rank, [ranks]."""
        total = np.zeros(len(self.sent[NODE]))
        for (phase, is_receiver), depth in DEPTH.items():
            total += depth * (self.received if is_receiver else self.sent)[phase].max(axis=1, initial=0)
        return total


class Rounds:
    """The slices of each round. Every stage has as many rounds, so that all ranks change to the next stage together."""

    def __init__(self, plan: SyncPlan, per_stage: int) -> None:
        """`slices[stage]`: numbers of slices, by round. Stages without a slice are left out, as in the plan's offsets."""
        self.per_stage, self._stages = per_stage, list(plan.stages)
        self.slices = [_cut([plan.numel(plan.slices[i]) for i in r], r, per_stage) for r in plan.stages.values()]

    @property
    def num_offsets(self) -> int:
        return len(self._stages)

    @property
    def count(self) -> int:
        return self.per_stage * len(self._stages)

    def slices_of(self, offset: int, number: int) -> range:
        """Return the numbers of the slices that ranks with this offset receive in a round."""
        return self.slices[self._index(offset, number)][number % self.per_stage]

    def stage(self, offset: int, number: int) -> int:
        """Return the pipeline stage of these slices."""
        return self._stages[self._index(offset, number)]

    def numbers(self, offset: int, index: int) -> slice:
        """Return the rounds in which ranks with this offset receive the stage with this index."""
        first = (index - offset) % len(self._stages) * self.per_stage
        return slice(first, first + self.per_stage)

    def _index(self, offset: int, number: int) -> int:
        return (offset + number // self.per_stage) % len(self._stages)


class TrafficCounter:
    """Elements that every rank sends and receives, for any division of a plan's slices into rounds."""

    def __init__(self, plan: SyncPlan) -> None:
        keys = {key: i for i, key in enumerate(dict.fromkeys((s.kind, s.rotation) for s in plan.slices))}
        self._plan, self._offsets = plan, np.array(plan.offsets)
        self._key_of = np.array([keys[s.kind, s.rotation] for s in plan.slices])
        self.sizes = np.array([plan.numel(s) for s in plan.slices], dtype=np.float64)  # exact below 2**53
        shape = (len(keys), plan.grid.world_size)
        self._received = {phase: np.zeros(shape, np.uint16) for phase in PHASES}  # slices per key and rank
        self._passed_on = {phase: np.zeros(shape, np.uint16) for phase in (RELAY, NODE)}  # to ranks of the same offset
        self._sent_over = np.zeros((len(plan.stages), *shape), np.uint16)  # over the network, to each offset
        for (kind, rotation), row in keys.items():
            for phase, source, target in plan.routes[kind].transfers(rotation):
                self._received[NODE if phase == NODE else NETWORK][row, target] += 1
                if phase != NETWORK:
                    self._passed_on[phase][row, source] += 1
                else:
                    self._sent_over[plan.offsets[target], row, source] += 1

    def count(self, rounds: Rounds) -> Traffic:
        shape = (self._plan.grid.world_size, rounds.count)
        sent, received = ({phase: np.zeros(shape) for phase in phases} for phases in ((*PHASES, RELAY), PHASES))
        for index, stage in enumerate(self._plan.stages):
            keys, elements = self._elements(rounds.slices[index])
            routes = [r for r, kind in zip(self._plan.routes, self._plan.kinds, strict=True) if kind.stages[0] == stage]
            holders = np.isin(np.arange(shape[0]), [rank for route in routes for rank in route.holders])
            for offset in range(rounds.num_offsets):
                members, numbers = self._offsets == offset, rounds.numbers(offset, index)
                for phase in PHASES:
                    received[phase][members, numbers] = _total(elements, self._received[phase][keys], members)
                for phase, counts in self._passed_on.items():
                    sent[phase][members, numbers] = _total(elements, counts[keys], members)
                sent[NETWORK][holders, numbers] += _total(elements, self._sent_over[offset, keys], holders)
        return Traffic(sent, received)

    def _elements(self, rounds: list[range]) -> tuple[slice, np.ndarray]:
        """The keys of a stage, and the elements of each that travel in each of its rounds, [rounds, keys]."""
        slices = slice(rounds[0].start, rounds[-1].stop)
        keys = self._key_of[slices]
        first, last = keys.min(), keys.max() + 1
        numbers = np.repeat(np.arange(len(rounds)), [len(of_round) for of_round in rounds])
        elements = np.zeros((len(rounds), last - first))
        np.add.at(elements, (numbers, keys - first), self.sizes[slices])
        return slice(first, last), elements


def _total(elements: np.ndarray, counts: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """[ranks, rounds] from [rounds, keys] and [keys, all ranks]. In float64, as BLAS multiplies no integers."""
    return (elements @ counts[:, ranks].astype(np.float64)).T


def plan_rounds(
    parameters: Sequence[SyncParameter], spans: EngineSpans, grid: Grid, budget: int
) -> tuple[SyncPlan, Rounds, Traffic]:
    """Plan a sync in as few rounds as fit `budget` elements on every rank, but in enough of them to overlap.

    The message buffers count, and a round of complete tensors that the engine loads from. (A module larger than a round
    grows over several; an engine keeps one, whatever the budget.)
    """
    plan = SyncPlan(parameters, spans, grid, max(1, budget // SLICES_PER_BUDGET))
    counter = TrafficCounter(plan)
    stages = [counter.sizes[slices.start : slices.stop] for slices in plan.stages.values()]
    limit = min(budget, max(SMALLEST_ROUND, int(counter.sizes.sum()) // FEWEST_ROUNDS))
    per_stage = max(math.ceil(sizes.sum() / limit) for sizes in stages)
    while True:
        rounds = Rounds(plan, per_stage)
        traffic = counter.count(rounds)
        needed = max(sizes.sum() for sizes in stages) / per_stage + traffic.buffers().max()
        if needed <= budget or per_stage >= max(map(len, stages)):
            return plan, rounds, traffic
        per_stage = max(math.ceil(per_stage * needed / budget), per_stage * 10 // 9 + 1)


def _cut(sizes: Sequence[int], slices: range, count: int) -> list[range]:
    """Cut consecutive slices into `count` ranges of about the same number of elements."""
    ends = np.cumsum(sizes)
    shares = np.arange(1, count) * (ends[-1] / count)
    borders = [0, *np.searchsorted(ends, shares, side="left").tolist(), len(slices)]
    return [range(slices.start + low, slices.start + high) for low, high in itertools.pairwise(borders)]
