"""Many ranks in one process: every rank runs its real plan and codec in a thread; messages travel through queues."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of, table_of
from grpo_megatron.models.weights.stream import engine_tensors, stages_of_parameters, sync_parameters
from grpo_megatron.models.weights.table import WeightRow, expand_table
from grpo_megatron.parallel.mesh import Grid, RankError
from grpo_megatron.sync.digest import DigestSlice, Expected, compare, expected_digests, slice_digest
from grpo_megatron.sync.exchange import Envelope, Pool, RankPlan, Transport
from grpo_megatron.sync.plan import EngineTensors, Rounds, SyncPlan, Traffic, plan_rounds
from grpo_megatron.sync.weight_sync import BridgePost, FullCodec, SyncHeader, SyncRank
from grpo_megatron.types import WeightBucket
from tools.benchmarks.sync import floor_of as floor_of

HANG_S = 120.0
# (sync, source, target, number of the message between them) and the message -> what is sent in its place
Fault = Callable[[tuple[int, int, int, int], Tensor], list[Tensor]]
Given = list[dict[str, Tensor]]  # the tensors that every rank's engine is given


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


@dataclass
class World:
    """A planned sync. `weights` are the Hugging Face tensors that the training ranks have together."""

    arch: Architecture
    grid: Grid
    plan: SyncPlan
    rounds: Rounds
    traffic: Traffic
    weights: dict[str, Tensor]
    engine: EngineTensors  # without the constants, which travel apart
    _rank_plans: dict[int, RankPlan] = field(default_factory=dict)

    @cached_property
    def rows(self) -> dict[str, WeightRow]:
        return {row.megatron: row for row in expand_table(table_of(self.arch), self.arch)}

    def rank_plan(self, rank: int) -> RankPlan:
        if rank not in self._rank_plans:
            units = self.engine.units(self.grid.engine_rank(rank))
            self._rank_plans[rank] = RankPlan(self.plan, self.rounds, rank, units)
        return self._rank_plans[rank]

    def shard(self, rank: int) -> dict[str, Tensor]:
        """A rank's parameters, cut from the weights by the weight table. Odd ranks have them in one buffer, as with
        Megatron's distributed optimizer."""
        shard = {
            p.name: self.rows[p.name].shard(self.weights.__getitem__, self.arch, rank % self.grid.tp, self.grid.tp)
            for p in self.rank_plan(rank).parameters()
        }
        if rank % 2 and shard:
            buffer = torch.cat([parameter.reshape(-1) for parameter in shard.values()])
            views = buffer.split([parameter.numel() for parameter in shard.values()])
            shard = {n: view.view(p.shape) for (n, p), view in zip(shard.items(), views, strict=True)}
        return shard

    def span(self, name: str, rank: int) -> tuple[int, int, int]:
        """Axis, start and length of what a rank's engine reads of a tensor: the arguments of `narrow`."""
        start, stop = self.engine.spans[name][self.grid.engine_rank(rank)]
        return self.engine.tensors[name].axis, start, stop - start


def planned(
    arch: Architecture, grid: Grid, sizes: list[int], budget: int, rollout_ep: int = 1
) -> tuple[SyncPlan, Rounds, Traffic]:
    """As a WeightSync plans it. `budget`: elements."""
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
    rows = [row for row in expand_table(table_of(arch), arch) if not row.is_constant]
    shapes = {name: shape for row in rows for name, shape in zip(row.hf, row.hf_shapes(arch), strict=True)}
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    engine = engine_tensors(arch, grid.rollout_tp, reads_shards=True, rollout_ep=rollout_ep)
    groups = {name: group for name, group in engine.groups.items() if name in weights}
    tensors, spans = ({name: of[name] for name in weights} for of in (engine.tensors, engine.spans))
    return World(arch, grid, plan, rounds, traffic, weights, EngineTensors(tensors, spans, groups))


# -- the ranks of a world over many syncs ------------------------------------------------------------------------------


