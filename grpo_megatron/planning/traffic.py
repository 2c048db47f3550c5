"""BorderTraffic: bytes of one training step that cross the borders of nodes, all nodes together.

    weight sync    exact: the plan of sync/plan.py, every byte into each node once
    gradients      estimated: rings over the data-parallel ranks, those of a node side by side. A ring enters each of its
                   nodes once, with (n - 1) / n of what is reduced (float32) and gathered (the weights' type)
    pipeline       exact for the tokens: hidden states of every token between neighbouring stages on different nodes, in
                   each forward pass, and their gradients in each backward pass. Padding is not counted
    experts        estimated: each token's copies to experts, spread evenly over the ranks of the group, and back
    tensor         estimated: rings over a tensor-parallel group that is on several nodes
    engines        estimated: the same while the engines sample, if one is on several nodes
    samples        estimated: tokens and log-probabilities from an engine to the ranks that train on them, where each rank
                   of a replica is as likely on one node as on another

All tokens are counted at the largest lengths, so all but the first two are upper bounds for shorter responses.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_megatron.config import Config, LoraConfig
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.lora.sync import factor_sync
from grpo_megatron.models.lora.table import lora_rows
from grpo_megatron.models.weights.stream import engine_tensors, stages_of_parameters, sync_parameters
from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.planning.cost import Workload
from grpo_megatron.planning.layout import Layout
from grpo_megatron.planning.parameters import DTYPE_BYTES, GRADIENT_BYTES, RunModels, StageParameters, stage_layers
from grpo_megatron.rollout.build import find_engine
from grpo_megatron.sync.exchange import RankPlan
from grpo_megatron.sync.plan import AHEAD, NETWORK, NODE, PHASES, RELAY, Rounds, SyncPlan, Traffic, plan_rounds
from grpo_megatron.sync.weight_sync import crosses_directly

# -- One weight sync ---------------------------------------------------------------------------------------------------
# The seconds are an estimate: in every round all ranks wait for the one that sends or receives most. NCCL runs
# all messages of a rank on one stream, so network and node take turns and their times add up. Between two roles each has a
# stream, the longer one counts, and each node is AHEAD rounds behind the one before. Not counted: latency, and loading into
# the engine, which is on another stream and overlaps.

NVLINK_BYTES_PER_S = 200e9  # of one GPU, in each direction: what is usable of NVLink on an 8-GPU node
NETWORK_BYTES_PER_S = 400e9 / 8  # of one GPU's network card of 400 Gbit/s, in each direction
PINNED_BYTES_PER_S = 25e9  # of one GPU, to or from pinned memory of the host
GLOO_BYTES_PER_S = 1e9  # of one rank, over TCP: 8 GB/s of a node (assumed)


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
        elements = sum(self.traffic.received[phase].sum(axis=1) for phase in PHASES)
        return np.asarray(elements * self.itemsize)

    @property
    def over_borders(self) -> np.ndarray:
        """Bytes into each node, [nodes]."""
        return self._of_nodes(self.traffic.received[NETWORK].sum(axis=1))

    @property
    def out_of_training(self) -> np.ndarray:
        """Bytes from each node that trains to rollout ranks, [nodes]."""
        return self._of_nodes(self.traffic.sent[NETWORK].sum(axis=1))

    def _of_nodes(self, of_ranks: np.ndarray) -> np.ndarray:
        first_ranks = [ranks.start for ranks in self.plan.grid.nodes()]
        return np.asarray(np.add.reduceat(of_ranks, first_ranks) * self.itemsize)

    def seconds(self) -> float:
        network, node = self._seconds(NETWORK, NETWORK_BYTES_PER_S), self._seconds(NODE, NVLINK_BYTES_PER_S)
        if not self.plan.grid.num_rollout_ranks:
            return network + node
        behind = (self.plan.grid.num_rollout_ranks - 1) // self.plan.grid.ranks_per_node * AHEAD  # the last node
        return max(network * (1 + behind / self.rounds.count), node)

    @property
    def staged(self) -> float:
        """Bytes that a rank which trains copies to the host, where weights are staged between two roles: at most."""
        return float(self.traffic.sent[NETWORK].sum(axis=1).max()) * self.itemsize

    def staged_seconds(self) -> tuple[float, float, float]:
        """Returns the seconds of the copy to the host, of the transfer in the background, and of the copy from there."""
        sent = sum(of_phase.sum(axis=1) for of_phase in self.traffic.sent.values()) * self.itemsize
        busiest = max(np.max(sent), self.received.max())
        return self.staged / PINNED_BYTES_PER_S, busiest / GLOO_BYTES_PER_S, self.received.max() / PINNED_BYTES_PER_S

    def _seconds(self, phase: int, bytes_per_s: float) -> float:
        sent = self.traffic.sent[phase] + (self.traffic.sent[RELAY] if phase == NETWORK else 0)
        busiest = np.maximum(sent, self.traffic.received[phase]).max(axis=0)  # [rounds]
        return float(busiest.sum()) * self.itemsize / bytes_per_s

    def operations(self, rank: int) -> int:
        """Messages that a rank sends and receives."""
        return sum(current.num_messages() for current in RankPlan(self.plan, self.rounds, rank).rounds)


def planned_sync(
    arch: Architecture,
    grid: Grid,
    layers: Sequence[int],
    *,
    itemsize: int,
    bucket_megabytes: int,
    reads_shards: bool = True,
    rollout_ep: int = 1,
    lora: LoraConfig | None = None,
) -> PlannedSync:
    """Make the plan of a `WeightSync`; with `lora`, that of its factors. `layers`: of each pipeline stage."""
    stage_of = stages_of_parameters(arch, layers)
    spans = engine_tensors(arch, grid.rollout_tp, reads_shards=reads_shards, rollout_ep=rollout_ep).spans
    parameters = sync_parameters(arch, grid, stage_of)
    if lora is not None:
        parameters, spans = factor_sync(lora_rows(arch, lora), arch, grid, stage_of, spans)
    return PlannedSync(*plan_rounds(parameters, spans, grid, (bucket_megabytes << 20) // itemsize), itemsize)


def planned_for(config: Config, arch: Architecture, world_size: int, *, whole: bool = False) -> PlannedSync:
    """The sync of a run's steps, for a layout that has been checked. `whole`: the first one, also where adapters are trained."""
    lora = config.actor.lora
    layers = stage_layers(arch.num_layers, config.actor.megatron)
    assert layers is not None, "the layout was checked"
    is_whole = whole or lora.rank is None
    return (_last_planned if is_whole else functools.partial(planned_sync, lora=lora))(
        arch,
        Grid.of(config, world_size),
        tuple(layers),
        itemsize=DTYPE_BYTES[config.model.dtype],
        bucket_megabytes=config.rollout.update_weights_bucket_megabytes,
        reads_shards=find_engine(config.rollout.engine).reads_shards,
        rollout_ep=config.rollout.expert_parallel_size,
    )


