"""A contiguous tensor somewhere in a file. Nothing is read until rows are taken, and only those rows are.

Plain reads, not a memory map: pages of a map count as memory of the process, and a 70B model has 140 GB of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.convert import ConvertError

BLOCK_ELEMENTS = 1 << 22  # what moves at once: 8 MiB of bfloat16; malloc keeps such blocks, larger ones are mapped anew
WRITE_BYTES = 4 << 20  # larger single writes were three times slower beside a reader of the same file


def blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first, last) row of each block of a tensor of this shape; never less than one row."""
    step = max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def write_all(file: Any, data: Any) -> int:
    """Write all of a buffer to a raw file, which may take less at a time; its length."""
    view, done = memoryview(data).cast("B"), 0
    while done < len(view):
        done += file.write(view[done : done + WRITE_BYTES])
    return done


@dataclass(frozen=True)
class Span:
    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, first: int, last: int) -> Tensor:
        """Rows first to last-1 in memory of their own. Raises ConvertError when the file ends before them."""
        out = torch.empty((last - first, *self.shape[1:]), dtype=self.dtype)
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        view, done = as_bytes(out), 0
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset + first * row_bytes)
                while done < len(view) and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise ConvertError(f"{self.path}: cannot read ({error.strerror})") from error
        if done < len(view):
            raise ConvertError(f"{self.path}: truncated, {len(view) - done} bytes short at byte {self.offset}")
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

    def rows(self, first: int, last: int) -> Tensor:
        return self.tensor[first:last].contiguous()

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]
