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
from grpo_megatron.models.families import table_of
from grpo_megatron.models.weights.sync_parameters import engine_tensors, stages_of_parameters, sync_parameters
from grpo_megatron.models.weights.table import WeightRow, expand_table
from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.sync.exchange import Envelope, Exchange, Pool
from grpo_megatron.sync.plan import SyncPlan
from grpo_megatron.sync.rounds import RankPlan, Rounds, Traffic, plan_rounds
from tests.sync.architectures import planned_shapes

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
    _rank_plans: dict[int, RankPlan] = field(default_factory=dict)

    @cached_property
    def _rows(self) -> dict[str, WeightRow]:
        return {row.megatron: row for row in expand_table(table_of(self.arch), self.arch)}

    def rank_plan(self, rank: int) -> RankPlan:
        if rank not in self._rank_plans:
            self._rank_plans[rank] = RankPlan(self.plan, self.rounds, rank)
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
    return World(arch, grid, plan, rounds, traffic, whole)


def run(simulated: World) -> tuple[list[dict[str, Tensor]], list[Counts]]:
    """What every rank's engine is handed, and what it cost."""
    size = simulated.grid.world_size
    queues: dict[tuple[int, int], queue.SimpleQueue[Any]] = {
        (a, b): queue.SimpleQueue() for a in range(size) for b in range(size)
    }
    counts = [Counts() for _ in range(size)]
    handed: list[dict[str, Tensor]] = [{} for _ in range(size)]
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            transport = Queues(rank, queues, counts[rank])
            rank_plan, shard = simulated.rank_plan(rank), simulated.shard(rank)
            dtype = next(iter(simulated.whole.values())).dtype
            exchange = Exchange(rank_plan, shard.__getitem__, transport, Pool(dtype, torch.device("cpu")))
            for bucket in exchange.stream():
                handed[rank].update(bucket)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's thread
            errors.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return handed, counts
