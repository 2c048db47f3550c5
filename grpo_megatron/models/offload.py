"""OffloadedTensors: tensors moved to the host and back. Same objects, same views, same bits.

`offload` copies a tensor's storage to the host and resizes it to zero bytes. References to the tensor and to its views
stay valid. `onload` resizes the storage again and copies the bytes back. Only tensors with a storage of their own
are moved. A view of a larger buffer stays: for example the "main" parameters of a float32 model, which are the model's own
parameters. Host copies are kept for the next offload, and pinned if the device is a GPU.

Tested on the CPU, where the same calls run. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from grpo_megatron.device import Device


class OffloadedTensors:
    """The tensors of one owner, on the device or offloaded. A second `offload` or `onload` in a row does nothing."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.is_offloaded = False
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor -> the tensor, its copy on the host

    @property
    def num_bytes(self) -> int:
        """Bytes that are offloaded now."""
        return sum(copy.nbytes for _, copy in self._copies.values()) if self.is_offloaded else 0

    @torch.no_grad()
    def offload(self, tensors: Iterable[Tensor], *, unchanged: bool = False) -> None:
        """Copy to the host, then free the device's memory for others.

        `unchanged`: the tensors have not changed since `onload`, so that existing host copies are used again.
        """
        if self.is_offloaded:
            return
        known, self._copies = self._copies, {}
        for tensor in tensors:
            if not _can_offload(tensor) or id(tensor) in self._copies:
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
        self.is_offloaded = True
        self.device.empty_cache()

    @torch.no_grad()
    def onload(self) -> None:
        if not self.is_offloaded:
            return
        for tensor, copy in self._copies.values():
            tensor.untyped_storage().resize_(copy.nbytes)
            tensor.detach().copy_(copy, non_blocking=True)
        self.device.synchronize()
        self.is_offloaded = False

    def _host_copy(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.device.is_cuda)


def _can_offload(tensor: Tensor) -> bool:
    """Whether it is a plain, contiguous tensor of more than one number, alone in its storage."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_contiguous()
    return is_plain and tensor.numel() > 1 and tensor.untyped_storage().nbytes() == tensor.nbytes