class Queues:
    """The messages of one simulated rank. As in a network, what is sent is read at any time until the sender has waited,
    and what is received is written at any time: a buffer that is used too early shows. With a fault a message is a copy, of
    which a receiver takes as many bytes as it expects."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self._busy: set[tuple[int, int]] = set()  # addresses of what is being sent or received
        self.numbers: Counter[int] = Counter()  # messages of this sync, by peer
        self.received: Counter[int] = Counter()  # elements, by peer
        self.operations = 0

    def post(self, sends: list[Envelope], receives: list[Envelope], **options: bool) -> Callable[[], None]:
        ranks = self._ranks
        self.operations += len(sends) + len(receives)
        taken: queue.SimpleQueue[None] = queue.SimpleQueue()
        for peer, buffer in sends:
            key = (ranks.number, self._rank, peer, self.numbers[peer])
            self.numbers[peer] += 1
            for message in [buffer] if ranks.fault is None else ranks.fault(key, buffer.clone()):
                ranks.queues[self._rank, peer].put((message, taken))
        addresses = [(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) for _, buffer in (*sends, *receives)]
        busy = set(addresses[: len(sends)])
        for (_, buffer), (start, stop) in zip(receives, addresses[len(sends) :], strict=True):
            assert all(stop <= low or high <= start for low, high in self._busy | busy), "a buffer is in use"
            buffer.view(torch.uint8).fill_(255)  # NaN
            busy.add((start, stop))
        self._busy |= busy

        def wait() -> None:
            for peer, buffer in receives:
                self.received[peer] += buffer.numel()
                try:
                    message, is_taken = ranks.queues[peer, self._rank].get(timeout=ranks.patience_s)
                except queue.Empty:  # the connection's time-out; what was lost leaves zeros
                    message, is_taken = buffer.new_zeros(0), taken
                size = min(len(buffer), len(message))
                buffer[:size], buffer[size:] = message[:size], 0
                is_taken.put(None)
            for _ in sends if ranks.fault is None else ():
                taken.get(timeout=HANG_S)
            self._busy -= busy

        return wait


class Meeting:
    """The collectives of a Mesh: of the ranks of one role."""

    def __init__(self, ranks: range) -> None:
        self._ranks, self.barrier = ranks, threading.Barrier(len(ranks), timeout=HANG_S)
        self._values: dict[int, Any] = {}

    def mesh(self, rank: int) -> Any:
        def all_gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self.barrier.wait()
            values = [self._values[rank] for rank in self._ranks]
            self.barrier.wait()
            return values

        def agree(problem: str | None) -> None:
            problems = all_gather(problem)
            if any(problems):
                raise RankError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text))

        total = lambda values: [sum(column) for column in zip(*all_gather(values), strict=True)]  # noqa: E731
        return SimpleNamespace(run_rank=rank, agree=agree, total=total, all_gather=all_gather)


class Ranks:
    """The ranks of a World over many syncs with a codec. `number`: of the current sync. `codec` is made as by a WeightSync.

    `is_staged`: between two roles the weights are copied, and a thread receives them, as with a lag of two steps.
    """

    def __init__(
        self,
        of: World,
        codec: Callable[..., FullCodec] = FullCodec,
        fault: Fault | None = None,
        *,
        is_staged: bool = False,
    ) -> None:
        self.world, self.fault, self.patience_s, self.number = of, fault, HANG_S, -1
        grid, size = of.grid, of.grid.world_size
        self.queues: dict[tuple[int, int], queue.SimpleQueue[Any]] = {
            (a, b): queue.SimpleQueue() for a in range(size) for b in range(size)
        }
        self.transports = [Queues(self, rank) for rank in range(size)]
        self._training = range(grid.num_training)
        roles = [self._training, *([range(grid.num_training, size)] if grid.num_rollout_ranks else [])]
        self._meetings = [Meeting(role) for role in roles]
        dtype = next(iter(of.weights.values())).dtype
        self.accepted = [False] * size  # of each rank, the last sync
        self.headers: list[SyncHeader] = []  # of all syncs

        def made(rank: int) -> FullCodec:
            queues, pool = self.transports[rank], Pool(dtype, torch.device("cpu"))
            transport = Transport(queues.post, pool)
            if grid.num_rollout_ranks and is_staged:
                bridge: Any = SimpleNamespace(post=queues.post, samples_only=rank not in self._training)
                transport = Transport(BridgePost(bridge, lag=0), pool, is_staged=True)
            sync_rank = SyncRank(self._meeting(rank).mesh(rank), grid, transport, pool, 1 << 14)
            return codec(sync_rank, of.rank_plan(rank), lambda parameter: parameter)

        self.codecs: list[FullCodec] = [None] * size  # type: ignore[list-item]
        for error in on_threads(size, lambda rank: self.codecs.__setitem__(rank, made(rank))):
            raise error

    def _meeting(self, rank: int) -> Meeting:
        return self._meetings[-1 if rank not in self._training else 0]

    def sync(self, version: int = 0, *, accept: bool = True) -> Given:
        """Sync, and return what every rank's engine is given. Raises the error of the first rank."""
        given, errors = self.attempt(version)
        for error in errors:
            raise error
        self.accepted = [accept] * len(self.codecs)
        for codec in self.codecs if accept else ():
            codec.accept(f"digest of {version}")
        return given

    def attempt(self, version: int) -> tuple[Given, list[BaseException]]:
        """The same, and the ranks' errors."""
        self.number += 1
        size, headers = self.world.grid.world_size, queue.SimpleQueue[SyncHeader]()
        given: Given = [{} for _ in range(size)]
        accepted, self.accepted = self.accepted, [False] * size

        def stream(rank: int) -> Iterator[WeightBucket]:
            codec = self.codecs[rank]
            if rank not in self._training:
                codec.expect()
                return codec.stream(headers.get(timeout=HANG_S), {})
            parameters, post = self.parameters(rank), codec._rank.transport.post
            if isinstance(post, BridgePost):
                post.begin()
            header = codec.begin(parameters, version, builds_on_last=accepted[rank])
            if rank == 0:
                self.headers.append(header)
                for _ in range(size - len(self._training)):
                    headers.put(header)
            return codec.stream(header, parameters)

        def rank_main(rank: int) -> None:
            try:
                self.transports[rank].numbers.clear()
                for bucket in stream(rank):
                    given[rank].update(bucket)
            except RankError:
                raise
            except BaseException:
                self._meeting(rank).barrier.abort()
                raise

        errors = on_threads(size, rank_main)
        errors.sort(key=lambda error: isinstance(error, RankError))
        if errors:  # messages of a sync that failed
            for number in self.queues:
                self.queues[number] = queue.SimpleQueue()
            for transport in self.transports:
                transport._busy.clear()
        return given, errors

    def parameters(self, rank: int) -> dict[str, Tensor]:
        return self.world.shard(rank)

    def bytes_received(self) -> list[int]:
        return [codec.bytes_received for codec in self.codecs]


