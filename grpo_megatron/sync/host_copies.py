"""KeptParts: copies on the host of the weights that an engine reads and other ranks send.

An engine cannot give its weights back: vLLM packs or quantises them. So a sync that sends less than the weights builds on
these copies: patches (delta.py), or adapters (models/lora/sync.py). At most one engine shard per rank, in the weights' dtype.
Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from grpo_megatron.sync.exchange import Pool, RankPlan, Shard, part_of
from grpo_megatron.types import WeightBucket

_BLOCK_BYTES = 1 << 26  # torch rounds pinned memory up to a power of two: blocks of that size waste little


def host_copies(plan: RankPlan, parts: list[int], pool: Pool) -> dict[int, Tensor]:
    """Memory for the values of these parts, each as one dimension. Pinned for a GPU."""
    copies: dict[int, Tensor] = {}
    pinned = pool.device.type != "cpu"
    block, used = torch.empty(0, dtype=pool.dtype), 0
    for part in parts:
        size = plan.plan.numel(plan.plan.parts[part])
        if used + size > block.numel():
            whole = max(size, _BLOCK_BYTES // pool.dtype.itemsize) if pinned else size
            block, used = torch.empty(whole, dtype=pool.dtype, pin_memory=pinned), 0
        copies[part] = block[used : used + size]
        used += size
    return copies


class KeptParts:
    """`parts`: the copies, by the number of the part, one-dimensional."""

    def __init__(self, plan: RankPlan, pool: Pool) -> None:
        self._plan = plan
        self._of_tensor: dict[int, list[int]] = {}  # tensor -> parts
        for part in plan.received:
            self._of_tensor.setdefault(plan.plan.parts[part].tensor, []).append(part)
        self._numbers = {tensor.name: number for number, tensor in enumerate(plan.plan.tensors)}
        self.parts = host_copies(plan, plan.received, pool)

    def recorded(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """The buckets of a full sync, of which the parts are kept."""
        for bucket in buckets:
            for name, tensor in bucket:
                for kept, part in self._pairs(self._numbers[name], tensor):
                    kept.copy_(part)
            yield bucket

    def stream(self, shard: Shard) -> Iterator[WeightBucket]:
        """The same buckets without a message: the rank's own parts from `shard`, the others from the copies."""
        for current in self._plan.rounds:
            bucket = []
            for number in current.complete:
                tensor = shard.begin(number)
                for kept, part in self._pairs(number, tensor):
                    part.copy_(kept, non_blocking=True)
                bucket.append((self._plan.tensor(number).name, tensor))
            shard.copy()
            shard.forget()
            if bucket:
                yield bucket

    def _pairs(self, number: int, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The copies of a tensor's parts, and their places in the full-shaped tensor."""
        for part in self._of_tensor.get(number, []):
            place = part_of(tensor, self._plan.plan.parts[part], self._plan.tensor(number).axis)
            yield self.parts[part].view(place.shape), place
