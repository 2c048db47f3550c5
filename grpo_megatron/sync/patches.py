"""PatchExchange: sends patches along the routes of the plan, in its rounds. A relay passes on what it has received, unread.

    counts      one message per peer and phase: how many elements have changed in each part of the sync
    (the ranks agree that all counts have arrived; the sizes of all following messages are then known)
    round 0     patches over the network
    round 1     patches over the network, those of round 0 within the nodes
    ...
    (the ranks agree that every message was the expected one; only then may a patch be applied)

All ranks send all their messages, also after a local problem. Operations per rank: those of a full sync, and at most
4 (world size - 1) for the counts.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from grpo_megatron.sync.exchange import Envelope, Transport
from grpo_megatron.sync.plan import NETWORK, NODE
from grpo_megatron.sync.rounds import RankPlan

# -- Patch: the elements of a part whose bits have changed, exactly. What travels between two full syncs ---------------
# Two encodings, and the smaller one for each part:
# positions   4 bytes for each changed element
# bitmask     1 bit for each element of the part
# Both are followed by the values. The number of changed elements alone decides which it is, so no flag travels. Bits are
# compared, not values: NaN and the sign of zero travel too.

_INTEGERS = {2: torch.int16, 4: torch.int32}  # bytes of an element -> dtype with the same bits
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)
_POSITION_BYTES = 4


@dataclass(frozen=True)
class Patch:
    """`where`: int32 [count], increasing, or a bitmask, uint8 [ceil(numel / 8)], lowest bit first. `values` [count]."""

    count: int
    where: Tensor
    values: Tensor


def is_bitmask(numel: int, count: int) -> bool:
    """Whether the positions of `count` changes in a part of `numel` elements are a bitmask."""
    return _POSITION_BYTES * count > -(-numel // 8)


def patch_bytes(numel: int, count: int, itemsize: int) -> int:
    """Size of an encoded patch."""
    return (-(-numel // 8) if is_bitmask(numel, count) else _POSITION_BYTES * count) + itemsize * count


def encode_patch(new: Tensor, old: Tensor) -> Patch:
    """The patch from `old` to `new`, [numel] each, on one device, where they are compared. The patch is on the host."""
    bits = _INTEGERS[new.element_size()]
    changed = new.view(bits) != old.view(bits)
    positions = changed.nonzero().flatten()  # waits for the device
    count = positions.numel()
    where = _packed(changed) if is_bitmask(new.numel(), count) else positions.to(torch.int32)
    return Patch(count, where.cpu(), new[positions].cpu())


def apply_patch(patch: Patch, part: Tensor) -> None:
    """Set the changed elements of `part` [numel], which is on the host."""
    part[_positions(patch, part.numel())] = patch.values


def join_patches(patches: Sequence[Patch]) -> Tensor:
    """The bytes of a message: all positions, all values, all bitmasks. So everything is aligned to its element size."""
    positions = [p.where for p in patches if p.where.dtype == torch.int32]
    masks = [p.where for p in patches if p.where.dtype == torch.uint8]
    sections = [*positions, *(p.values for p in patches), *masks]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(section.view(torch.uint8) for section in sections)])


def split_patches(body: Tensor, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Patch]:
    """The inverse, as views of `body`, whose first byte is aligned to 8. `sizes`: (elements of the part, changes)."""
    masked = [is_bitmask(numel, count) for numel, count in sizes]
    values_at = sum(_POSITION_BYTES * count for (_, count), mask in zip(sizes, masked, strict=True) if not mask)
    positions_at, masks_at = 0, values_at + sum(dtype.itemsize * count for _, count in sizes)
    patches = []
    for (numel, count), mask in zip(sizes, masked, strict=True):
        if mask:
            where, masks_at = body[masks_at : masks_at + -(-numel // 8)], masks_at + -(-numel // 8)
        else:
            end = positions_at + _POSITION_BYTES * count
            where, positions_at = body[positions_at:end].view(torch.int32), end
        end = values_at + dtype.itemsize * count
        values, values_at = body[values_at:end].view(dtype), end
        patches.append(Patch(count, where, values))
    return patches


def _packed(mask: Tensor) -> Tensor:
    bits = torch.zeros(-(-mask.numel() // 8) * 8, dtype=torch.uint8, device=mask.device)
    bits[: mask.numel()] = mask
    return (bits.view(-1, 8) * torch.tensor(_BITS, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def _positions(patch: Patch, numel: int) -> Tensor:
    if patch.where.dtype == torch.int32:
        return patch.where.long()
    bits = patch.where[:, None] & torch.tensor(_BITS, dtype=torch.uint8)
    return bits.flatten()[:numel].nonzero().flatten()


# -- Stamp: what a message of patches says about itself, so that a wrong one is refused before anything of it is applied

STAMP_BYTES = 6 * 8  # the fields and a checksum, int64 each


@dataclass(frozen=True)
class Stamp:
    """`base`: 64-bit digest of the history that the patch builds on. `sequence`: number of the sync since the start of the
    run. `place`: number of the message within the sync."""

    base: int
    version: int
    sequence: int
    place: int
    source: int


_NAMES = ("base", "version", "sequence number", "place", "source rank")


def stamped(body: Tensor, stamp: Stamp) -> Tensor:
    """The message: stamp, CRC-32 of the body, and `body` (uint8, on the host)."""
    fields = torch.tensor([*astuple(stamp), 0])
    message = torch.cat([fields.view(torch.uint8), body])
    message[:STAMP_BYTES].view(torch.int64)[-1] = _checksum(body)
    return message


def stamp_problem(message: Tensor, expected: Stamp) -> str | None:
    """Returns why a message on the host must be refused; None if it is the expected one."""
    *fields, checksum = message[:STAMP_BYTES].view(torch.int64).tolist()
    wrong = [
        f"{name} {_shown(name, got)}, expected {_shown(name, want)}"
        for name, got, want in zip(_NAMES, fields, astuple(expected), strict=True)
        if got != want
    ]
    actual = _checksum(message[STAMP_BYTES:])
    if checksum != actual:
        wrong.append(f"checksum {checksum:#x}, its bytes have {actual:#x}")
    if not wrong:
        return None
    return f"a patch from rank {expected.source} was refused and not applied: {'; '.join(wrong)}"


def _checksum(body: Tensor) -> int:
    return zlib.crc32(body.numpy().data)


def _shown(name: str, value: int) -> str:
    return f"{value & (1 << 64) - 1:#018x}" if name == "base" else str(value)


Agree = Callable[[str | None], None]


class PatchExchange:
    """One sync. `stamp`: of its messages, without place and source. `own`: the patch of each part that this rank sends
    and holds itself."""

    def __init__(
        self,
        plan: RankPlan,
        transport: Transport,
        stamp: Stamp,
        own: Mapping[int, Patch],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._plan, self._transport, self._stamp = plan, transport, stamp
        self._dtype, self._device = dtype, device
        self._patches = dict(own)
        self._counts = {part: patch.count for part, patch in own.items()}
        self._problem: str | None = None
        self.bytes_received = 0

    def run(self, agree: Agree) -> dict[int, Patch]:
        """The patches of the parts that this rank receives, on the host. Raises what `agree` raises, on every rank."""
        own = set(self._patches)
        for phase in (NETWORK, NODE):
            self._post_counts(phase)()
        agree(self._problem)
        over_network = self._post(NETWORK, 0)
        for number in range(len(self._plan.rounds)):
            over_network()
            within_node = self._post(NODE, number)
            if number + 1 < len(self._plan.rounds):
                over_network = self._post(NETWORK, number + 1)
            within_node()
        agree(self._problem)
        return {part: patch for part, patch in self._patches.items() if part not in own}

    def _post_counts(self, phase: int) -> Callable[[], None]:
        sends, receives = self._parts_by_peer(phase, is_sender=True), self._parts_by_peer(phase, is_sender=False)
        bodies = [
            (peer, torch.tensor([self._counts[part] for part in parts]).view(torch.uint8))
            for peer, parts in sends.items()
        ]
        sizes = [(peer, 8 * len(parts)) for peer, parts in receives.items()]
        place = -1 - phase

        def read(peer: int, body: Tensor, is_right: bool) -> None:
            counts = body.view(torch.int64).tolist() if is_right else [0] * len(receives[peer])
            self._counts.update(zip(receives[peer], counts, strict=True))

        return self._post_messages(bodies, sizes, place, read)

    def _post(self, phase: int, number: int) -> Callable[[], None]:
        current = self._plan.rounds[number]
        bodies = [
            (peer, join_patches([self._patches[part] for part in message.parts]))
            for peer, message in current.sends[phase].items()
        ]
        itemsize = self._dtype.itemsize
        sizes = [
            (peer, sum(patch_bytes(*self._size(part), itemsize) for part in message.parts))
            for peer, message in current.receives[phase].items()
        ]

        def read(peer: int, body: Tensor, is_right: bool) -> None:
            parts = current.receives[phase][peer].parts
            self._patches.update(
                zip(parts, split_patches(body, list(map(self._size, parts)), self._dtype), strict=True)
            )

        return self._post_messages(bodies, sizes, 2 * number + phase, read)

    def _post_messages(
        self,
        bodies: list[Envelope],
        sizes: list[tuple[int, int]],
        place: int,
        read: Callable[[int, Tensor, bool], None],
    ) -> Callable[[], None]:
        """Returns the function that waits, checks every message and calls `read(peer, body, is the expected one)`."""

        def stamp(source: int) -> Stamp:
            return dataclasses.replace(self._stamp, place=place, source=source)

        sends = [(peer, stamped(body, stamp(self._plan.rank)).to(self._device)) for peer, body in bodies]
        receives = [
            (peer, torch.empty(STAMP_BYTES + size, dtype=torch.uint8, device=self._device)) for peer, size in sizes
        ]
        wait = self._transport.post(sends, receives)

        def finish() -> None:
            wait()
            for peer, buffer in receives:
                message = buffer.cpu()
                problem = stamp_problem(message, stamp(peer))
                self._problem = self._problem or problem
                read(peer, message[STAMP_BYTES:], problem is None)
                self.bytes_received += message.numel()

        return finish

    def _parts_by_peer(self, phase: int, *, is_sender: bool) -> dict[int, list[int]]:
        parts: dict[int, list[int]] = {}
        for current in self._plan.rounds:
            for peer, message in (current.sends if is_sender else current.receives)[phase].items():
                parts.setdefault(peer, []).extend(message.parts)
        return parts

    def _size(self, part: int) -> tuple[int, int]:
        """(elements, changed elements)"""
        return self._plan.plan.numel(self._plan.plan.parts[part]), self._counts[part]
