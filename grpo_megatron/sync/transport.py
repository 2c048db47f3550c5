"""Transport: how the messages of one phase travel. Point-to-point operations of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from grpo_megatron.parallel.mesh import RankError

Envelope = tuple[int, Tensor]  # (peer, contiguous one-dimensional buffer)


class Transport(Protocol):
    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Callable[[], None]:
        """Start all of them at once. The function that is returned waits until the buffers may be read and reused."""


class PointToPoint:
    """Messages in one group of operations per phase: NCCL runs them as one kernel, gloo side by side.

    All ranks post the phases of a sync in the same order, so messages between two ranks need no tag.
    """

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Callable[[], None]:
        operations = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in receives]
        operations += [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in sends]
        if not operations:
            return lambda: None
        works = dist.batch_isend_irecv(operations)
        peers = [peer for peer, _ in (*receives, *sends)]
        names = peers if len(works) == len(peers) else [sorted(set(peers))] * len(works)  # NCCL: one work for the group

        def wait() -> None:
            for work, peer in zip(works, names, strict=True):
                try:
                    work.wait()
                except RuntimeError as error:
                    raise RankError(f"the weight sync lost its connection to rank {peer}: {error}") from error

        return wait
