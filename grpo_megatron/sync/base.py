"""Base: the values that a patch builds on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from grpo_megatron.sync.delta import Patch, apply_patch

_BLOCK_BYTES = 1 << 26  # torch rounds pinned memory up to a power of two: blocks of that size waste little


class Base(Protocol):
    """Parts by their number in the plan, each as one dimension."""

    @property
    def numel(self) -> int: ...

    def parts(self) -> Iterable[int]: ...

    def read(self, part: int) -> Tensor: ...

    def store(self, part: int, values: Tensor) -> None: ...

    def update(self, part: int, patch: Patch) -> None: ...


class HostBase:
    """Copies on the host: what an engine's shard was last given, or what this rank has last sent.

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
