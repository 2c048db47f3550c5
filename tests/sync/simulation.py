"""Many ranks in one process: every rank runs its real plan and exchange in a thread; messages travel through queues."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of, table_of
from grpo_megatron.models.weights.stream import engine_tensors, stages_of_parameters, sync_parameters
from grpo_megatron.models.weights.table import WeightRow, expand_table
from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.sync.digest import Expected, compare, expected_digests, part_digest
from grpo_megatron.sync.exchange import Envelope, Exchange, Pool, RankPlan, snapshot
from grpo_megatron.sync.plan import EngineTensors, Rounds, SyncPlan, Traffic, plan_rounds

HANG_S = 120.0


@dataclass
class Counts:
    """What one rank received, in elements, and how many operations it posted."""

    received: Counter[int] = field(default_factory=Counter)  # from each rank
    operations: int = 0


class Queues:
    """The transport of one simulated rank. As in a network, what is sent is read at any time until the sender has waited,
    and what is received is written at any time: a buffer that is used too early shows."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], queue.SimpleQueue[Any]], counts: Counts) -> None:
        self._rank, self._queues, self._counts = rank, queues, counts
        self._busy: set[tuple[int, int]] = set()  # addresses of what is being sent or received

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Callable[[], None]:
        self._counts.operations += len(sends) + len(receives)
        taken: queue.SimpleQueue[None] = queue.SimpleQueue()
        for peer, buffer in sends:
            self._queues[self._rank, peer].put((buffer, taken))
        busy = {_addresses(buffer) for _, buffer in sends}
        for _, buffer in receives:
            start, stop = _addresses(buffer)
            assert all(stop <= low or high <= start for low, high in self._busy | busy), "a buffer is in use"
            buffer.view(torch.uint8).fill_(255)  # NaN
            busy.add((start, stop))
        self._busy |= busy

        def wait() -> None:
            for peer, buffer in receives:
                self._counts.received[peer] += buffer.numel()
                sent, is_taken = self._queues[peer, self._rank].get(timeout=HANG_S)
                buffer.copy_(sent)
                is_taken.put(None)
            for _ in sends:
                taken.get(timeout=HANG_S)
            self._busy -= busy

        return wait


def _addresses(buffer: Tensor) -> tuple[int, int]:
    return buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes


@dataclass
class World:
    """A planned sync. `whole` are the Hugging Face tensors that the training ranks hold together."""

    arch: Architecture
    grid: Grid
    plan: SyncPlan
    rounds: Rounds
    traffic: Traffic
    whole: dict[str, Tensor]
    engine: EngineTensors
    _rank_plans: dict[int, RankPlan] = field(default_factory=dict)

    @cached_property
    def _rows(self) -> dict[str, WeightRow]:
        return {row.megatron: row for row in expand_table(table_of(self.arch), self.arch)}

    def rank_plan(self, rank: int) -> RankPlan:
        if rank not in self._rank_plans:
            units = self.engine.units(self.grid.engine_rank(rank))
            self._rank_plans[rank] = RankPlan(self.plan, self.rounds, rank, units)
        return self._rank_plans[rank]

    def shard(self, rank: int) -> dict[str, Tensor]:
        """A rank's parameters, cut from the whole tensors by the weight table. Odd ranks have them in one buffer, as with
        Megatron's distributed optimizer."""
        rows, tp_rank = self._rows, rank % self.grid.tp
        shard = {
            parameter.name: rows[parameter.name].shard(self.whole.__getitem__, self.arch, tp_rank, self.grid.tp)
            for parameter in self.rank_plan(rank).parameters()
        }
        if rank % 2 and shard:
            sizes = [parameter.numel() for parameter in shard.values()]
            pieces = torch.cat([parameter.reshape(-1) for parameter in shard.values()]).split(sizes)
            shard = {n: piece.view(p.shape) for (n, p), piece in zip(shard.items(), pieces, strict=True)}
        return shard


def planned(
    arch: Architecture, grid: Grid, sizes: list[int], budget: int, rollout_ep: int = 1
) -> tuple[SyncPlan, Rounds, Traffic]:
    """As `Resharding` plans it. `budget`: elements."""
    parameters = sync_parameters(arch, grid, stages_of_parameters(arch, sizes))
    engine = engine_tensors(arch, grid.rollout_tp, reads_shards=True, rollout_ep=rollout_ep)
    return plan_rounds(parameters, engine.spans, grid, budget)


