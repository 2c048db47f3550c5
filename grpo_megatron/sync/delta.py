"""DeltaSync: full syncs, and between them patches of what has changed since. Exact: the engine gets the same bits.

A sync is full
- if it is the first one (also after a resume: nothing of this is in a checkpoint),
- after a sync that was not accepted: it failed, or another model was sent in between,
- every `full_every` syncs,
- if a larger share than `max_density` of the compared elements has changed.
All ranks agree on this from one sum of four numbers.

Each rank keeps two copies on the host: of the parts that its engine reads and other ranks send (the base of the patches,
kept.py), and of the parts that it sends itself: at most one training shard per rank. Not run on a GPU yet.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sync.exchange import Envelope, Exchange, Pool, Post, RankPlan, Shard, Wait, in_rounds
from grpo_megatron.sync.host_copies import KeptParts, host_copies
from grpo_megatron.sync.plan import PHASES
from grpo_megatron.types import WeightBucket

# -- Patch: the elements of a part whose bits have changed, exactly ----------------------------------------------------
# Two encodings, and the smaller one for each part:
# positions   4 bytes for each changed element
# bitmask     1 bit for each element of the part
# Both are followed by the values. The number of changed elements alone decides which it is, so no flag travels. Bits are
# compared, not values: NaN and the sign of zero travel too.

_INTEGERS = {2: torch.int16, 4: torch.int32}  # bytes of an element -> dtype with the same bits
_POSITION_BYTES = 4


@dataclass(frozen=True)
class Patch:
    """`where`: int32 [count], increasing, or a bitmask, uint8 [ceil(numel / 8)], lowest bit first. `values` [count]."""

    count: int
    where: Tensor
    values: Tensor


def _where_bytes(numel: int, count: int) -> tuple[int, bool]:
    """The size of the places of `count` changes in a part of `numel` elements, and whether they are a bitmask."""
    positions, mask = _POSITION_BYTES * count, -(-numel // 8)
    return min(positions, mask), positions > mask


def patch_bytes(numel: int, count: int, itemsize: int) -> int:
    """Size of an encoded patch."""
    return _where_bytes(numel, count)[0] + itemsize * count


def encode_patch(new: Tensor, old: Tensor) -> Patch:
    """The patch from `old` to `new`, [numel] each, on one device, where they are compared. The patch is on the host."""
    bits = _INTEGERS[new.element_size()]
    changed = new.view(bits) != old.view(bits)
    positions = changed.nonzero().flatten()  # waits for the device
    where = positions.to(torch.int32).cpu()
    if _where_bytes(new.numel(), len(where))[1]:
        where = torch.from_numpy(np.packbits(changed.cpu().numpy(), bitorder="little"))
    return Patch(len(positions), where, new[positions].cpu())


def apply_patch(patch: Patch, part: Tensor) -> None:
    """Set the changed elements of `part` [numel], which is on the host."""
    if patch.where.dtype == torch.int32:
        part[patch.where.long()] = patch.values
    else:
        bits = np.unpackbits(patch.where.numpy(), count=len(part), bitorder="little")
        part[torch.from_numpy(bits).bool()] = patch.values


def join_patches(patches: Sequence[Patch]) -> Tensor:
    """The bytes of a message: all positions, all values, all bitmasks. So everything is aligned to its element size."""
    positions = [p.where for p in patches if p.where.dtype == torch.int32]
    masks = [p.where for p in patches if p.where.dtype == torch.uint8]
    sections = [*positions, *(p.values for p in patches), *masks]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(section.view(torch.uint8) for section in sections)])


def split_patches(body: Tensor, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Patch]:
    """The inverse, as views of `body`, whose first byte is aligned to 8. `sizes`: (elements of the part, changes)."""
    places = [_where_bytes(numel, count) for numel, count in sizes]
    end_of_positions = sum(size for size, is_mask in places if not is_mask)
    end_of_values = end_of_positions + dtype.itemsize * sum(count for _, count in sizes)
    positions, values, masks = (
        iter(section.split(lengths))
        for section, lengths in (
            (body[:end_of_positions], [size for size, is_mask in places if not is_mask]),
            (body[end_of_positions:end_of_values], [dtype.itemsize * count for _, count in sizes]),
            (body[end_of_values:], [size for size, is_mask in places if is_mask]),
        )
    )
    patches = []
    for (_, count), (_, is_mask) in zip(sizes, places, strict=True):
        where = next(masks) if is_mask else next(positions).view(torch.int32)
        patches.append(Patch(count, where, next(values).view(dtype)))
    return patches


# -- Stamp: what a message of patches says about itself, so that a wrong one is refused before anything of it is applied


class Stamp(NamedTuple):
    """`base`: 64-bit digest of the history that the patch builds on. `sequence`: number of the sync since the start of the
    run. `place`: number of the message within the sync. All are int64 in the message."""

    base: int
    version: int
    sequence: int
    place: int
    source: int


STAMP_BYTES = 8 * (len(Stamp._fields) + 1)  # the fields and a checksum


def stamped(body: Tensor, stamp: Stamp) -> Tensor:
    """The message: stamp, CRC-32 of the body, and `body` (uint8, on the host)."""
    return torch.cat([torch.tensor([*stamp, zlib.crc32(body.numpy().data)]).view(torch.uint8), body])


def stamp_problem(message: Tensor, expected: Stamp) -> str | None:
    """Returns why a message on the host must be refused; None if it is the expected one."""
    *fields, checksum = message[:STAMP_BYTES].view(torch.int64).tolist()
    wrong = [
        f"{name} {got:#x}, expected {want:#x}" if name == "base" else f"{name} {got}, expected {want}"
        for name, got, want in zip(Stamp._fields, fields, expected, strict=True)
        if got != want
    ]
    actual = zlib.crc32(message[STAMP_BYTES:].numpy().data)
    if checksum != actual:
        wrong.append(f"checksum {checksum:#x}, its bytes have {actual:#x}")
    if not wrong:
        return None
    return f"a patch from rank {expected.source} was refused and not applied: {'; '.join(wrong)}"


# -- PatchExchange: sends patches along the routes of the plan, in its rounds ------------------------------------------
# counts      one message per peer and phase: how many elements have changed in each part of the sync
# (the ranks agree that all counts have arrived; the sizes of all following messages are then known)
# the rounds  patches, as `in_rounds` says; a rank that forwards a patch passes it on unread
# (the ranks agree that every message was the expected one; only then may a patch be applied)
#
# All ranks send all their messages, also after a local problem. Operations per rank: those of a full sync, and at most
# 4 (world size - 1) for the counts.

Agree = Callable[[str | None], None]


class PatchExchange:
    """One sync. `stamp`: of its messages, without place and source. `own`: the patch of each part that this rank sends
    and holds itself."""

    def __init__(self, plan: RankPlan, post: Post, stamp: Stamp, own: Mapping[int, Patch], pool: Pool) -> None:
        self._plan, self._post, self._stamp = plan, post, stamp
        self._dtype, self._device = pool.dtype, pool.device
        self._patches = dict(own)
        self._counts = {part: patch.count for part, patch in own.items()}
        self._problem: str | None = None
        self.bytes_received = 0

    def run(self, agree: Agree) -> dict[int, Patch]:
        """The patches of the parts that this rank receives, on the host. Raises what `agree` raises, on every rank."""
        for phase in PHASES:
            self._post_counts(phase)()
        agree(self._problem)
        for _ in in_rounds(len(self._plan.rounds), self._post_patches):
            pass
        agree(self._problem)
        return {part: self._patches[part] for part in self._plan.received}

    def _post_counts(self, phase: int) -> Wait:
        sent: dict[int, list[int]] = {}  # peer -> parts
        received: dict[int, list[int]] = {}
        for current in self._plan.rounds:
            for parts, messages in ((sent, current.sends[phase]), (received, current.receives[phase])):
                for peer, message in messages.items():
                    parts.setdefault(peer, []).extend(message.parts)
        bodies = {p: torch.tensor([self._counts[n] for n in parts]).view(torch.uint8) for p, parts in sent.items()}
        sizes = {peer: 8 * len(parts) for peer, parts in received.items()}

        def read(peer: int, body: Tensor, is_right: bool) -> None:
            counts = body.view(torch.int64).tolist() if is_right else [0] * len(received[peer])
            self._counts.update(zip(received[peer], counts, strict=True))

        return self._post_messages(bodies, sizes, -1 - phase, read)

    def _post_patches(self, phase: int, number: int) -> Wait:
        current, plan = self._plan.rounds[number], self._plan.plan
        bodies = {p: join_patches([self._patches[n] for n in m.parts]) for p, m in current.sends[phase].items()}
        parts = {
            peer: [(plan.numel(plan.parts[part]), self._counts[part]) for part in message.parts]
            for peer, message in current.receives[phase].items()
        }
        sizes = {p: sum(patch_bytes(*size, self._dtype.itemsize) for size in of_peer) for p, of_peer in parts.items()}

        def read(peer: int, body: Tensor, is_right: bool) -> None:
            patches = split_patches(body, parts[peer], self._dtype)
            self._patches.update(zip(current.receives[phase][peer].parts, patches, strict=True))

        return self._post_messages(bodies, sizes, 2 * number + phase, read)

    def _post_messages(
        self, bodies: dict[int, Tensor], sizes: dict[int, int], place: int, read: Callable[[int, Tensor, bool], None]
    ) -> Wait:
        """By peer. `Wait` also checks every message, and calls `read(peer, body, is the expected one)`."""
        stamp = self._stamp._replace(place=place)
        own = stamp._replace(source=self._plan.rank)
        sends = [(peer, stamped(body, own).to(self._device)) for peer, body in bodies.items()]
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        receives = [(peer, empty.new_empty(STAMP_BYTES + size)) for peer, size in sizes.items()]
        wait = self._post(sends, receives)

        def finish() -> None:
            wait()
            for peer, buffer in receives:
                message = buffer.cpu()
                problem = stamp_problem(message, stamp._replace(source=peer))
                self._problem = self._problem or problem
                read(peer, message[STAMP_BYTES:], problem is None)
                self.bytes_received += message.numel()

        return finish


# -- The syncs of a run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeltaLimits:
    """When a sync is full although it need not be."""

    full_every: int
    max_density: float


class DeltaSync:
    """The state of one rank over all syncs. Every rank makes the same calls.

    After a sync, `is_full`, `density` (changed / compared elements over all ranks; None: not compared) and
    `bytes_received` tell what it was.
    """

    def __init__(self, plan: RankPlan, post: Post, mesh: Mesh, *, pool: Pool, limits: DeltaLimits) -> None:
        """Allocates the copies on the host."""
        self._plan, self._post, self._mesh = plan, post, mesh
        self._pool, self._limits = pool, limits
        self._sent, self._base = host_copies(plan, plan.sent, pool), KeptParts(plan, pool)
        self._sequence, self._digest = 0, 0
        self._age = 0  # syncs since the last full one
        self._is_complete = self._is_accepted = False
        self.is_full, self.bytes_received = True, 0
        self.density: float | None = None

    def stream(self, read: Callable[[str], Tensor], version: int) -> Iterator[WeightBucket]:
        """The weights as `Exchange.stream` gives them. Collective. Raises what `Mesh.agree` raises.

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
        numbers = [
            changed,
            sum(kept.numel() for kept in self._sent.values()),
            int(not may_compare),
            int(problem is not None),
        ]
        changed, compared, votes, problems = self._mesh.total(numbers)
        if problems:
            self._mesh.agree(problem)
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
        for part, kept in self._sent.items():
            patches[part] = encode_patch(shard.part(part), kept.to(self._pool.device))
            apply_patch(patches[part], kept)
        return patches

    def _full(self, read: Callable[[str], Tensor], shard: Shard) -> Iterator[WeightBucket]:
        problem, exchange = None, None
        try:
            exchange = Exchange(self._plan, read, self._post, self._pool)
            for part, kept in self._sent.items():
                kept.copy_(shard.part(part))
        except (ValueError, RuntimeError) as error:  # RuntimeError: out of memory
            problem = f"cannot send weights: {error}"
        self._mesh.agree(problem)
        assert exchange is not None
        self.bytes_received = self._plan.elements_received * self._pool.dtype.itemsize
        yield from self._base.recorded(exchange.stream())

    def _changes(self, patches: dict[int, Patch], shard: Shard, version: int) -> Iterator[WeightBucket]:
        stamp = Stamp(self._digest, version, self._sequence, place=0, source=self._plan.rank)
        exchange = PatchExchange(self._plan, self._post, stamp, patches, self._pool)
        received = exchange.run(self._mesh.agree)
        self.bytes_received = exchange.bytes_received
        for part, patch in received.items():
            apply_patch(patch, self._base.parts[part])
        yield from self._base.stream(shard)


