"""Patch: the elements of a part whose bits have changed, exactly. What travels between two full syncs.

Two encodings, and the smaller one for each part:
    positions   4 bytes for each changed element
    bitmask     1 bit for each element of the part
Both are followed by the values. The number of changed elements alone decides which it is, so no flag travels. Bits are
compared, not values: NaN and the sign of zero travel too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """From `old` to `new`, [numel] each, on one device, where the comparison runs. The patch is on the host."""
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
