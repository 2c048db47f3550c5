"""What one weight sync costs, from its plan: bytes, operations, memory, and seconds at stated bandwidths.

The seconds are an estimate: in every round all ranks wait for the one that sends or receives most. The network and the
links within the nodes work at the same time, on different rounds, so the slower of the two counts. Not counted: latency,
and loading into the engine, which overlaps as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_megatron.checks.layout import stage_layers
from grpo_megatron.checks.memory import DTYPE_BYTES
from grpo_megatron.config import Config
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.weights.sync_parameters import engine_tensors, stages_of_parameters, sync_parameters
from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.rollout.build import find_engine
from grpo_megatron.sync.plan import NETWORK, NODE, SyncPlan
from grpo_megatron.sync.rounds import RankPlan, Rounds, Traffic, plan_rounds

NVLINK_BYTES_PER_S = 200e9  # of one GPU, in each direction: what is usable of NVLink on an 8-GPU node
NETWORK_BYTES_PER_S = 400e9 / 8  # of one GPU's network card of 400 Gbit/s, in each direction


@dataclass(frozen=True)
class PlannedSync:
    """A plan of all ranks with its traffic; `itemsize` is bytes per element."""

    plan: SyncPlan
    rounds: Rounds
    traffic: Traffic
    itemsize: int

    @property
    def received(self) -> np.ndarray:
        """Bytes of each rank, [ranks]."""
        elements = sum(self.traffic.received[phase].sum(axis=1) for phase in (NETWORK, NODE))
        return np.asarray(elements * self.itemsize)

    @property
    def over_borders(self) -> np.ndarray:
        """Bytes into each node, [nodes]."""
        first_ranks = range(0, self.plan.grid.world_size, self.plan.grid.ranks_per_node)
        return np.asarray(np.add.reduceat(self.traffic.received[NETWORK].sum(axis=1), first_ranks) * self.itemsize)

    def seconds(self) -> float:
        return max(self._seconds(NETWORK, NETWORK_BYTES_PER_S), self._seconds(NODE, NVLINK_BYTES_PER_S))

    def _seconds(self, phase: int, bytes_per_s: float) -> float:
        busiest = np.maximum(self.traffic.sent[phase], self.traffic.received[phase]).max(axis=0)  # [rounds]
        return float(busiest.sum()) * self.itemsize / bytes_per_s

    def operations(self, rank: int) -> int:
        """Messages that a rank sends and receives."""
        return sum(current.messages() for current in RankPlan(self.plan, self.rounds, rank).rounds)


def planned_sync(
    arch: Architecture,
    grid: Grid,
    layers: Sequence[int],
    *,
    itemsize: int,
    bucket_megabytes: int,
    reads_shards: bool = True,
    rollout_ep: int = 1,
) -> PlannedSync:
    """The plan that `Resharding` makes. `layers`: of each pipeline stage."""
    parameters = sync_parameters(arch, grid, stages_of_parameters(arch, layers))
    spans = engine_tensors(arch, grid.rollout_tp, reads_shards=reads_shards, rollout_ep=rollout_ep).spans
    return PlannedSync(*plan_rounds(parameters, spans, grid, (bucket_megabytes << 20) // itemsize), itemsize)


def grid_of(config: Config, world_size: int) -> Grid:
    megatron = config.actor.megatron
    return Grid(
        world_size,
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.expert_model_parallel_size,
        config.rollout.tensor_model_parallel_size,
        min(config.trainer.n_gpus_per_node, world_size),
    )


def planned_for(config: Config, arch: Architecture, world_size: int) -> PlannedSync:
    """The sync of a run, for a layout that has been checked."""
    layers = stage_layers(arch.num_layers, config.actor.megatron)
    assert layers is not None, "the layout was checked"
    return _last_planned(
        arch,
        grid_of(config, world_size),
        tuple(layers),
        itemsize=DTYPE_BYTES[config.model.dtype],
        bucket_megabytes=config.rollout.update_weights_bucket_megabytes,
        reads_shards=find_engine(config.rollout.engine).reads_shards,
        rollout_ep=config.rollout.expert_parallel_size,
    )


_last_planned = functools.lru_cache(maxsize=1)(planned_sync)  # a page of a plan reads it twice


def weight_sync_lines(config: Config, arch: Architecture, world_size: int) -> Iterator[tuple[str, str]]:
    """(name, text) for the printed plan of a layout that has been checked."""
    planned = planned_for(config, arch, world_size)
    whole, rounds = arch.num_parameters() * planned.itemsize, planned.rounds.count
    if not planned.received.max():
        yield "into a rank", f"nothing from other ranks: each has all {_size(whole)} that its engine reads"
    else:
        yield "into a rank", f"at most {_size(planned.received.max())} of {_size(whole)}"
        if borders := planned.over_borders.max():
            yield "", f"at most {_size(borders)} over the border of a node"
    yield "messages", f"{planned.operations(rank=0):,} of rank 0, in {rounds:,} {'round' if rounds == 1 else 'rounds'}"
    if config.trainer.device != "cpu" and planned.received.max():
        within, between = (f"{bandwidth / 1e9:.0f} GB/s" for bandwidth in (NVLINK_BYTES_PER_S, NETWORK_BYTES_PER_S))
        yield "seconds", f"{planned.seconds():.2g} at {within} per GPU in a node, {between} between nodes (estimated)"


def _size(number: float) -> str:
    unit, factor = next(((unit, f) for unit, f in (("GB", 1e9), ("MB", 1e6)) if number >= f), ("KB", 1e3))
    return f"{number / factor:,.4g} {unit}"
