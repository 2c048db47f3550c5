"""Floor: what every rank and every node must receive in any sync between two layouts. Counted from the layouts alone.

A rank must receive what its engine reads and the rank does not hold; a node, what engines on it read and none of its ranks
holds. No plan can do with less, and `SyncPlan` needs no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from grpo_megatron.parallel.grid import Grid
from grpo_megatron.sync.tensors import EngineSpans, Interval, SyncParameter


@dataclass(frozen=True)
class Floor:
    """Elements: `ranks` [ranks], and `nodes` [nodes], over the node's border."""

    ranks: np.ndarray
    nodes: np.ndarray


def floor_of(parameters: Iterable[SyncParameter], spans: EngineSpans, grid: Grid) -> Floor:
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
