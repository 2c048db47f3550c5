"""A contiguous tensor somewhere in a file. Nothing is read until rows are taken, and only those rows are.

Plain reads into memory that is used again, not a memory map: pages of a map count as memory of the process (a 70B model
has 140 GB of them), and memory that is taken anew for every block costs more than the reading.
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

BLOCK_ELEMENTS = 1 << 21  # what moves at once: 4 MiB of bfloat16, so that a few of them stay in the processor's cache


def blocks(shape: tuple[int, ...], elements: int = 0) -> Iterator[tuple[int, int]]:
    """(first, last) row of each block of a tensor of this shape; never less than one row."""
    step = max(1, (elements or BLOCK_ELEMENTS) // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class Memory:
    """Room for one tensor at a time, taken once and used again."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Contiguous, with anything in it. It replaces the one before."""
        nbytes = math.prod(shape) * dtype.itemsize
        if len(self._room) < nbytes:
            self._room = torch.empty(nbytes, dtype=torch.uint8)
        return self._room[:nbytes].view(dtype).view(shape)


@dataclass(frozen=True)
class Span:
    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read_into(self, first: int, last: int, out: Tensor) -> None:
        """Rows first to last-1 into contiguous memory of this dtype. Raises ConvertError when the file ends before."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        view, done = as_bytes(out), 0
        assert len(view) == (last - first) * row_bytes and out.dtype == self.dtype
        try:
            with self.path.open("rb", buffering=0) as file:
                start = file.seek(self.offset + first * row_bytes)
                # for the disk: what is wanted next is most often what comes next in the file
                os.posix_fadvise(file.fileno(), start + len(view), len(view), os.POSIX_FADV_WILLNEED)
                while done < len(view) and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise ConvertError(f"{self.path}: cannot read ({error.strerror})") from error
        if done < len(view):
            raise ConvertError(f"{self.path}: truncated, {len(view) - done} bytes short at byte {self.offset}")

    def rows(self, first: int, last: int) -> Tensor:
        """Rows first to last-1 in memory of their own."""
        out = torch.empty((last - first, *self.shape[1:]), dtype=self.dtype)
        self.read_into(first, last, out)
        return out

    # What a weight table row asks of a Hugging Face tensor.

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, slice) and index.step is None:
            first, last, _ = index.indices(self.shape[0])
            return self.rows(first, max(first, last))
        return self.rows(0, self.shape[0])[index]


@dataclass(frozen=True)
class Resident:
    """A tensor of an unpickled file (memory-mapped by torch), with a Span's face."""

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
