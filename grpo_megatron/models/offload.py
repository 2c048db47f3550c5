"""Tensors that leave the device for a while and come back as they were: same objects, same views, same bits.

A tensor's storage is copied to the host and shrunk to nothing, so that whoever holds the tensor, or a view of it, holds
it still; on return the storage grows again and is filled. Only tensors that have a storage for themselves travel: a
view of a larger buffer (a float32 model's "main" parameters, which are the model's own) stays. Host copies are kept
between trips, pinned where there is a device to copy from.

Tested on the CPU, where the same calls run; not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from grpo_megatron.device import Device


class Offloaded:
    """The tensors of one owner, here or away. `leave` and `come_back` may each be called twice."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.is_away = False
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor -> itself, its copy on the host

    @property
    def num_bytes(self) -> int:
        """What is away."""
        return sum(copy.nbytes for _, copy in self._copies.values()) if self.is_away else 0

    @torch.no_grad()
    def leave(self, tensors: Iterable[Tensor], *, unchanged: bool = False) -> None:
        """Copy to the host, then free the device's memory for other users. `unchanged`: since they came back."""
        if self.is_away:
            return
        known, self._copies = self._copies, {}
        for tensor in tensors:
            if not _travels(tensor) or id(tensor) in self._copies:
                continue
            kept = known.get(id(tensor))
            has_copy = kept is not None and kept[0] is tensor
            copy = kept[1] if kept is not None and has_copy else self._host_copy(tensor)
            if not (has_copy and unchanged):
                copy.copy_(tensor.detach(), non_blocking=True)
            self._copies[id(tensor)] = tensor, copy
        self.device.synchronize()  # the copies are complete
        for tensor, _ in self._copies.values():
            tensor.untyped_storage().resize_(0)
        self.is_away = True
        self.device.empty_cache()

    @torch.no_grad()
    def come_back(self) -> None:
        if not self.is_away:
            return
        for tensor, copy in self._copies.values():
            tensor.untyped_storage().resize_(copy.nbytes)
            tensor.detach().copy_(copy, non_blocking=True)
        self.device.synchronize()
        self.is_away = False

    def _host_copy(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.device.is_cuda)


def _travels(tensor: Tensor) -> bool:
    """A plain, contiguous tensor of more than one number, alone in its storage."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_contiguous()
    return is_plain and tensor.numel() > 1 and tensor.untyped_storage().nbytes() == tensor.nbytes
