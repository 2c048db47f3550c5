"""Relay: bytes of one rank after the other to rank 0, which writes them to a file.

A gather would hold the parts of all ranks in the memory of rank 0, each padded to the longest. Here it holds one part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from grpo_megatron.parallel.mesh import Mesh


def relay(holder: int, make: Callable[[], bytes], mesh: Mesh) -> bytes | None:
    """`make()` of rank `holder`, on rank 0; None on the other ranks. `make` is called on the holder only.

    `holder` and rank 0 communicate, over the control group. All other ranks return at once.
    """
    if mesh.rank not in (0, holder):
        return None
    if mesh.rank == holder:
        content = make()
        if holder == 0:
            return content
        dist.send(torch.tensor([len(content)]), dst=0, group=mesh.control)
        if content:
            dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), dst=0, group=mesh.control)
        return None
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, src=holder, group=mesh.control)
    received = torch.empty(int(size), dtype=torch.uint8)
    if len(received):
        dist.recv(received, src=holder, group=mesh.control)
    return received.numpy().tobytes()
