"""Patches: syncs that send the elements whose bits have changed since the sync before (`rollout.sync: delta`).

PatchCodec decides when a sync is full, and PatchExchange sends patches along the routes of the plan. Exact: the engine gets
the same bits. Not run on a GPU yet.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.sync.exchange import LocalWeights, Pool, RankPlan, ReadParameter, Transport, Wait, in_rounds
from grpo_megatron.sync.plan import AHEAD, NETWORK, NODE, RELAY
from grpo_megatron.types import WeightBucket

# -- Patch: the elements of a slice whose bits have changed ------------------------------------------------------------
# Two encodings, and the smaller one for each slice:
# positions   4 bytes for each changed element
# bitmask     1 bit for each element of the slice
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
    """The size of the places of `count` changes in a slice of `numel` elements, and whether they are a bitmask."""
    positions, mask = _POSITION_BYTES * count, -(-numel // 8)
    return min(positions, mask), positions > mask


def patch_bytes(numel: int, count: int, itemsize: int) -> int:
    """Return the size of an encoded patch."""
    return _where_bytes(numel, count)[0] + itemsize * count


def encode_patch(new: Tensor, old: Tensor) -> Patch:
    """Make the patch from `old` to `new`, [numel] each, on one device, where they are compared. The patch is on the host."""
    bits = _INTEGERS[new.element_size()]
    changed = new.view(bits) != old.view(bits)
    positions = changed.nonzero().flatten()  # waits for the device
    where = positions.to(torch.int32).cpu()
    if _where_bytes(new.numel(), len(where))[1]:
        where = torch.from_numpy(np.packbits(changed.cpu().numpy(), bitorder="little"))
    return Patch(len(positions), where, new[positions].cpu())


def apply_patch(patch: Patch, target: Tensor) -> None:
    """Set the changed elements of `target` [numel], which is on the host."""
    if patch.where.dtype == torch.int32:
        target[patch.where.long()] = patch.values
    else:
        bits = np.unpackbits(patch.where.numpy(), count=len(target), bitorder="little")
        target[torch.from_numpy(bits).bool()] = patch.values


def join_patches(patches: Sequence[Patch]) -> Tensor:
    """Join the bytes of a message: all positions, all values, all bitmasks. So everything is aligned to its element size."""
    positions = [p.where for p in patches if p.where.dtype == torch.int32]
    masks = [p.where for p in patches if p.where.dtype == torch.uint8]
    sections = [*positions, *(p.values for p in patches), *masks]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(section.view(torch.uint8) for section in sections)])


def split_patches(body: Tensor, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Patch]:
    """Split a message into views of `body`, whose first byte is aligned to 8. `sizes`: (elements of the slice, changes)."""
    places = [_where_bytes(numel, count) for numel, count in sizes]
    lengths = {
        "positions": [size for size, is_mask in places if not is_mask],
        "values": [dtype.itemsize * count for _, count in sizes],
        "masks": [size for size, is_mask in places if is_mask],
    }
    sections = body.split([sum(of_section) for of_section in lengths.values()])
    positions, values, masks = (
        iter(section.split(of_section)) for section, of_section in zip(sections, lengths.values(), strict=True)
    )
    return [
        Patch(count, next(masks) if is_mask else next(positions).view(torch.int32), next(values).view(dtype))
        for (_, count), (_, is_mask) in zip(sizes, places, strict=True)
    ]


# -- Messages ----------------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    """The beginning of a message of patches: a wrong message is refused before anything of it is applied.

    `base`: 64-bit digest of the history that the patch builds on. `sequence`: number of the sync since the start of the
    run. `place`: number of the round; -1: counts. All are int64 in the message.
    """

    base: int
    version: int
    sequence: int
    place: int
    source: int


HEADER_BYTES = 8 * (len(Header._fields) + 1)  # the fields and a checksum


def with_header(body: Tensor, header: Header) -> Tensor:
    """Make the message: header, CRC-32 of the body, and `body` (uint8, on the host)."""
    return torch.cat([torch.tensor([*header, zlib.crc32(body.numpy().data)]).view(torch.uint8), body])


def header_problem(message: Tensor, expected: Header) -> str | None:
    """Say why a message on the host must be refused; None if it is the expected one."""
    *fields, checksum = message[:HEADER_BYTES].view(torch.int64).tolist()
    wrong = [
        f"{name} {got:#x}, expected {want:#x}" if name == "base" else f"{name} {got}, expected {want}"
        for name, got, want in zip(Header._fields, fields, expected, strict=True)
        if got != want
    ]
    actual = zlib.crc32(message[HEADER_BYTES:].numpy().data)
    if checksum != actual:
        wrong.append(f"checksum {checksum:#x}, its bytes have {actual:#x}")
    if not wrong:
        return None
    return f"a patch from rank {expected.source} was refused and not applied: {'; '.join(wrong)}"


Agree = Callable[[str | None], None]
Sent = tuple[int, Tensor]  # peer, message


class PatchExchange:
    """One sync of patches along the routes of the plan, in its rounds.

    counts      one message per peer and phase: how many elements have changed in each slice of the sync
    (the ranks agree that all counts have arrived; the sizes of all following messages are then known)
    the rounds  patches, as `in_rounds` says; a rank that relays a patch passes it on unread
    (the ranks agree that every message was the expected one; only then may a patch be applied)

    All ranks send all their messages, also after a local problem. Operations per rank: those of a full sync, and at most
    4 (world size - 1) for the counts (a rank is a peer in one phase, or sends in one and receives in another).
    """

    def __init__(
        self, plan: RankPlan, transport: Transport, header: Header, local: Mapping[int, Patch], dtype: torch.dtype
    ) -> None:
        """`header`: without place and source. `local`: the patch of each slice that this rank sends and has itself."""
        self._plan, self._transport, self._header, self._dtype = plan, transport, header, dtype
        self._patches = dict(local)
        self._counts = {number: patch.count for number, patch in local.items()}
        self._problem: str | None = None
        self.bytes_received = 0

    def run(self, agree: Agree) -> dict[int, Patch]:
        """Return the patches of the slices that this rank receives, on the host. Raises what `agree` raises."""
        for phase in (NETWORK, RELAY, NODE):
            self._post_counts(phase)()
        agree(self._problem)
        for _ in in_rounds(len(self._plan.rounds), self._post_patches, has_relays=self._plan.has_relays):
            pass
        agree(self._problem)
        return {number: self._patches[number] for number in self._plan.received}

    def _post_counts(self, phase: int) -> Wait:
        sent: dict[int, list[int]] = {}  # peer -> slices
        received: dict[int, list[int]] = {}
        for current in self._plan.rounds:
            for numbers, messages in ((sent, current.sends[phase]), (received, current.receives.get(phase, []))):
                for message in messages:
                    numbers.setdefault(message.peer, []).extend(message.numbers)
        counts = {p: torch.tensor([self._counts[n] for n in numbers]).view(torch.uint8) for p, numbers in sent.items()}
        sends = [(peer, self._message(body, -1)) for peer, body in counts.items()]
        sizes = {peer: 8 * len(numbers) for peer, numbers in received.items()}

        def read(peer: int, body: Tensor, is_right: bool) -> None:
            counts = body.view(torch.int64).tolist() if is_right else [0] * len(received[peer])
            self._counts.update(zip(received[peer], counts, strict=True))

        return self._post_messages(phase, sends, sizes, -1, read)

    def _post_patches(self, phase: int, number: int) -> Wait:
        rounds, plan = self._plan.rounds, self._plan.plan
        sends = self._sends(phase, number) + (self._sends(RELAY, number - AHEAD) if phase == NETWORK else [])
        received = rounds[number].receives[phase] if number < len(rounds) else ()
        numbers = {message.peer: message.numbers for message in received}
        changes = {
            p: [(plan.numel(plan.slices[n]), self._counts[n]) for n in of_peer] for p, of_peer in numbers.items()
        }
        sizes = {p: sum(patch_bytes(*c, self._dtype.itemsize) for c in of_peer) for p, of_peer in changes.items()}

        def read(peer: int, body: Tensor, is_right: bool) -> None:
            self._patches.update(zip(numbers[peer], split_patches(body, changes[peer], self._dtype), strict=True))

        return self._post_messages(phase, sends, sizes, number, read)

    def _sends(self, phase: int, number: int) -> list[Sent]:
        """The messages that a round sends in a phase; none outside the rounds."""
        messages = self._plan.rounds[number].sends[phase] if 0 <= number < len(self._plan.rounds) else ()
        bodies = ((m.peer, join_patches([self._patches[n] for n in m.numbers])) for m in messages)
        return [(peer, self._message(body, number)) for peer, body in bodies]

    def _message(self, body: Tensor, place: int) -> Tensor:
        header = self._header._replace(place=place, source=self._plan.rank)
        return with_header(body, header).to(self._transport.buffers.device)

    def _post_messages(
        self,
        phase: int,
        sends: list[Sent],
        sizes: dict[int, int],
        place: int,
        read: Callable[[int, Tensor, bool], None],
    ) -> Wait:
        """Post by peer. `Wait` also checks every message, and calls `read(peer, body, is the expected one)`."""
        header, device = self._header._replace(place=place), self._transport.buffers.device
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        receives = [(peer, empty.new_empty(HEADER_BYTES + size)) for peer, size in sizes.items()]
        wait = self._transport.start(phase, sends, receives)

        def finish() -> None:
            wait()
            for peer, buffer in receives:
                message = buffer.cpu()
                problem = header_problem(message, header._replace(source=peer))
                self._problem = self._problem or problem
                read(peer, message[HEADER_BYTES:], problem is None)
                self.bytes_received += message.numel()

        return finish


def history_digest(history: object) -> int:
    """Return 64 bits, signed."""
    return int.from_bytes(hashlib.blake2b(repr(history).encode(), digest_size=8).digest(), "little", signed=True)


# -- Copies on the host ------------------------------------------------------------------------------------------------


def host_copies(plan: RankPlan, numbers: list[int], pool: Pool) -> dict[int, Tensor]:
    """Allocate memory for the values of these slices, each as one dimension. Pinned for a GPU."""
    host = Pool(pool.dtype, torch.device("cpu"), is_pinned=pool.device.type != "cpu")
    return dict(zip(numbers, host.empty_all(plan.plan.numel(plan.plan.slices[n]) for n in numbers), strict=True))


class ReceivedSlices:
    """Copies on the host of the weights that an engine reads and other ranks send, by the number of the slice.

    An engine cannot give its weights back: vLLM packs or quantises them. So a sync that sends less than the weights builds
    on these copies: patches, or adapters (models/lora/sync.py). At most one engine shard per rank, in the weights' dtype.
    """

    def __init__(self, plan: RankPlan, pool: Pool) -> None:
        self._plan, self._pool = plan, pool
        self._of_tensor: dict[int, list[int]] = {}  # tensor -> numbers of slices
        for number in plan.received:
            self._of_tensor.setdefault(plan.plan.slices[number].tensor, []).append(number)
        self.copies = host_copies(plan, plan.received, pool)

    def recorded(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """Yield the buckets of a full sync, and copy their slices."""
        for bucket in buckets:
            for name, tensor in bucket:
                for copy, view in self._pairs(self._plan.number_of[name], tensor):
                    copy.copy_(view)
            yield bucket

    def stream(self, read: ReadParameter) -> Iterator[WeightBucket]:
        """Yield the same buckets without a message: what the rank has itself by `read`, the rest from the copies."""
        local = LocalWeights(self._plan, read, self._pool)
        for current in self._plan.rounds:
            bucket = []
            for number in current.complete:
                tensor = local.begin(number)
                for copy, view in self._pairs(number, tensor):
                    view.copy_(copy, non_blocking=True)
                bucket.append((self._plan.tensor(number).name, tensor))
            local.copy()
            local.forget()
            if bucket:
                yield bucket

    def _pairs(self, tensor: int, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The copies of a tensor's slices, and views of their places in the full-shaped tensor."""
        axis = self._plan.tensor(tensor).axis
        for number in self._of_tensor.get(tensor, []):
            _, start, stop, *_ = self._plan.plan.slices[number]
            view = values.narrow(axis, start, stop - start)
            yield self.copies[number].view(view.shape), view
