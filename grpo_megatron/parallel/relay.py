"""Relay: bytes of one rank after the other to rank 0, which writes them to a file.

A gather would hold the parts of all ranks in the memory of rank 0. Here it holds one part. Between the holder and rank 0 the
bytes go through at most log2(world size) ranks, which are neighbours: rank 0 gets no connection to each holder.
"""

from __future__ import annotations

from collections.abc import Callable

from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.parallel.neighbours import Hop, Hops, over


def relay(holder: int, make: Callable[[], bytes], mesh: Mesh) -> bytes | None:
    """`make()` of rank `holder`, on rank 0; None on the other ranks. `make` is called on the holder only.

    The ranks between the two communicate, over the control group. All other ranks return at once.
    """
    return over(_hops(mesh.rank, holder, make), mesh.control)


def path(holder: int) -> list[int]:
    """From the holder to rank 0: each hop clears the lowest bit that is set."""
    ranks = [holder]
    while ranks[-1]:
        ranks.append(ranks[-1] & (ranks[-1] - 1))
    return ranks


def _hops(rank: int, holder: int, make: Callable[[], bytes]) -> Hops[bytes | None]:
    ranks = path(holder)
    if rank not in ranks:
        return None
    place = ranks.index(rank)
    content: bytes = make() if rank == holder else (yield Hop(None, ranks[place - 1]))
    if rank != 0:
        yield Hop(ranks[place + 1], None, content)
        return None
    return content
