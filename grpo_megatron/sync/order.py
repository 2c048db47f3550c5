"""The order in which a sync sends: which modules follow each other, which streams travel side by side, which stage begins.

With pipeline stages, all ranks of a stage send at the same time as those of every other stage, to other receivers:

    slot                  0         1         2         3
    ranks of stage 0      stage 1   stage 2   stage 3   stage 0
    ranks of stage 1      stage 2   stage 3   stage 0   stage 1    receive
    ranks of stage 2      stage 3   stage 0   stage 1   stage 2
    ranks of stage 3      stage 0   stage 1   stage 2   stage 3

So each stage sends to as many ranks as it has itself, and an engine keeps no more than one incomplete module. In the last
slot everything comes from the own stage, and mostly from the own node. Ranks that pass parts on to each other have the
same order, that of a **lane**: all of a node, or of an engine where there is a single node.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from grpo_megatron.parallel.grid import Grid
from grpo_megatron.sync.tensors import SyncParameter

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
