"""The plan of a weight sync: which rank sends which part of which tensor to whom. Pure arithmetic, the same on every rank.

A tensor is cut into parts, so that all of a part has the same holders (training ranks with a copy) and the same readers
(ranks of the engines). For every part and every node:
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
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.sync.tensors import EngineSpans, Interval, SyncParameter, SyncTensor

# -- The order in which a sync sends: which modules follow each other, which streams travel side by side, which stage be
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

_P = TypeVar("_P")


def in_sync_order(parameters: Sequence[SyncParameter]) -> list[SyncParameter]:
    """Stage by stage, and each stage module by module.

    A module (attention input with its bias, all experts of a layer) is never interrupted: an engine keeps what it has of
    a module until all of it has arrived.
    """
    modules: dict[tuple[int, str], list[SyncParameter]] = {}
    for parameter in parameters:
        modules.setdefault((parameter.stage, module_of(parameter.name)), []).append(parameter)
    by_stage = sorted(modules.items(), key=lambda item: item[0][0])
    return [parameter for _, module in by_stage for parameter in module]


def first_stage(rank: int, stages: Sequence[int], grid: Grid) -> int:
    """Index in `stages` of the one that a rank receives first: the one after its own. This is the number of its lane."""
    size = grid.ranks_per_node if grid.num_nodes > 1 else grid.rollout_tp
    return bisect.bisect_right(stages, grid.stage(rank - rank % size)) % len(stages)


def side_by_side(parts: list[_P], stream_of: Callable[[_P], Hashable], numel: Callable[[_P], int]) -> list[_P]:
    """Several streams of parts as one, each in its order, so that all are equally far at any time."""
    streams = [stream_of(part) for part in parts]
    if len(set(streams)) == 1:
        return parts
    sent: Counter[Hashable] = Counter()
    middles = []
    for stream, part in zip(streams, parts, strict=True):
        size = numel(part)
        middles.append(sent[stream] + size / 2)
        sent[stream] += size
    shares = [middle / sent[stream] for stream, middle in zip(streams, middles, strict=True)]
    return [parts[i] for i in sorted(range(len(parts)), key=shares.__getitem__)]


def module_of(name: str) -> str:
    """The module of a parameter, as an engine loads it. All experts of a layer are one."""
    return name.split(".experts.")[0] if ".experts." in name else name.rpartition(".")[0]


NETWORK, NODE = 0, 1  # the two phases of a transfer
# No part is larger than this share of what one sender sends on average: the rest of a rotation is then small.
LARGEST_SHARE = 1 / 16
LONGEST_ROTATION = 4096  # turns; more only if the sizes of the world have many different prime factors


class PartKind(NamedTuple):
    """What parts have in common that travel alike. `holders` are tensor-parallel ranks of the training layout."""

    stage: int
    ep_rank: int | None
    holders: tuple[int, ...]
    readers: tuple[int, ...]  # tensor-parallel ranks of an engine


class Atom(NamedTuple):
    """A part as large as it can be."""

    start: int
    stop: int
    kind: PartKind


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

    @property
    def span(self) -> Interval:
        return self.start, self.stop


@dataclass(frozen=True)
class _Task:
    """One node's share of a kind's transfers: its readers that hold nothing, and its ranks that hold the part."""

    readers: list[int]
    holders: list[int]


class Routes:
    """The transfers of one kind in each turn of its rotation."""

    def __init__(self, kind: PartKind, grid: Grid) -> None:
        self.holders = sorted(r for tp in kind.holders for r in grid.ranks(tp, kind.stage, kind.ep_rank))
        self._tasks = list(_tasks(kind, grid, self.holders))
        local = [len(task.holders) or len(task.readers) for task in self._tasks]
        self.period = min(math.lcm(len(self.holders), *local), LONGEST_ROTATION)
        self._turns: dict[int, list[Transfer]] = {}

    def transfers(self, turn: int) -> list[Transfer]:
        if turn not in self._turns:
            self._turns[turn] = list(self._make(turn))
        return self._turns[turn]

    def _make(self, turn: int) -> Iterator[Transfer]:
        for number, task in enumerate(self._tasks):
            if task.holders:
                for index, reader in enumerate(task.readers):
                    yield Transfer(NODE, task.holders[(turn + index) % len(task.holders)], reader)
                continue
            first = task.readers[(turn // len(self.holders) + turn) % len(task.readers)]
            yield Transfer(NETWORK, self.holders[(turn + number) % len(self.holders)], first)
            yield from (Transfer(NODE, first, reader) for reader in task.readers if reader != first)

    def smallest_load(self) -> float:
        """How often a rank sends a part, on average over the ranks that can: the least of all groups of such ranks."""
        network = sum(not task.holders for task in self._tasks)
        shares = [network / len(self.holders)] if network else []
        for task in self._tasks:
            if task.holders:
                shares.append(len(task.readers) / len(task.holders))
            elif len(task.readers) > 1:
                shares.append((len(task.readers) - 1) / len(task.readers))
        return min(shares, default=0.0)


def _tasks(kind: PartKind, grid: Grid, holders: list[int]) -> Iterator[_Task]:
    holding, readers = set(holders), set(kind.readers)
    for node in range(grid.num_nodes):
        ranks = range(node * grid.ranks_per_node, min((node + 1) * grid.ranks_per_node, grid.world_size))
        waiting = [r for r in ranks if grid.engine_rank(r) in readers and r not in holding]
        if waiting:
            yield _Task(waiting, [r for r in ranks if r in holding])


class SyncPlan:
    """`tensors` are in the order of the sync; `parts` cut all of them completely.

    A lane's ranks receive the parts in this order too, but begin with another stage. `lanes` [ranks].
    """

    def __init__(
        self,
        parameters: Sequence[SyncParameter],
        spans: EngineSpans,
        grid: Grid,
        largest_part: int = 1 << 62,
    ) -> None:
        """`largest_part`: elements. Expert-parallel ranks send side by side, as an engine keeps all experts of a layer anyway."""
        self.grid, self.spans, self.largest_part = grid, spans, largest_part
        self.parameters = in_sync_order(parameters)
        self.tensors: list[SyncTensor] = [tensor for p in self.parameters for tensor in p.tensors]
        self.owner = [index for index, p in enumerate(self.parameters) for _ in p.tensors]  # tensor -> parameter
        ends = itertools.accumulate(len(p.tensors) for p in self.parameters)
        self.first = [end - len(p.tensors) for end, p in zip(ends, self.parameters, strict=True) for _ in p.tensors]
        self.kinds: list[PartKind] = []
        self.routes: list[Routes] = []
        modules = itertools.groupby(self._make_parts(), key=self._module_of)
        self.parts = [p for _, parts in modules for p in side_by_side(list(parts), self._ep_rank_of, self.numel)]
        # Stage -> its parts, which are neighbours
        stages = [self.kinds[part.kind].stage for part in self.parts]
        borders = [0, *(i for i in range(1, len(stages)) if stages[i] != stages[i - 1]), len(stages)]
        self.stages = {stages[low]: range(low, high) for low, high in itertools.pairwise(borders)}
        self.lanes = [first_stage(rank, list(self.stages), grid) for rank in range(grid.world_size)]

    def numel(self, part: SyncPart) -> int:
        return self.tensors[part.tensor].numel_of(part.span)

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

    def _make_parts(self) -> list[SyncPart]:
        by_tensor = [list(self._atoms(tensor)) for tensor in range(len(self.tensors))]
        numbers = {kind: n for n, kind in enumerate(dict.fromkeys(a.kind for atoms in by_tensor for a in atoms))}
        self.kinds = list(numbers)
        self.routes = [Routes(kind, self.grid) for kind in self.kinds]
        widths = [tensor.numel // tensor.length for tensor in self.tensors]
        limits = self._limits(widths, by_tensor, numbers)
        rotation = _Rotation(len(self.kinds))
        parts: list[SyncPart] = []
        for number, (width, atoms) in enumerate(zip(widths, by_tensor, strict=True)):
            # The first piece of every atom, then the second: neighbours in the order have different senders and readers.
            pieces = []
            for atom in atoms:
                length, kind = atom.stop - atom.start, numbers[atom.kind]
                count = min(math.ceil(width * length / max(limits[kind], 1)), length)
                cuts = [atom.start + length * i // count for i in range(count + 1)]
                pieces += [(i, *span, kind, width * length) for i, span in enumerate(itertools.pairwise(cuts))]
            pieces.sort(key=operator.itemgetter(0))
            for _, start, stop, kind, size in pieces:
                parts.append(SyncPart(number, start, stop, kind, rotation.turn(kind, size) % self.routes[kind].period))
        return parts

    def _module_of(self, part: SyncPart) -> tuple[int, str]:
        parameter = self.parameters[self.owner[part.tensor]]
        return parameter.stage, module_of(parameter.name)

    def _ep_rank_of(self, part: SyncPart) -> int | None:
        return self.kinds[part.kind].ep_rank

    def _limits(self, widths: list[int], by_tensor: list[list[Atom]], numbers: dict[PartKind, int]) -> list[float]:
        """Elements that a part of each kind may have."""
        total = [0] * len(self.kinds)
        for width, atoms in zip(widths, by_tensor, strict=True):
            for atom in atoms:
                total[numbers[atom.kind]] += width * (atom.stop - atom.start)
        return [
            min(LARGEST_SHARE * size * routes.smallest_load() or math.inf, self.largest_part)
            for size, routes in zip(total, self.routes, strict=True)
        ]

    def _atoms(self, tensor: int) -> Iterator[Atom]:
        parameter = self.parameters[self.owner[tensor]]
        index = tensor - self.first[tensor]
        held = tuple(tuple((p.start, p.stop) for p in pieces if p.tensor == index) for pieces in parameter.pieces)
        for start, stop, holders, readers in _intervals(held, self.spans[self.tensors[tensor].name]):
            yield Atom(start, stop, PartKind(parameter.stage, parameter.ep_rank, holders, readers))


class _Rotation:
    """Deals out turns. Parts of equal size take turns among themselves, beginning where another size has stopped."""

    def __init__(self, num_kinds: int) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._begun = [0] * num_kinds

    def turn(self, kind: int, size: int) -> int:
        turn = self._next.get((kind, size), self._begun[kind])
        self._next[kind, size] = turn + 1
        self._begun[kind] = max(self._begun[kind], turn + 1)
        return turn


@functools.lru_cache(maxsize=65536)
def _intervals(
    held: tuple[tuple[Interval, ...], ...], read: tuple[Interval, ...]
) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """(start, stop, holders, readers): the largest intervals of which each rank has, or reads, all or nothing."""
    borders = sorted({border for span in (*read, *(span for spans in held for span in spans)) for border in span})
    out = []
    for start, stop in zip(borders, borders[1:], strict=False):
        holders = tuple(rank for rank, spans in enumerate(held) if any(low <= start < high for low, high in spans))
        readers = tuple(rank for rank, (low, high) in enumerate(read) if low <= start < high)
        out.append((start, stop, holders, readers))
    return out