def _digest(history: object) -> int:
    """64 bits, signed."""
    return int.from_bytes(hashlib.blake2b(repr(history).encode(), digest_size=8).digest(), "little", signed=True)


# -- Two roles: the messages of full syncs, of each what has changed since the sync before -----------------------------
# A first message to each peer has the number of changes in each that follows (FULL: it is whole; 0: it is not sent). It is
# received in the background, and the others, whose sizes it gives, when they are needed: they are short. Digests attest them.

FULL = -1


class SentPatches:
    """On a rank that sends. `last`: the messages of the sync before, which nobody changes."""

    def __init__(self, limits: DeltaLimits) -> None:
        self._limits, self._last, self._age = limits, list[Tensor](), 0

    def messages(self, whole: list[Envelope]) -> list[Envelope]:
        """What travels in the place of the messages of a full sync."""
        self._age = (self._age + 1) % self._limits.full_every if self._last else 0
        counts: dict[int, list[int]] = {}
        out = []
        for number, (peer, new) in enumerate(whole):
            patch = encode_patch(new, self._last[number]) if self._age else None
            is_full = patch is None or patch.count > self._limits.max_density * new.numel()
            counts.setdefault(peer, []).append(FULL if patch is None or is_full else patch.count)
            if patch is None or is_full or patch.count:
                out.append((peer, new if patch is None or is_full else join_patches([patch])))
        self._last = [message for _, message in whole]
        return [*((peer, torch.tensor(of_peer)) for peer, of_peer in counts.items()), *out]


