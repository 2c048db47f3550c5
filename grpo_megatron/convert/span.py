"""A contiguous tensor at some offset of a file, of which rows are read on request.

It uses plain reads into reused memory, not a memory map. The pages of a map count as memory of the process: a 70B model
has 140 GB of them. Allocating memory for every block would take longer than reading the block.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.convert import ConvertError

BLOCK_ELEMENTS = 1 << 21  # 4 MiB of bfloat16: a few blocks fit into the processor's cache


def row_blocks(shape: tuple[int, ...], elements: int = 0) -> Iterator[tuple[int, int]]:
    """(first row, last row + 1) of each block of a tensor of this shape. A block has at least one row."""
    step = max(1, (elements or BLOCK_ELEMENTS) // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class ReusedMemory:
    """Memory for one tensor at a time, allocated once and reused."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous, uninitialised tensor. It overwrites the previous one."""
        nbytes = math.prod(shape) * dtype.itemsize
        if len(self._memory) < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(dtype).view(shape)


@dataclass(frozen=True)
class Span:
    """A contiguous tensor at `offset` of a file."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read_into(self, first: int, last: int, out: Tensor) -> None:
        """Read rows first to last-1 into a contiguous tensor of this dtype. Raises ConvertError when the file is too short."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        view, done = as_bytes(out), 0
        assert len(view) == (last - first) * row_bytes and out.dtype == self.dtype
        try:
            with self.path.open("rb", buffering=0) as file:
                start = file.seek(self.offset + first * row_bytes)
                # most often the next read is of the next bytes: let the disk read them ahead
                os.posix_fadvise(file.fileno(), start + len(view), len(view), os.POSIX_FADV_WILLNEED)
                while done < len(view) and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise ConvertError(f"{self.path}: cannot read ({error.strerror})") from error
        if done < len(view):
            raise ConvertError(f"{self.path}: truncated, {len(view) - done} bytes short at byte {self.offset}")

    def rows(self, first: int, last: int) -> Tensor:
        """Rows first to last-1, in new memory."""
        out = torch.empty((last - first, *self.shape[1:]), dtype=self.dtype)
        self.read_into(first, last, out)
        return out

    # The methods of a safetensors slice that a weight table row uses.

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, slice) and index.step is None:
            first, last, _ = index.indices(self.shape[0])
            return self.rows(first, max(first, last))
        return self.rows(0, self.shape[0])[index]


@dataclass(frozen=True)
class Resident:
    """A tensor of an unpickled file, memory-mapped by torch, with the interface of a Span."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def read_into(self, first: int, last: int, out: Tensor) -> None:
        out.copy_(self.tensor[first:last])

    def rows(self, first: int, last: int) -> Tensor:
        return self.tensor[first:last].contiguous()

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]
