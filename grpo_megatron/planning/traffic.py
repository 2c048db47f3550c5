"""BorderTraffic: bytes of one training step that cross the borders of nodes, all nodes together.

    weight sync    exact: the plan of sync/plan.py, every byte into each node once
    gradients      estimated: rings over the data-parallel ranks, those of a node side by side. A ring enters each of its
                   nodes once, with (n - 1) / n of what is reduced (float32) and gathered (the weights' type)
    pipeline       exact for the tokens: hidden states of every token between neighbouring stages on different nodes, in
                   each forward pass, and their gradients in each backward pass. Padding is not counted
    experts        estimated: each token's copies to experts, spread evenly over the ranks of the group, and back
    tensor         estimated: rings over a tensor-parallel group that is on several nodes
    engines        estimated: the same while the engines draw, if one is on several nodes
    samples        estimated: tokens and log-probabilities from an engine to the ranks that train on them, where each rank
                   of a replica is as likely on one node as on another

All tokens are counted at the largest lengths, so all but the first two are upper bounds for shorter responses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_megatron.checks.memory import DTYPE_BYTES, GRADIENT_BYTES, StageParameters
from grpo_megatron.checks.weight_sync import grid_of, planned_for
from grpo_megatron.config import Config
from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.planning.layout import Layout
from grpo_megatron.planning.models import PlannedModels
from grpo_megatron.planning.workload import Workload


@dataclass(frozen=True)
class BorderTraffic:
    """`size`: bytes per step. `is_exact`: counted, not estimated."""

    name: str
    size: float
    is_exact: bool


def border_traffic(config: Config, models: PlannedModels, work: Workload, world_size: int) -> list[BorderTraffic]:
    """What crosses borders, without what does not. Empty on one node."""
    grid = grid_of(config, world_size)
    if grid.num_nodes == 1:
        return []
    layout, tokens = Layout.of(config), work.samples * _length(config)
    hidden = tokens * models.arch.hidden_size * work.itemsize
    policy, _, _ = models.stages(config)
    sync = float(planned_for(config, models.arch, world_size).over_borders.sum()) if config.draws else 0.0
    forward, backward = work.scoring_passes + work.epochs, float(work.epochs)
    repeated = work.epochs if layout.recompute else 0
    all_traffic = [
        BorderTraffic("weight sync", sync, is_exact=config.rollout.sync == "full"),
        BorderTraffic("gradients", work.updates * sum(_gradients(config, grid, policy)), is_exact=False),
        BorderTraffic("pipeline", hidden * _pipeline(config, grid) * (forward + backward), is_exact=True),
        BorderTraffic("experts", hidden * _experts(models, grid) * (forward + backward + repeated), is_exact=False),
        BorderTraffic(
            "tensor", hidden * _tensor(models, grid, grid.tp) * (forward + 2 * backward + repeated), is_exact=False
        ),
        BorderTraffic("engines", hidden * _tensor(models, grid, grid.rollout_tp) * work.draws, is_exact=False),
        BorderTraffic("samples", _samples(config, grid, work), is_exact=False),
    ]
    return [traffic for traffic in all_traffic if traffic.size]


def _length(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _gradients(config: Config, grid: Grid, policy: list[StageParameters]) -> Iterator[float]:
    """Of one optimizer step, for each group of ranks with the same parameters."""
    gathered = DTYPE_BYTES[config.model.dtype] if config.actor.megatron.use_distributed_optimizer else GRADIENT_BYTES
    per_parameter = GRADIENT_BYTES + gathered
    for stage, parameters in enumerate(policy):
        for tp_rank in range(grid.tp):
            yield per_parameter * parameters.dense * _ring(grid, grid.ranks(tp_rank, stage, None))
            for ep_rank in range(grid.ep if parameters.experts else 0):
                yield per_parameter * parameters.experts * _ring(grid, grid.ranks(tp_rank, stage, ep_rank))


def _ring(grid: Grid, ranks: list[int]) -> float:
    """Shares of the buffer that enter nodes, in a ring over `ranks`."""
    nodes = len({grid.node(rank) for rank in ranks})
    return nodes * (len(ranks) - 1) / len(ranks) if nodes > 1 else 0.0


def _pipeline(config: Config, grid: Grid) -> float:
    """How often the hidden state of a token crosses a border on its way through the stages."""
    per_stage = grid.tp * grid.replicas
    copies = 1 if config.actor.megatron.use_sequence_parallel else grid.tp  # ranks that send the same hidden states
    crossing = sum(grid.node(rank) != grid.node(rank + per_stage) for rank in range(grid.world_size - per_stage))
    return copies * crossing / per_stage


def _experts(models: PlannedModels, grid: Grid) -> float:
    """Hidden states of a token that cross borders to its experts and back, in all layers."""
    arch = models.arch
    if grid.ep == 1:
        return 0.0
    group = grid.ranks(0, 0, None)[: grid.ep]
    peers = [grid.node(rank) for rank in group]
    elsewhere = sum(a != b for a in peers for b in peers) / len(peers) ** 2
    return 2 * arch.experts_per_token * (arch.num_layers - arch.num_dense_layers) * elsewhere


def _tensor(models: PlannedModels, grid: Grid, size: int) -> float:
    """Hidden states of a token that cross borders between `size` tensor-parallel ranks: 4 gathers or scatters per layer."""
    return 4 * models.arch.num_layers * _ring(grid, list(range(size)))


def _samples(config: Config, grid: Grid, work: Workload) -> float:
    """4 bytes per token, and 4 more per log-probability, to every rank of the replica that trains on a sample."""
    if not config.draws:
        return 0.0
    per_sample = 4 * (config.data.max_prompt_length + 2 * config.data.max_response_length)
    ranks = grid.tp * grid.pp * config.actor.megatron.context_parallel_size
    return work.samples * per_sample * ranks * (1 - 1 / grid.num_nodes)