_last_planned = functools.lru_cache(maxsize=1)(planned_sync)  # a page of a plan reads it twice


def kept_by_syncs(config: Config, arch: Architecture, world_size: int) -> float:
    """Returns the host bytes of the engine's shard that a rank keeps, where syncs send adapters only (sync/patches.py)."""
    if config.actor.lora.rank is None or not config.has_rollouts:
        return 0.0
    return float(planned_for(config, arch, world_size, whole=True).received.max())


def staged_bytes(config: Config, arch: Architecture, world_size: int) -> tuple[float, float]:
    """Returns the host bytes of weights that are on their way to rollout ranks: of a rank that trains, and of one of those.

    A rank that trains has those of lag + 1 versions. With adapters one of them is of all weights.
    """
    if not config.num_rollout_ranks or crosses_directly(config.rollout.lag):
        return 0.0, 0.0
    planned, whole = planned_for(config, arch, world_size), planned_for(config, arch, world_size, whole=True)
    return whole.staged + config.rollout.lag * planned.staged, float(whole.received.max())


def staging_shortages(config: Config, arch: Architecture, world_size: int, host: float | None = None) -> Iterator[str]:
    """Yields copies of weights that do not fit the `host` bytes of a node, by default this machine's."""
    host = host or float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    roles = zip((world_size, config.num_rollout_ranks), staged_bytes(config, arch, world_size), strict=True)
    for number, size in roles:
        ranks = min(number, config.trainer.n_gpus_per_node)
        if ranks * size > host:
            yield (
                f"rollout.lag={config.rollout.lag} has copies of the weights on the host: {ranks} ranks x {_size(size)} ="
                f" {_size(ranks * size)} per node, and it has {_size(host)}; set rollout.lag=1, which needs none"
            )


def weight_sync_lines(config: Config, arch: Architecture, world_size: int) -> Iterator[tuple[str, str]]:
    """(name, text) for the printed plan of a layout that has been checked."""
    planned, whole = planned_for(config, arch, world_size), planned_for(config, arch, world_size, whole=True)
    size, rounds = arch.num_parameters() * planned.itemsize, planned.rounds.count
    if planned is not whole:
        yield (
            "first",
            f"the base weights: at most {_size(whole.received.max())} of {_size(size)} into a rank; then adapters",
        )
        size = sum(tensor.numel for tensor in planned.plan.tensors) * planned.itemsize
    if not planned.received.max():
        yield "into a rank", f"nothing from other ranks: each has all {_size(size)} that its engine reads"
    else:
        yield "into a rank", f"at most {_size(planned.received.max())} of {_size(size)}"
        if borders := planned.over_borders.max():
            yield "", f"at most {_size(borders)} over the border of a node"
        if config.num_rollout_ranks:
            yield "", f"at most {_size(planned.out_of_training.max())} out of a node that trains: once, then relayed"
    yield "messages", f"{planned.operations(rank=0):,} of rank 0, in {rounds:,} {'round' if rounds == 1 else 'rounds'}"
    if config.trainer.device != "cpu" and planned.received.max():
        within, between = (f"{bandwidth / 1e9:.0f} GB/s" for bandwidth in (NVLINK_BYTES_PER_S, NETWORK_BYTES_PER_S))
        if staged_bytes(config, arch, world_size)[0]:
            stopped, sent, loaded = (f"{seconds:.2g}" for seconds in planned.staged_seconds())
            yield (
                "seconds",
                f"training stops for {stopped}: a copy to pinned memory; {loaded} to load it (25 GB/s, estimated)",
            )
            yield "", f"{sent} in the background over gloo (1 GB/s per rank, assumed)"
            return
        yield "seconds", f"{planned.seconds():.2g} at {within} per GPU in a node, {between} between nodes (estimated)"
        if config.num_rollout_ranks:
            yield "", "both roles stop for it: from GPU to GPU, nothing on the host"
    yield from expert_lines(config, arch)


