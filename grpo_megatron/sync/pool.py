"""Pool: memory on the host that is used again as soon as no tensor refers to it.

torch has such an allocator for GPUs, not for the CPU: there every large tensor gets fresh pages from the system, and
touching them first takes four times as long as copying into memory in use (measured).
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

SMALLEST = 1 << 16  # bytes; malloc keeps smaller memory itself


class Pool:
    """Made once for all syncs. It keeps what was in use at one time: about the message buffers and the tensors of a round."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._free: dict[int, list[bytearray]] = {}  # by size, which is that of few kinds of tensors

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Like `torch.empty`. The memory returns to the pool with the last view of the tensor."""
        size = math.prod(shape) * self.dtype.itemsize
        if self.device.type != "cpu" or size < SMALLEST:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else bytearray(size)
        lease = memoryview(memory)  # the tensor's storage holds it
        weakref.finalize(lease, free.append, memory).atexit = False
        return torch.frombuffer(lease, dtype=self.dtype).view(shape)
