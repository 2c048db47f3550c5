"""Each data-parallel rank's shard of policy and optimizer, as rectangles of global tensors in a checkpoint.

Megatron's distributed optimizer gives every data-parallel rank an interval of each parameter's elements. For a checkpoint that
any layout can read, Megatron gathers the full parameter on every rank of the group, and lets the first one write it: 12 host
bytes per parameter of the group on each rank. Here an interval stays with its rank, as a few rectangles of the global tensor.
torch.distributed.checkpoint stores and reads rectangles of any size. Keys and shapes are Megatron's: either reader reads both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from grpo_megatron.imports import replaced
from grpo_megatron.parallel.mesh import Mesh

Sizes = tuple[int, ...]


def rectangles(shape: Sizes, start: int, end: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Yields (offset, sizes) of the rectangles that elements `start` to `end` of a row-major tensor fill, in their order.

    They are at most 2 n - 1 for n axes: the end of a row, full rows, the beginning of a row.

        parameter [4, 6], interval 8 ... 21 of its elements
        . . . . . .
        . . a a a a    rectangle [1, 4] at (1, 2)
        b b b b b b    rectangle [1, 6] at (2, 0)
        c c c . . .    rectangle [1, 3] at (3, 0)
    """
    if start >= end:
        return
    if len(shape) <= 1:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    inner, row = shape[1:], math.prod(shape[1:])
    first, last = -(-start // row), end // row  # the full rows, if there are any
    if first > last:
        yield from _in_row(inner, last, start - last * row, end - last * row)
        return
    yield from _in_row(inner, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    yield from _in_row(inner, last, 0, end - last * row)


def _in_row(inner: Sizes, number: int, start: int, end: int) -> Iterator[tuple[Sizes, Sizes]]:
    for offset, sizes in rectangles(inner, start, end):
        yield (number, *offset), (1, *sizes)


def local_shards(entry: Any, values: Tensor, start: int, prefix: str = "") -> list[ShardedTensor]:
    """Describes `values` [n], those of elements `start` ... of a parameter, as shards of the tensors in the checkpoint.

    `entry`: Megatron's ShardedTensor of the parameter, or its factory (a gate and an up projection in one parameter). The shards
    are views of `values`. None is a replica of another data-parallel rank's.
    """
    shards = []
    for block in _global_tensors(entry):
        assert block.data is not None and block.data.is_contiguous(), block.key
        first = block.data.storage_offset()
        low, high = max(start, first), min(start + values.numel(), first + block.data.numel())
        lead = (0,) * block.prepend_axis_num
        taken = low
        for offset, sizes in rectangles(block.local_shape, low - first, high - first):
            count = math.prod(sizes)
            shape = (1,) * block.prepend_axis_num + sizes
            shards.append(
                ShardedTensor(
                    key=prefix + block.key,
                    data=values[taken - start : taken - start + count].view(shape),
                    dtype=values.dtype,
                    local_shape=shape,
                    global_shape=block.global_shape,
                    global_offset=tuple(map(sum, zip(block.global_offset, lead + offset, strict=True))),
                    axis_fragmentations=None,
                    replica_id=(*block.replica_id[:-1], 0),  # type: ignore[index]
                    allow_shape_mismatch=block.allow_shape_mismatch,
                )
            )
            taken += count
    has_all = sum(shard.data.numel() for shard in shards) == values.numel()  # type: ignore[union-attr]
    assert has_all or getattr(entry.data, "has_unused_rows", False), entry  # rows without an adapter are in no tensor
    return shards


def _global_tensors(entry: Any) -> list[ShardedTensor]:
    """Returns the global tensors of a parameter. Their data has no storage, only a place in the parameter's."""
    data = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
    entry = replace(entry, data=data)
    return list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]


@contextlib.contextmanager
def optimizer_as_local_shards() -> Iterator[None]:
    """Makes a distributed optimizer's sharded state this rank's own inside the block, without communication or copies.

    A load writes into the optimizer's own tensors, so that nothing is left to do after reading.
    """
    with replaced(
        DistributedOptimizer,
        sharded_param_state_fully_reshardable=_local_state,
        load_parameter_state_from_fully_reshardable=lambda optimizer, state: None,
    ):
        yield


def _local_state(
    optimizer: Any, model: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> dict[int, Any]:
    """Replaces Megatron's function of the state that any layout reads. Per parameter and kind of state: its shards."""
    entries = {entry.data: entry for entry in nested_values(model) if isinstance(entry.data, torch.nn.Parameter)}
    shards: dict[int, Any] = {}  # by a number: layers and experts share keys
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for ranges in (bucket["param_map"] for bucket in buckets):
                for parameter, places in ranges.items():
                    entry, state = entries[parameter], optimizer._get_main_param_and_optimizer_states(parameter)
                    shards[len(shards)] = {
                        name: local_shards(entry, values.detach(), places["param"].start, f"optimizer.state.{name}.")
                        for name, values in state.items()
                        if name != "step"  # in the parameter groups
                    }
    return shards


def divide_among_replicas(model: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Changes Megatron's state of a model so that each data-parallel rank writes an equal part of every parameter.

    Not for a load: a rank reads full parameters.
    """
    shares = {
        name: _equal_part(entry, mesh) if isinstance(entry.data, torch.nn.Parameter) else [entry]
        for name, entry in model.items()
    }
    return {name: share for name, share in shares.items() if share}  # Megatron would take an empty one for common state


def _equal_part(entry: Any, mesh: Mesh) -> list[ShardedTensor]:
    is_expert = not getattr(entry.data, "allreduce", True)  # Megatron's mark: not reduced over all data-parallel ranks
    replicas = mesh.grid().ranks(mesh.tp_rank, mesh.pp_rank, mesh.ep_rank if is_expert else None)
    values, number = entry.data.detach().reshape(-1), replicas.index(mesh.rank)
    start, end = (values.numel() * part // len(replicas) for part in (number, number + 1))
    return local_shards(entry, values[start:end], start)
