"""`tools.benchmarks sync --plan`: plans of large layouts, without running anything, beside what no sync can do without."""

from __future__ import annotations

import functools
import multiprocessing
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of, read_architecture
from grpo_megatron.models.weights.stream import engine_tensors
from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.planning.traffic import planned_sync
from grpo_megatron.sync.digest import share_groups
from grpo_megatron.sync.exchange import RankPlan
from grpo_megatron.sync.plan import NETWORK, EngineSpans, Interval, SyncParameter

ITEMSIZE = 2  # bfloat16
PER_NODE = 8
PRESETS: dict[str, dict[str, Any]] = {
    "llama-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    "qwen3-30b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
    },
    "qwen3-235b": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
    },
}


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
            key = parameter.stages, parameter.ep_rank, held, spans[tensor.name]
            if key not in known:
                known[key] = _missing(*key, grid)
            width = tensor.numel // tensor.length
            ranks += width * known[key][0]
            nodes += width * known[key][1]
    return Floor(ranks, nodes)


def _missing(
    stages: tuple[int, ...],
    ep_rank: int | None,
    held: tuple[tuple[Interval, ...], ...],
    read: tuple[Interval, ...],
    grid: Grid,
) -> tuple[np.ndarray, np.ndarray]:
    """Positions along a tensor's axis that each rank, and each node, must receive."""
    borders = sorted({border for span in (*read, *(span for spans in held for span in spans)) for border in span})
    lengths = np.diff(borders)
    starts = np.array(borders[:-1])
    has, needs = (np.zeros((grid.world_size, len(lengths)), dtype=bool) for _ in range(2))
    for tp_rank, spans in enumerate(held):
        for low, high in spans:
            for stage in stages:
                has[grid.ranks(tp_rank, stage, ep_rank)] |= (low <= starts) & (starts < high)
    for engine_rank, (low, high) in enumerate(read):
        needs[grid.first_drawing + engine_rank :: grid.rollout_tp] = (low <= starts) & (starts < high)
    first_ranks = [ranks.start for ranks in grid.nodes()]
    node_has, node_needs = (np.logical_or.reduceat(side, first_ranks, axis=0) for side in (has, needs))
    return (needs & ~has) @ lengths, (node_needs & ~node_has) @ lengths


def print_plans(folder: Path | None, preset: str | None, bucket_megabytes: int) -> None:
    arch = read_architecture(folder) if folder else architecture_of(PRESETS[str(preset)])
    print(
        f"{arch.family}, {arch.num_parameters() * ITEMSIZE / 1e9:.1f} GB in bfloat16, which the old sync sent to every rank;",
        end=" ",
    )
    print(f"nodes of {PER_NODE}, buffers of {bucket_megabytes} MiB at most\n")
    titles = ("training -> rollout", "GB per rank", "floor", "GB per node", "floor", "sends", "messages", "rounds")
    titles = (*titles, "buffers, MiB", "transfer, s", "planned in, s", "memory, MiB", "tensors", "loads", "digests")
    print("| " + " | ".join(titles) + " |\n|" + " --- |" * len(titles))
    for grid, rollout_ep in layouts(arch):
        with multiprocessing.get_context("fork").Pool(1) as alone:  # so that the peak memory is this plan's
            print(alone.apply(functools.partial(row, arch, grid, rollout_ep, bucket_megabytes)), flush=True)


def layouts(arch: Architecture) -> list[tuple[Grid, int]]:
    """TP8 x PP4, or for experts TP4 x PP8 x EP8, on 64 and 512 ranks; and the engine's expert parallelism."""
    if arch.num_experts:
        return [(Grid(512, 4, 8, 8, rollout_tp, PER_NODE), ep) for rollout_tp, ep in ((4, 1), (8, 1), (8, 8))]
    return [(Grid(world, 8, 4, 1, rollout_tp, PER_NODE), 1) for world in (64, 512) for rollout_tp in (4, 8)]


def row(arch: Architecture, grid: Grid, rollout_ep: int, bucket_megabytes: int) -> str:
    """A line of the table. `sends`: of the busiest rank over the mean of ranks that hold the same, over the network.

    `loads`: calls of weight loaders on engine rank 0, and digests of its memory. `digests`: of rank 0's share of the policy.
    """
    before, begin = peak_memory(), time.perf_counter()
    stages = [len(range(stage, arch.num_layers, grid.pp)) for stage in range(grid.pp)]
    planned = planned_sync(
        arch, grid, stages, itemsize=ITEMSIZE, bucket_megabytes=bucket_megabytes, rollout_ep=rollout_ep
    )
    rank_plan = RankPlan(planned.plan, planned.rounds, 0)
    seconds, memory = time.perf_counter() - begin, peak_memory() - before
    floor = floor_of(planned.plan.parameters, planned.plan.spans, grid)
    received, needed = planned.received / 1e9, floor.ranks * ITEMSIZE / 1e9
    sent = (
        planned.traffic.sent[NETWORK].sum(axis=1).reshape(grid.pp, -1, grid.ep, grid.tp)
    )  # [pp, replicas / ep, ep, tp]
    cells = (
        f"TP{grid.tp} PP{grid.pp} DP{grid.replicas}{f' EP{grid.ep}' * (grid.ep > 1)} -> TP{grid.rollout_tp}"
        f"{f' EP{rollout_ep}' * (rollout_ep > 1)}",
        f"{received.min():.2f} to {received.max():.2f}",
        f"{needed.min():.2f} to {needed.max():.2f}",
        f"{planned.over_borders.max() / 1e9:.1f}",
        f"{floor.nodes.max() * ITEMSIZE / 1e9:.1f}",
        f"{(sent.max(axis=1) / sent.mean(axis=1)).max():.3f}",
        f"{max(planned.operations(rank) for rank in range(0, grid.world_size, grid.world_size // grid.pp)):,}",
        f"{planned.rounds.count:,}",
        f"{planned.traffic.buffers().max() * ITEMSIZE / 2**20:.0f}",
        f"{planned.seconds():.2f}",
        f"{seconds:.1f}",
        f"{memory / 2**20:.0f}",
        f"{len(planned.plan.tensors):,}",
        f"{len(engine_tensors(arch, grid.rollout_tp, reads_shards=True, rollout_ep=rollout_ep).units(0)):,}",
        f"{sum(len(group[0]) for group in share_groups(rank_plan.shares())):,}",
    )
    return "| " + " | ".join(cells) + " |"


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