def world(
    arch: Architecture,
    grid: Grid,
    sizes: list[int],
    *,
    budget: int = 1 << 14,
    dtype: torch.dtype = torch.bfloat16,
    rollout_ep: int = 1,
) -> World:
    plan, rounds, traffic = planned(arch, grid, sizes, budget, rollout_ep)
    generator = torch.Generator().manual_seed(0)
    whole = {n: torch.randn(s, generator=generator).to(dtype) for n, s in planned_shapes(arch).items()}
    engine = engine_tensors(arch, grid.rollout_tp, reads_shards=True, rollout_ep=rollout_ep)
    stacks = {name: stack for name, stack in engine.stacks.items() if name in whole}
    of_whole = ({name: part[name] for name in whole} for part in (engine.tensors, engine.spans))
    return World(arch, grid, plan, rounds, traffic, whole, EngineTensors(*of_whole, stacks))


def run(simulated: World) -> tuple[list[dict[str, Tensor]], list[Counts]]:
    """What every rank's engine is handed, and what it cost."""
    size = simulated.grid.world_size
    queues: dict[tuple[int, int], queue.SimpleQueue[Any]] = {
        (a, b): queue.SimpleQueue() for a in range(size) for b in range(size)
    }
    counts = [Counts() for _ in range(size)]
    handed: list[dict[str, Tensor]] = [{} for _ in range(size)]

    def rank_main(rank: int) -> None:
        transport = Queues(rank, queues, counts[rank])
        rank_plan, shard = simulated.rank_plan(rank), simulated.shard(rank)
        dtype = next(iter(simulated.whole.values())).dtype
        pool, draws = Pool(dtype, torch.device("cpu")), rank >= simulated.grid.num_training
        if simulated.grid.num_drawing and not draws:
            transport.post(snapshot(rank_plan, shard.__getitem__, pool), [])()
            return
        exchange = Exchange(rank_plan, shard.__getitem__, transport.post, pool, stage=pool if draws else None)
        for bucket in exchange.stream():
            handed[rank].update(bucket)

    for error in on_threads(size, rank_main):
        raise error
    return handed, counts


def on_threads(size: int, rank_main: Callable[[int], None]) -> list[BaseException]:
    """Run `rank_main(rank)` in one thread per rank. Returns what they raised."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            rank_main(rank)
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


# -- attestation -------------------------------------------------------------------------------------------------------


def engine_of(world: World) -> EngineTensors:
    """The engine's tensors, without the constants, which travel apart."""
    engine = engine_tensors(world.arch, world.grid.rollout_tp, reads_shards=True)
    return EngineTensors(*({name: part[name] for name in world.whole} for part in (engine.tensors, engine.spans)))


def expected_of(world: World) -> Expected:
    """All ranks in turn: the first pass adds up their tables, the second hands the sum to one rank."""
    engine, total = engine_of(world), torch.zeros(())
    for rank in range(world.grid.world_size):
        tables: list[Tensor] = []
        shares, shard = world.rank_plan(rank).shares(), world.shard(rank)
        expected_digests(shares, shard.__getitem__, engine, lambda t: tables.append(t.clone()), torch.device("cpu"))  # noqa: B023
        total = tables[0] if rank == 0 else total + tables[0]
    return expected_digests([], lambda name: total, engine, lambda table: table.copy_(total), torch.device("cpu"))


def held_by(world: World, rank: int, tensors: dict[str, Tensor]) -> dict[str, int]:
    """The digests of a rank's engine that was handed these full-shaped tensors."""
    engine, held = engine_of(world), {}
    for name, tensor in engine.tensors.items():
        start, stop = engine.spans[name][world.grid.engine_rank(rank)]
        held[name] = int(part_digest(tensors[name].narrow(tensor.axis, start, stop - start), tensor, start))
    return held


def complaints(world: World, expected: Expected, handed: list[dict[str, Tensor]]) -> list[str | None]:
    """What the attestation says on every rank."""
    engine, place = engine_of(world), world.grid.engine_rank
    held = [held_by(world, rank, tensors) for rank, tensors in enumerate(handed)]
    return [compare(expected, digests, engine, place(rank), rank) for rank, digests in enumerate(held)]


# -- architectures: numbers only, without a model folder ---------------------------------------------------------------


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # more engine or training ranks than key-value heads
    "max_position_embeddings": 512,
    "vocab_size": 101,  # odd: both layouts pad it
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,  # the size that vLLM computes on the CPU
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
SIGMOID: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-groups": {"model_type": "llama", "num_key_value_heads": 8},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},  # biases
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},  # q and k norms
    "qwen3-moe": {"model_type": "qwen3_moe", "head_dim": 16, **EXPERTS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek-v3": {"model_type": "deepseek_v3", **LATENT, **SIGMOID},
}


def architecture(family: str, **changes: Any) -> Architecture:
    return architecture_of({**SMALL, **FAMILIES[family], **changes})


def planned_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """The tensors of a sync's plan: all but the constants, which travel apart (models/weights/stream.py)."""
    rows = [row for row in expand_table(table_of(arch), arch) if not row.is_constant]
    return {name: shape for row in rows for name, shape in zip(row.hf, row.hf_shapes(arch), strict=True)}
