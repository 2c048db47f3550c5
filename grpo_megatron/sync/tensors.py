"""What a sync moves: tensors, and who has and who needs which part of them. Plain numbers.

Both layouts cut a tensor along one dimension, its `axis`, and both along the same one. A part of a tensor is therefore an
interval of that dimension. Positions are in rows (axis 0) or columns (axis 1) of the whole Hugging Face tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # mesh.py imports torch
    from grpo_megatron.parallel.mesh import Grid

Interval = tuple[int, int]  # [start, stop) of a tensor's axis


@dataclass(frozen=True)
class SyncTensor:
    """A whole Hugging Face tensor of one or two dimensions."""

    name: str
    shape: tuple[int, ...]
    axis: int

    @property
    def length(self) -> int:
        return self.shape[self.axis]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def numel_of(self, span: Interval) -> int:
        """Elements of a part."""
        return self.numel // self.length * (span[1] - span[0])


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
    each list it. `stage` and `ep_rank` (None: not an expert's) say on which ranks the parameter exists.
    """

    name: str
    tensors: tuple[SyncTensor, ...]
    stage: int
    ep_rank: int | None
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)


# Tensor name -> per tensor-parallel rank of the engine the part that it reads. An empty span: nothing.
EngineSpans = Mapping[str, tuple[Interval, ...]]


@dataclass(frozen=True)
class EngineTensors:
    """What an engine gets: every tensor of a complete weight stream, and the part of it that each engine rank reads.

    An engine that reads whole tensors has the span [0, length) on each rank.
    """

    tensors: Mapping[str, SyncTensor]
    spans: EngineSpans


@dataclass(frozen=True)
class Share:
    """A part of a tensor that one rank digests for all: `[start, stop)`, kept at `local_start` of its `parameter`.

    The shares of all ranks together are every position of every tensor once. `engine_ranks` read all of this part.
    """

    parameter: str
    tensor: SyncTensor
    start: int
    stop: int
    local_start: int
    engine_ranks: tuple[int, ...]


def shortened(problems: Sequence[str], limit: int = 10) -> str:
    """A list in one line: a heading and at most `limit` items."""
    if len(problems) > limit + 1:
        problems = [*problems[: limit + 1], f"and {len(problems) - limit - 1} more"]
    return ", ".join(problems)


# -- Floor: what every rank and every node must receive in any sync between two layouts. Counted from the layouts alone
# A rank must receive what its engine reads and the rank does not hold; a node, what engines on it read and none of its ranks
# holds. No plan can do with less, and `SyncPlan` needs no more.


@dataclass(frozen=True)
class Floor:
    """Elements: `ranks` [ranks], and `nodes` [nodes], over the node's border."""

    ranks: np.ndarray
    nodes: np.ndarray


def floor_of(parameters: Iterable[SyncParameter], spans: EngineSpans, grid: Grid) -> Floor:
    """Count what every rank and node must receive, in elements."""
    ranks, nodes = np.zeros(grid.world_size, dtype=np.int64), np.zeros(grid.num_nodes, dtype=np.int64)
    known: dict[object, tuple[np.ndarray, np.ndarray]] = {}
    for parameter in parameters:
        for index, tensor in enumerate(parameter.tensors):
            held = tuple(
                tuple((piece.start, piece.stop) for piece in pieces if piece.tensor == index)
                for pieces in parameter.pieces
            )
            key = parameter.stage, parameter.ep_rank, held, spans[tensor.name]
            if key not in known:
                known[key] = _missing(*key, grid)
            width = tensor.numel // tensor.length
            ranks += width * known[key][0]
            nodes += width * known[key][1]
    return Floor(ranks, nodes)


def _missing(
    stage: int, ep_rank: int | None, held: tuple[tuple[Interval, ...], ...], read: tuple[Interval, ...], grid: Grid
) -> tuple[np.ndarray, np.ndarray]:
    """Positions along a tensor's axis that each rank, and each node, must receive."""
    borders = sorted({border for span in (*read, *(span for spans in held for span in spans)) for border in span})
    lengths = np.diff(borders)
    starts = np.array(borders[:-1])
    has, needs = (np.zeros((grid.world_size, len(lengths)), dtype=bool) for _ in range(2))
    for tp_rank, spans in enumerate(held):
        for low, high in spans:
            has[grid.ranks(tp_rank, stage, ep_rank)] |= (low <= starts) & (starts < high)
    for engine_rank, (low, high) in enumerate(read):
        needs[engine_rank :: grid.rollout_tp] = (low <= starts) & (starts < high)
    first_ranks = range(0, grid.world_size, grid.ranks_per_node)
    node_has, node_needs = (np.logical_or.reduceat(side, first_ranks, axis=0) for side in (has, needs))
    return (needs & ~has) @ lengths, (node_needs & ~node_has) @ lengths
