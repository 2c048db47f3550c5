"""Neighbours: collectives of host-side values in which a rank talks only to the ranks at distances 1, 2, 4, 8, ...

A full mesh of n ranks has n (n - 1) / 2 connections: at 4,096 ranks 4,095 for each rank, and as many messages per all-to-all.
Here a rank has at most 2 ceil(log2 n) connections (23 at 4,096 ranks) and sends ceil(log2 n) messages per operation. The
algorithms are those of Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
systems" (IEEE TPDS 8(11), 1997), for any n.

    gather_all     each round doubles what a rank knows. Every rank sends and receives the whole once.
    gather_first   a binomial tree that ends at rank 0
    share_first    the same tree, from rank 0 to all
    route          a parcel at distance d makes one hop for each bit of d: at most log2 n hops, half of that on average.
                   Departure from Bruck: a parcel may have several destinations, and one copy serves all that lie ahead.

Each algorithm is a generator: it yields the message of a round, and is sent what this rank receives in it. `over` runs one on
a process group; a test or a benchmark can run those of thousands of ranks in one process.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

SIZE = struct.Struct("=q")  # bytes of a message's content
HEAD_BYTES = 16384  # gloo's thread has to get a core for each message, 1 to 3 ms on busy ones: most need one message
INLINE_BYTES = HEAD_BYTES - SIZE.size


class Hop(NamedTuple):
    """One round of one rank. None: it sends, or receives, nothing. The content is pickled."""

    to: int | None
    source: int | None
    content: Any = None


class Parcel(NamedTuple):
    """What rank `source` sends to the ranks `destinations`."""

    destinations: tuple[int, ...]
    source: int
    content: Any


Hops = Generator[Hop, Any, T]


def gather_all(rank: int, size: int, own: T) -> Hops[list[T]]:
    """The values of all ranks, in rank order, on every rank."""
    known = [own]  # of the ranks from this one on, in order
    distance = 1
    while distance < size:
        known += yield Hop((rank - distance) % size, (rank + distance) % size, known[: size - distance])
        distance *= 2
    return known[size - rank :] + known[: size - rank]


def gather_first(rank: int, size: int, own: T) -> Hops[list[T]]:
    """The values of all ranks, in rank order, on rank 0; an empty list on the others."""
    known = [own]
    distance = 1
    while distance < size:
        if rank & distance:
            yield Hop(rank - distance, None, known)
            return []
        if rank + distance < size:
            known += yield Hop(None, rank + distance)
        distance *= 2
    return known


def share_first(rank: int, size: int, own: T) -> Hops[T]:
    """The value of rank 0, on every rank."""
    distance = rank & -rank
    if rank:
        own = yield Hop(None, rank - distance)
    else:
        distance = 1 << (size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if rank + distance < size:
            yield Hop(rank + distance, None, own)
    return own


def route(rank: int, size: int, parcels: Sequence[Parcel]) -> Hops[list[Parcel]]:
    """The parcels of all ranks for this one, by source, and those of one source in the order in which it gave them."""
    held = list(parcels)
    distance = 1
    while distance < size:
        ahead, staying = [], []
        for parcel in held:
            far = tuple([d for d in parcel.destinations if (d - rank) % size & distance])
            if not far:
                staying.append(parcel)
            elif len(far) == len(parcel.destinations):
                ahead.append(parcel)
            else:
                near = tuple([d for d in parcel.destinations if d not in far])
                ahead.append(parcel._replace(destinations=far))
                staying.append(parcel._replace(destinations=near))
        held = staying + (yield Hop((rank + distance) % size, (rank - distance) % size, ahead))
        distance *= 2
    assert all(parcel.destinations == (rank,) for parcel in held), "a parcel is on a rank that it is not for"
    return sorted(held, key=lambda parcel: parcel.source)


def over(rounds: Hops[T], group: Any, first: int = 0) -> T:
    """Collective: run the rounds of this rank. `group` has the ranks of the world; rank 0 of the rounds is its rank `first`."""
    received: Any = None
    while True:
        try:
            message = rounds.send(received)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        received = _swap(message, group, first)


def _swap(message: Hop, group: Any, first: int) -> Any:
    works = []
    if message.to is not None:
        content = pickle.dumps(message.content, protocol=pickle.HIGHEST_PROTOCOL)
        works = [dist.isend(part, first + message.to, group) for part in _parts(content)]
    received = None
    if message.source is not None:
        received = pickle.loads(_receive(first + message.source, group).numpy().data)
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()
    return received


def _parts(content: bytes) -> list[Tensor]:
    """What is sent: HEAD_BYTES with the size and the beginning of the content, then the rest, if there is one."""
    begin, rest = content[:INLINE_BYTES], content[INLINE_BYTES:]
    head = (SIZE.pack(len(content)) + begin).ljust(HEAD_BYTES, b"\0")
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (head, rest) if part]


def _receive(source: int, group: Any) -> Tensor:
    """The content that rank `source` has sent, uint8 [bytes]."""
    head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
    dist.recv(head, source, group)
    size, inline = SIZE.unpack_from(head.numpy().data)[0], head[SIZE.size :]
    if size <= INLINE_BYTES:
        return inline[:size]
    content = torch.empty(size, dtype=torch.uint8)
    content[:INLINE_BYTES] = inline
    dist.recv(content[INLINE_BYTES:], source, group)
    return content