def on_threads(size: int, rank_main: Callable[[int], object]) -> list[BaseException]:
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


def expected_of(world: World, drifts: Mapping[int, DigestSlice] | None = None) -> Expected:
    """All ranks in turn: the first pass adds up their tables, the second hands the sum to one rank.

    `drifts`: rank -> the slice of which it has another bit.
    """
    total, device = torch.zeros((), dtype=torch.int64), torch.device("cpu")
    for rank in range(world.grid.num_training):
        tables: list[Tensor] = []
        slices, shard = world.rank_plan(rank).digest_slices(), world.shard(rank)
        if drifts and rank in drifts:
            drift = drifts[rank]
            shard[drift.parameter] = shard[drift.parameter].clone()
            bits = shard[drift.parameter].view(torch.int16).narrow(drift.tensor.axis, drift.local_start, 1)
            bits[(0,) * bits.dim()] ^= 1
        expected_digests(slices, shard.__getitem__, world.engine, lambda t: tables.append(t.clone()), device)  # noqa: B023
        total = total + tables[0]
    return expected_digests([], lambda name: total, world.engine, lambda table: table.copy_(total), device)


def digests_of(world: World, rank: int, tensors: dict[str, Tensor]) -> dict[str, int]:
    """The digests of a rank's engine that was given these full-shaped tensors."""
    spans = {name: world.span(name, rank) for name in world.engine.tensors}
    return {n: int(slice_digest(tensors[n].narrow(*s), world.engine.tensors[n], s[1])) for n, s in spans.items()}


def complaints(world: World, expected: Expected, given: Given) -> list[str | None]:
    """What the attestation says on every rank."""
    digests = [digests_of(world, rank, tensors) for rank, tensors in enumerate(given)]
    place = world.grid.engine_rank
    return [compare(expected, of_rank, world.engine, place(rank), rank) for rank, of_rank in enumerate(digests)]


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
