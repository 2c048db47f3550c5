"""DeltaSync: full syncs, and between them patches of what has changed since. Exact: the engine gets the same bits.

A sync is full
- if it is the first one (also after a resume: nothing of this is in a checkpoint),
- after a sync that was not accepted: it failed, or another model was sent in between,
- every `full_every` syncs,
- if a larger share than `max_density` of the compared elements has changed.
All ranks agree on this from one sum of four numbers.

Each rank keeps two copies on the host: of the parts that its engine reads and other ranks send (the base of the patches),
and of the parts that it sends itself. At most one engine shard and one training shard per rank, in the weights' dtype. Not run
on a GPU yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo_megatron.sync.exchange import Exchange, Pool, Shard, Transport, part_of
from grpo_megatron.sync.patches import Patch, PatchExchange, Stamp, apply_patch, encode_patch
from grpo_megatron.sync.rounds import RankPlan
from grpo_megatron.types import WeightBucket

# -- Base: the values that a patch builds on ---------------------------------------------------------------------------

_BLOCK_BYTES = 1 << 26  # torch rounds pinned memory up to a power of two: blocks of that size waste little


class HostBase:
    """The values that a patch builds on: parts by their number in the plan, each as one dimension, in copies on the host.

    They are what an engine's shard was last given, or what this rank has last sent.

    An engine cannot give its weights back: vLLM packs or quantises them. So the host keeps them, as sleep level 1 of vLLM
    does too. Pinned for a GPU; not run on a GPU yet.
    """

    def __init__(self, sizes: Mapping[int, int], dtype: torch.dtype, *, pinned: bool) -> None:
        """`sizes`: part -> elements."""
        self._parts: dict[int, Tensor] = {}
        block, used = torch.empty(0, dtype=dtype), 0
        for part, size in sizes.items():
            if used + size > block.numel():
                whole = max(size, _BLOCK_BYTES // dtype.itemsize) if pinned else size
                block, used = torch.empty(whole, dtype=dtype, pin_memory=pinned), 0
            self._parts[part] = block[used : used + size]
            used += size

    @property
    def numel(self) -> int:
        return sum(kept.numel() for kept in self._parts.values())

    def parts(self) -> Iterable[int]:
        return self._parts

    def read(self, part: int) -> Tensor:
        return self._parts[part]

    def store(self, part: int, values: Tensor) -> None:
        kept = self._parts[part]
        kept.copy_(values.reshape(kept.shape))

    def update(self, part: int, patch: Patch) -> None:
        apply_patch(patch, self._parts[part])


@dataclass(frozen=True)
class DeltaLimits:
    """When a sync is full although it need not be."""

    full_every: int
    max_density: float


class Ranks(Protocol):
    """The collectives of a Mesh that a delta sync needs."""

    def agree(self, problem: str | None) -> None: ...

    def total(self, values: list[int]) -> list[int]: ...


class DeltaSync:
    """The state of one rank over all syncs. Every rank makes the same calls.

    After a sync, `is_full`, `density` (changed / compared elements over all ranks; None: not compared) and
    `bytes_received` tell what it was.
    """

    def __init__(
        self,
        plan: RankPlan,
        transport: Transport,
        ranks: Ranks,
        *,
        pool: Pool,
        limits: DeltaLimits,
    ) -> None:
        """Allocates the copies on the host."""
        self._plan, self._transport, self._ranks = plan, transport, ranks
        self._pool, self._limits = pool, limits
        sent, received = plan.sent(), plan.received()
        self._received: dict[int, list[int]] = {}  # tensor -> parts
        for part in received:
            self._received.setdefault(plan.plan.parts[part].tensor, []).append(part)
        pinned = pool.device.type != "cpu"
        self._sent = HostBase(_sizes(plan, sent), pool.dtype, pinned=pinned)
        self._base = HostBase(_sizes(plan, received), pool.dtype, pinned=pinned)
        self._sequence, self._digest = 0, 0
        self._age = 0  # syncs since the last full one
        self._is_complete = self._is_accepted = False
        self.is_full, self.bytes_received = True, 0
        self.density: float | None = None

    def stream(self, read: Callable[[str], Tensor], version: int) -> Iterator[WeightBucket]:
        """The weights as `Exchange.stream` gives them. Collective. Raises what `ranks.agree` raises.

        A patch that is not the expected one is refused before anything is applied, on all ranks.
        """
        may_compare = self._is_accepted and self._age + 1 < self._limits.full_every
        self._is_accepted = self._is_complete = False
        self._sequence += 1
        shard, patches, problem = Shard(self._plan, read, self._pool), dict[int, Patch](), None
        try:
            patches = self._encode(shard) if may_compare else {}
        except (ValueError, RuntimeError) as error:  # RuntimeError: out of memory
            problem = f"cannot compare weights: {error}"
        changed = sum(patch.count for patch in patches.values())
        numbers = [changed, self._sent.numel, int(not may_compare), int(problem is not None)]
        changed, compared, votes, problems = self._ranks.total(numbers)
        if problems:
            self._ranks.agree(problem)
        self.density = None if votes else changed / max(compared, 1)
        self.is_full = self.density is None or self.density > self._limits.max_density
        if self.is_full:
            yield from self._full(read, shard)
        else:
            yield from self._changes(patches, shard, version)
        builds_on = None if self.is_full else self._digest
        self._digest = _digest((self._plan.plan.digest, builds_on, self._sequence, version, changed))
        self._age = 0 if self.is_full else self._age + 1
        self._is_complete = True

    def accept(self, weights_digest: str) -> None:
        """The engine holds the last stream's weights, whose digest this is: the next sync may send changes to them."""
        self._is_accepted = self._is_complete
        self._digest = _digest((self._digest, weights_digest))

    def _encode(self, shard: Shard) -> dict[int, Patch]:
        patches = {}
        for part in self._sent.parts():
            patches[part] = encode_patch(shard.part(part), self._sent.read(part).to(self._pool.device))
            self._sent.update(part, patches[part])
        return patches

    def _full(self, read: Callable[[str], Tensor], shard: Shard) -> Iterator[WeightBucket]:
        problem, exchange = None, None
        try:
            exchange = Exchange(self._plan, read, self._transport, self._pool)
            for part in self._sent.parts():
                self._sent.store(part, shard.part(part))
        except (ValueError, RuntimeError) as error:  # RuntimeError: out of memory
            problem = f"cannot send weights: {error}"
        self._ranks.agree(problem)
        assert exchange is not None
        self.bytes_received = self._base.numel * self._pool.dtype.itemsize
        numbers = {tensor.name: number for number, tensor in enumerate(self._plan.plan.tensors)}
        for bucket in exchange.stream():
            for name, tensor in bucket:
                for part in self._received.get(numbers[name], []):
                    axis = self._plan.tensor(numbers[name]).axis
                    self._base.store(part, part_of(tensor, self._plan.plan.parts[part], axis))
            yield bucket

    def _changes(self, patches: dict[int, Patch], shard: Shard, version: int) -> Iterator[WeightBucket]:
        stamp = Stamp(self._digest, version, self._sequence, place=0, source=self._plan.rank)
        exchange = PatchExchange(self._plan, self._transport, stamp, patches, self._pool.dtype, self._pool.device)
        received = exchange.run(self._ranks.agree)
        self.bytes_received = exchange.bytes_received
        for part, patch in received.items():
            self._base.update(part, patch)
        for current in self._plan.rounds:
            bucket = [(self._plan.tensor(tensor).name, self._patched(shard, tensor)) for tensor in current.complete]
            shard.forget()
            if bucket:
                yield bucket

    def _patched(self, shard: Shard, tensor: int) -> Tensor:
        """A full-shaped tensor. The rank's own parts come from its parameters, the others from the base."""
        out, axis = shard.begin(tensor), self._plan.tensor(tensor).axis
        for number in self._received.get(tensor, []):
            target = part_of(out, self._plan.plan.parts[number], axis)
            target.copy_(self._base.read(number).view(target.shape), non_blocking=True)
        return out


def _sizes(plan: RankPlan, parts: list[int]) -> dict[int, int]:
    return {part: plan.plan.numel(plan.plan.parts[part]) for part in parts}


def _digest(history: object) -> int:
    """64 bits, signed."""
    return int.from_bytes(hashlib.blake2b(repr(history).encode(), digest_size=8).digest(), "little", signed=True)
