"""The collectives between neighbours, run for all ranks of a world in this process; no connection is made.

Every algorithm of n ranks is a list of generators, stepped together: each yields its message of the round, which is delivered
before the next round. What a run of 4,096 ranks needs is counted: rounds and partners of each rank.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from grpo_megatron.parallel import control
from grpo_megatron.parallel.control import (
    HEAD_BYTES,
    INLINE_BYTES,
    Parcel,
    gather_all,
    gather_first,
    relay_path,
    route,
    share_first,
)
from tests.listeners import listeners
from tests.worlds import free_port

SIZES = [1, 2, 3, 4, 5, 7, 8, 12, 48, 100]


class World:
    """Runs one algorithm per rank to its end. `partners[rank]`: the ranks that it has a connection to."""

    def __init__(self, size: int) -> None:
        self.size, self.rounds = size, 0
        self.partners: list[set[int]] = [set() for _ in range(size)]

    def run(self, start: Callable[[int], Any]) -> list[Any]:
        running = {rank: start(rank) for rank in range(self.size)}
        waiting: dict[int, Any] = {}
        mail: dict[tuple[int, int], list[Any]] = {}
        results: dict[int, Any] = {}
        ready = dict.fromkeys(running)
        while len(results) < self.size:
            for rank, received in ready.items():
                try:
                    message = running[rank].send(received)
                except StopIteration as end:
                    results[rank] = end.value
                    continue
                self._deliver(rank, message, mail)
                waiting[rank] = message
            ready = {}
            for rank, message in list(waiting.items()):
                if message.source is None:
                    ready[rank] = None
                elif mail.get((message.source, rank)):
                    ready[rank] = mail[message.source, rank].pop(0)
                if rank in ready:
                    del waiting[rank]
            assert ready or len(results) == self.size, "every rank waits"
            self.rounds += 1
        assert not any(mail.values()), "a message that nobody has received"
        return [results[rank] for rank in range(self.size)]

    def _deliver(self, rank: int, message: Any, mail: dict[tuple[int, int], list[Any]]) -> None:
        for other in (message.to, message.source):
            if other is not None and other != rank:
                self.partners[rank].add(other)
                self.partners[other].add(rank)
        if message.to is not None:
            assert message.to != rank
            mail.setdefault((rank, message.to), []).append(message.content)


@pytest.mark.parametrize("size", SIZES)
def test_everything_arrives_in_rank_order(size: int) -> None:
    world = World(size)
    assert world.run(lambda rank: gather_all(rank, size, rank * rank)) == [[r * r for r in range(size)]] * size
    gathered = world.run(lambda rank: gather_first(rank, size, rank))
    assert gathered == [list(range(size)), *([[]] * (size - 1))]
    assert world.run(lambda rank: share_first(rank, size, f"from {rank}")) == ["from 0"] * size


@pytest.mark.parametrize("size", SIZES)
def test_parcels_reach_all_their_destinations_once(size: int) -> None:
    """Rank r sends to its whole row of 4, to itself, and to the rank that mirrors it; two parcels to the first."""

    def parcels(rank: int) -> list[Parcel]:
        row = tuple(r for r in range(size) if r // 4 == (rank * 3 % size) // 4)
        return [
            Parcel(row, rank, "a"),
            Parcel((rank,), rank, "b"),
            Parcel((size - 1 - rank,), rank, "c"),
            Parcel(row, rank, "d"),
        ]

    expected: list[list[tuple[int, str]]] = [[] for _ in range(size)]
    for rank in range(size):
        for parcel in parcels(rank):
            for destination in parcel.destinations:
                expected[destination].append((rank, parcel.content))
    received = World(size).run(lambda rank: route(rank, size, parcels(rank)))
    for got, wanted in zip(received, expected, strict=True):
        assert [parcel.source for parcel in got] == sorted(source for source, _ in wanted)
        assert sorted((parcel.source, parcel.content) for parcel in got) == sorted(wanted)


def test_connections_and_rounds_grow_with_the_logarithm() -> None:
    """4,096 ranks, each with two parcels: 12 rounds, and 2 log2 n - 1 = 23 connections (n / 2 ahead is n / 2 behind)."""
    size = 4096
    world = World(size)

    def parcels(rank: int) -> list[Parcel]:
        return [Parcel(((rank * 5 + 257 * i) % size,), rank, None) for i in range(2)]

    received = world.run(lambda rank: route(rank, size, parcels(rank)))
    assert sum(map(len, received)) == 2 * size
    assert world.rounds == 12 + 1  # and the one in which all have ended
    world.run(lambda rank: gather_first(rank, size, None))
    world.run(lambda rank: share_first(rank, size, None))
    assert max(map(len, world.partners)) == 2 * 12 - 1
    for holder in (1, 4095, 2730):
        hops = relay_path(holder)
        assert hops[-1] == 0 and len(hops) - 1 == holder.bit_count()
        assert all(after in world.partners[before] for before, after in zip(hops, hops[1:], strict=False))


@pytest.mark.parametrize("size", [3, 48, 200])
def test_other_worlds_have_few_connections_too(size: int) -> None:
    world = World(size)
    for rank_rounds in (gather_all, gather_first, share_first):
        world.run(lambda rank, rounds=rank_rounds: rounds(rank, size, None))
    world.run(lambda rank: route(rank, size, [Parcel(tuple(range(size)), rank, None)] if rank < 4 else []))
    assert max(map(len, world.partners)) <= 2 * math.ceil(math.log2(size))


@pytest.mark.parametrize("length", [0, 1, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, 3 * INLINE_BYTES])
def test_content_of_any_length_arrives_in_at_most_two_messages(length: int) -> None:
    content = bytes(number % 251 for number in range(length))
    sent = control.parts_of_message(content)
    assert [len(part) for part in sent] == [HEAD_BYTES, *([length - INLINE_BYTES] if length > INLINE_BYTES else [])]
    received = control.received_message(lambda part: part.copy_(sent.pop(0)))
    assert received.numpy().tobytes() == content and not sent


# -- where the stores of torch.distributed listen: nowhere in a world of one, on MASTER_ADDR alone under srun ----------


TIMEOUT = datetime.timedelta(seconds=60)


@pytest.fixture
def environment() -> Iterator[None]:
    """Changes of os.environ end with the test."""
    with mock.patch.dict(os.environ):
        for name in ("RANK", control.STORE_FILE, control.RUN_ID, "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name, None)
        yield


def under_srun(**changes: str) -> None:
    """Sets the variables of the only rank that a test starts; the store does not wait for the others."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **changes}


@pytest.mark.usefixtures("environment")
def test_a_world_of_one_listens_on_loopback_only() -> None:
    before = listeners(os.getpid())
    control.join_default_group("gloo", TIMEOUT)
    try:
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1] and os.environ["WORLD_SIZE"] == "1"
        assert {address for address, _ in listeners(os.getpid()) - before} == {"127.0.0.1"}  # gloo's
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(("ranks_here", "address"), [("2", "127.0.0.1"), ("1", "0.0.0.0")])
def test_rank_0_under_srun_listens_on_master_addr(ranks_here: str, address: str) -> None:
    """With ranks on another machine, a loopback MASTER_ADDR can only be this machine's own name for itself."""
    under_srun(LOCAL_WORLD_SIZE=ranks_here)
    port, before = int(os.environ["MASTER_PORT"]), listeners(os.getpid())
    store = control.tcp_store(0, 1, TIMEOUT)
    assert listeners(os.getpid()) - before == {(address, port)}
    store.set("key", "value")
    assert dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT).get("key") == b"value"


def test_ports_are_reserved() -> None:
    assert control.reserved_port() != control.reserved_port()
