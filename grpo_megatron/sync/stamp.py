"""Stamp: what a message of patches says about itself, so that a wrong one is refused before anything of it is applied."""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

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
    """Why a message on the host must be refused; None if it is the expected one."""
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
