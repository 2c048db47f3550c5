"""The collectives between neighbours, run for all ranks of a world in this process; no connection is made.

Every algorithm of n ranks is a list of generators, stepped together: each yields its message of the round, which is delivered
before the next round. What a run of 4,096 ranks needs is counted: rounds and partners of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

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
def test_content_of_any_length_arrives_in_at_most_two_messages(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(number % 251 for number in range(length))
    sent = control._parts(content)
    assert [len(part) for part in sent] == [HEAD_BYTES, *([length - INLINE_BYTES] if length > INLINE_BYTES else [])]
    monkeypatch.setattr(control.dist, "recv", lambda buffer, source, group: buffer.copy_(sent.pop(0)))
    assert control._receive(0, None).numpy().tobytes() == content and not sent
