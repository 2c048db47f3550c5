"""Intervals of a tensor's elements as rectangles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from grpo_megatron.models.weights.local_shards import local_shards, rectangles


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_rectangles_are_the_interval_in_its_order(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    tensor = torch.arange(size).view(shape)
    found = list(rectangles(tuple(shape), start, end))
    parts = []
    for offset, sizes in found:
        index = tuple(slice(first, first + length) for first, length in zip(offset, sizes, strict=True))
        parts.append(tensor[index].reshape(-1))
    assert torch.cat([torch.empty(0, dtype=torch.long), *parts]).tolist() == list(range(start, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def entry(key: str, data: torch.Tensor, offset: tuple[int, ...], layers: tuple[int, ...] = ()) -> ShardedTensor:
    """One of two tensor-parallel shards; `layers`: (number, count) of the layer in a tensor of all layers."""
    whole = (data.shape[0] * 2, *data.shape[1:])
    return ShardedTensor(
        key=key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=(*layers[1:], *whole),
        global_offset=(*layers[:1], *offset),
        axis_fragmentations=(*layers[1:], 2, *(1 for _ in whole[1:])),
        replica_id=(0, 0, 3),
        prepend_axis_num=len(layers) // 2,
    )


def gate_and_up(key: str, data: Any, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
    return [entry(f"{key}.{number}", half, (3, 0)) for number, half in enumerate(torch.chunk(data, 2))]


@pytest.mark.parametrize(("start", "end"), [(0, 24), (5, 17), (13, 14), (12, 12)])
def test_the_shards_of_two_ranks_fill_the_parameter(start: int, end: int) -> None:
    parameter = torch.nn.Parameter(torch.arange(24.0).view(6, 4))
    factory = ShardedTensorFactory("fc1", parameter, gate_and_up, lambda parts: torch.cat(parts), (0, 0, 3))
    for whole, of_layers in ((factory, False), (entry("norm", parameter, (6, 0), (1, 5)), True)):
        found: dict[str, torch.Tensor] = {}
        values = parameter.detach().flatten()
        for low, high in ((0, start), (start, end), (end, 24)):
            for part in local_shards(whole, values[low:high], low, "exp_avg."):
                assert part.replica_id[-1] == 0 and part.data is not None
                assert part.data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()  # no copy
                tensor = found.setdefault(part.key, torch.full(part.global_shape, -1.0))
                index = tuple(slice(o, o + n) for o, n in zip(part.global_offset, part.local_shape, strict=True))
                assert (tensor[index] == -1).all()
                tensor[index] = part.data
        if of_layers:
            assert torch.equal(found["exp_avg.norm"][1, 6:], parameter.detach())
        else:
            assert torch.equal(torch.cat([found[f"exp_avg.fc1.{n}"][3:] for n in (0, 1)]), parameter.detach())
