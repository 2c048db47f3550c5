"""Many ranks with delta syncs in one process: every rank is a thread, messages travel through queues that may be faulty."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.models.families import table_of
from grpo_megatron.models.weights.table import WeightRow, expand_table
from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.sync.delta_sync import DeltaLimits, DeltaSync
from grpo_megatron.sync.exchange import Envelope, Pool
from grpo_megatron.sync.rounds import RankPlan
from tests.sync.simulation import World

HANG_S = 120.0
# (sync, source, target, number of the message between them) and the message -> what is sent in its place
Fault = Callable[[tuple[int, int, int, int], Tensor], list[Tensor]]


class Crossing:
    """Where all ranks meet: the collectives of a Mesh."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=HANG_S)
        self._values: list[Any] = [None] * size

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def abort(self) -> None:
        self._barrier.abort()


class SimulatedRanks:
    def __init__(self, crossing: Crossing, rank: int) -> None:
        self._crossing, self._rank = crossing, rank

    def agree(self, problem: str | None) -> None:
        problems = self._crossing.all_gather(self._rank, problem)
        if any(problems):
            raise RankError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text))

    def total(self, values: list[int]) -> list[int]:
        return [sum(column) for column in zip(*self._crossing.all_gather(self._rank, values), strict=True)]


class FaultyQueues:
    """The transport of one rank. A receiver takes as many bytes as it expects, of whatever comes."""

    def __init__(self, world: DeltaWorld, rank: int) -> None:
        self._world, self._rank = world, rank
        self._number: dict[int, int] = {}

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Callable[[], None]:
        for peer, buffer in sends:
            number = self._number[peer] = self._number.get(peer, -1) + 1
            for message in self._world.fault((self._world.number, self._rank, peer, number), buffer.clone()):
                self._world.queues[self._rank, peer].put(message)

        def wait() -> None:
            for peer, buffer in receives:
                try:
                    message = self._world.queues[peer, self._rank].get(timeout=self._world.patience_s)
                except queue.Empty:  # the connection's time-out; what was lost leaves zeros
                    message = torch.zeros(0, dtype=buffer.dtype)
                size = min(len(buffer), len(message))
                buffer[:size], buffer[size:] = message[:size], 0

        return wait

    def begin(self) -> None:
        self._number.clear()


class DeltaWorld:
    """The ranks of a `World` over many syncs. `fault` sees every message, `number` is that of the current sync."""

    def __init__(self, world: World, *, max_density: float = 1.0, full_every: int = 1 << 30) -> None:
        size = world.grid.world_size
        self.world, self.number, self.patience_s = world, -1, HANG_S
        self.fault: Fault = lambda _, message: [message]
        self.queues: dict[tuple[int, int], queue.Queue[Tensor]] = {
            (a, b): queue.Queue() for a in range(size) for b in range(size)
        }
        self._rows: dict[str, WeightRow] = {r.megatron: r for r in expand_table(table_of(world.arch), world.arch)}
        self.plans = [RankPlan(world.plan, world.rounds, rank) for rank in range(size)]
        self._transports = [FaultyQueues(self, rank) for rank in range(size)]
        self._crossing = Crossing(size)
        self.dtype = next(iter(world.whole.values())).dtype
        self.syncs = [
            DeltaSync(
                self.plans[rank],
                self._transports[rank],
                SimulatedRanks(self._crossing, rank),
                pool=Pool(self.dtype, torch.device("cpu")),
                limits=DeltaLimits(full_every, max_density),
            )
            for rank in range(size)
        ]

    def sync(self, version: int, *, accepted: bool = True) -> list[dict[str, Tensor]]:
        """What every rank's engine is handed. Raises the error of the first rank."""
        handed, errors = self.attempt(version)
        if errors:
            raise errors[0]
        if accepted:
            for sync in self.syncs:
                sync.accept(f"digest of {version}")
        return handed

    def attempt(self, version: int) -> tuple[list[dict[str, Tensor]], list[BaseException]]:
        """The same, and the ranks' errors."""
        self.number += 1
        size = self.world.grid.world_size
        handed: list[dict[str, Tensor]] = [{} for _ in range(size)]
        errors: list[BaseException] = []

        def rank_main(rank: int) -> None:
            try:
                self._transports[rank].begin()
                for bucket in self.syncs[rank].stream(self._shard(rank).__getitem__, version):
                    handed[rank].update((name, tensor.clone()) for name, tensor in bucket)
            except RankError as error:
                errors.append(error)
            except BaseException as error:  # noqa: BLE001 - raised in the test's thread
                errors.insert(0, error)
                self._crossing.abort()

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for waiting in self.queues.values():  # of a sync that failed
            waiting.queue.clear()
        return handed, errors

    def _shard(self, rank: int) -> dict[str, Tensor]:
        world, tp_rank = self.world, rank % self.world.grid.tp
        return {
            p.name: self._rows[p.name].shard(world.whole.__getitem__, world.arch, tp_rank, world.grid.tp)
            for p in self.plans[rank].parameters()
        }

    def read_parts(self, rank: int, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, the part that the rank's engine reads) of full-shaped tensors."""
        for tensor in self.world.plan.tensors:
            start, stop = self.world.plan.spans[tensor.name][self.world.grid.engine_rank(rank)]
            yield tensor.name, tensors[tensor.name].narrow(tensor.axis, start, stop - start)