class ReceivedPatches:
    """On a rank that receives. `post` is that of an `Exchange` whose messages are all posted before the first is waited for."""

    def __init__(self, post: Post, is_sender: Callable[[int], bool]) -> None:
        self._post, self._is_sender = post, is_sender
        self._whole: list[Tensor] = []  # the messages of the last sync
        self._buffers: list[Envelope] = []  # where those of the next one belong
        self._counts: dict[int, Tensor] = {}
        self._wait: Wait | None = None
        self.bytes_received = 0

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Wait:
        """Messages of other ranks that receive are as they are."""
        if not receives or not self._is_sender(receives[0][0]):
            return self._post(sends, receives)
        first = len(self._buffers)
        self._buffers += receives

        def wait() -> None:
            if self._wait is not None:
                self._receive()
            for number, (_, buffer) in enumerate(receives, start=first):
                buffer.copy_(self._whole[number])

        return wait

    def expect(self) -> None:
        """All messages of the next sync are posted."""
        numbers = Counter(peer for peer, _ in self._buffers)
        self._counts = {peer: torch.empty(number, dtype=torch.int64) for peer, number in numbers.items()}
        self._wait = self._post([], list(self._counts.items()))

    def _receive(self) -> None:
        assert self._wait is not None
        self._wait()
        left = {peer: counts.tolist() for peer, counts in self._counts.items()}
        counts = [left[peer].pop(0) for peer, _ in self._buffers]
        self._whole = self._whole or [torch.empty_like(buffer) for _, buffer in self._buffers]
        bodies = []
        for (_, buffer), whole, count in zip(self._buffers, self._whole, counts, strict=True):
            size = patch_bytes(buffer.numel(), max(count, 0), buffer.itemsize)
            bodies.append(whole if count == FULL else torch.empty(size, dtype=torch.uint8))
        arriving = [(peer, body) for (peer, _), body, n in zip(self._buffers, bodies, counts, strict=True) if n]
        self._post([], arriving)()
        for whole, body, count in zip(self._whole, bodies, counts, strict=True):
            if count > 0:
                apply_patch(split_patches(body, [(whole.numel(), count)], whole.dtype)[0], whole)
        self.bytes_received = sum(body.nbytes for _, body in arriving)
        self._buffers, self._wait = [], None