NARROW = 256  # rows of an expert per rank; with fewer, a product uses a part of a GPU's tile


def expert_lines(config: Config, arch: Architecture) -> Iterator[tuple[str, str]]:
    """Advice where each rank of an engine has a narrow part of every expert, and could have some of them whole."""
    tp = config.rollout.tensor_model_parallel_size
    rows = arch.ffn_hidden_size // tp
    is_cut = find_engine(config.rollout.engine).reads_shards and not config.rollout.has_whole_experts
    if arch.num_experts and tp > 1 and is_cut and rows < NARROW and not arch.num_experts % tp:
        yield (
            "experts",
            f"a rank has {rows:,} of the {arch.ffn_hidden_size:,} rows of every expert;"
            f" rollout.expert_parallel_size={tp} gives it {arch.num_experts // tp} whole ones",
        )


def _size(number: float) -> str:
    unit, factor = next(((unit, f) for unit, f in (("GB", 1e9), ("MB", 1e6)) if number >= f), ("KB", 1e3))
    return f"{number / factor:,.4g} {unit}"


@dataclass(frozen=True)
class BorderTraffic:
    """`size`: bytes per step. `is_exact`: counted, not estimated."""

    name: str
    size: float
    is_exact: bool


def border_traffic(config: Config, models: RunModels, work: Workload, world_size: int) -> list[BorderTraffic]:
    """Returns the bytes that cross nodes, per kind of message. Empty on one node."""
    grid = Grid.of(config, world_size)
    if grid.num_nodes == 1:
        return []
    layout, tokens = Layout.of(config), work.rows * _length(config)
    hidden = tokens * models.arch.hidden_size * work.itemsize
    policy, *_ = models.stages(config)
    sync = float(planned_for(config, models.arch, world_size).over_borders.sum()) if config.has_rollouts else 0.0
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
        BorderTraffic("engines", hidden * _tensor(models, grid, grid.rollout_tp) * work.generates, is_exact=False),
        BorderTraffic("samples", _samples(config, grid, work), is_exact=False),
    ]
    return [traffic for traffic in all_traffic if traffic.size]


def _length(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _gradients(config: Config, grid: Grid, policy: list[StageParameters]) -> Iterator[float]:
    """Returns the bytes of one optimizer step, for each group of ranks with the same parameters."""
    gathered = DTYPE_BYTES[config.model.dtype] if config.actor.megatron.use_distributed_optimizer else GRADIENT_BYTES
    per_parameter = GRADIENT_BYTES + gathered
    for stage, parameters in enumerate(of_stage.trained for of_stage in policy):
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


def _experts(models: RunModels, grid: Grid) -> float:
    """Hidden states of a token that cross borders to its experts and back, in all layers."""
    arch = models.arch
    if grid.ep == 1:
        return 0.0
    group = grid.ranks(0, 0, None)[: grid.ep]
    peers = [grid.node(rank) for rank in group]
    elsewhere = sum(a != b for a in peers for b in peers) / len(peers) ** 2
    return 2 * arch.experts_per_token * (arch.num_layers - arch.num_dense_layers) * elsewhere


def _tensor(models: RunModels, grid: Grid, size: int) -> float:
    """Hidden states of a token that cross borders between `size` tensor-parallel ranks: 4 gathers or scatters per layer."""
    return 4 * models.arch.num_layers * _ring(grid, list(range(size)))


def _samples(config: Config, grid: Grid, work: Workload) -> float:
    """4 bytes per token, 4 more per log-probability, and routes, to every rank of the replica that trains on a sample."""
    if not config.has_rollouts:
        return 0.0
    per_sample = 4 * (config.data.max_prompt_length + 2 * config.data.max_response_length)
    if config.actor.moe.route_replay == "engine":
        per_sample += work.arch.route_bytes * _length(config)
    ranks = grid.tp * grid.pp * config.actor.megatron.context_parallel_size
    return work.rows * per_sample * ranks * (1 - 1 / grid.num_nodes)
