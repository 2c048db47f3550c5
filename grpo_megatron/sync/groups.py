"""Groups: tensors of one shape that are copied, loaded and digested in one call, such as one linear layer of all experts.

A model with experts has tens of thousands of small tensors: 18,432 in Qwen3-30B-A3B, 144 if those of a layer are grouped.
Each call on a GPU takes a few microseconds of the host, whatever its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_megatron.sync.plan import Interval, SyncTensor


def group_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """View tensors that are at equal distances in one memory, in their order, as one [n, ...]. None: they are not."""
    first = tensors[0]
    if len(tensors) == 1:
        return first[None]
    distance = tensors[1].storage_offset() - first.storage_offset()
    memory = first.untyped_storage().data_ptr()
    kind = (first.shape, first.stride(), first.dtype, first.device)
    for number, tensor in enumerate(tensors):
        is_next = tensor.storage_offset() == first.storage_offset() + number * distance
        if not is_next or (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) != kind:
            return None
        if tensor.untyped_storage().data_ptr() != memory:
            return None
    if distance <= 0:
        return None
    return first.as_strided((len(tensors), *first.shape), (distance, *first.stride()))


def empty_group(
    count: int, tensor: SyncTensor, span: Interval, allocate: Callable[[tuple[int, ...]], Tensor]
) -> Tensor:
    """Allocate [count, *tensor.shape], of which only `span` of each tensor's axis has memory of its own.

    The rest overlaps, and is undefined: a rank of an engine that reads an eighth of every expert needs memory for an
    eighth. `allocate` is like `torch.empty`.
    """
    start, stop = span
    shape = [*tensor.shape[: tensor.axis], stop - start, *tensor.shape[tensor.axis + 1 :]]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # Position p of the axis is at p * stride, and `span` begins `start` positions after the beginning of the memory.
    outside = (tensor.length - (stop - start)) * strides[tensor.axis]
    memory = allocate((count * math.prod(shape) + outside,))
    return memory.as_strided((count, *tensor.shape), (math.prod(shape), *strides))


@torch.no_grad()
def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first. One call for those that are contiguous, which CUDA copies in few kernels."""
    for is_dense in (True, False):
        chosen = [pair for pair in pairs if (pair[0].is_contiguous() and pair[1].is_contiguous()) == is_dense]
        if chosen:
            torch._foreach_copy_([target for target, _ in chosen], [source for _, source in chosen])
