"""Stacks: views of neighbouring tensors, memory for the part that a rank reads, and copies in few calls."""

from __future__ import annotations

import pytest
import torch

from grpo_megatron.sync.plan import SyncTensor
from grpo_megatron.sync.stacks import as_stack, copy_all, empty_stack


def test_neighbours_are_one_tensor_and_others_are_not() -> None:
    memory = torch.arange(120.0).view(5, 2, 4, 3)
    parts = [part[1] for part in memory]
    stack = as_stack(parts)
    assert stack is not None and stack.data_ptr() == parts[0].data_ptr() and torch.equal(stack, torch.stack(parts))
    assert as_stack(parts[:1]) is not None
    assert as_stack(parts[::-1]) is None, "a view has no negative distances"
    assert as_stack([*parts[:2], parts[3]]) is None
    assert as_stack([parts[0], parts[1].clone(), parts[2]]) is None
    assert as_stack([parts[0], parts[1].t(), parts[2]]) is None
    assert as_stack([parts[0], parts[0]]) is None


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("span", [(0, 8), (0, 2), (2, 6), (6, 8)])
def test_a_stack_has_memory_for_the_span_only(axis: int, span: tuple[int, int]) -> None:
    shape = (8, 5) if axis == 0 else (5, 8)
    values = [torch.randn(shape) for _ in range(4)]
    stack = empty_stack(4, SyncTensor("w", shape, axis), span, torch.empty)
    start, length = span[0], span[1] - span[0]
    copy_all(
        [
            (part.narrow(axis, start, length), v.narrow(axis, start, length))
            for part, v in zip(stack, values, strict=True)
        ]
    )
    assert torch.equal(stack.narrow(axis + 1, start, length), torch.stack(values).narrow(axis + 1, start, length))
    assert stack.untyped_storage().nbytes() == 4 * (4 * 5 * length + (8 - length) * (5 if axis == 0 else 1))
    stack.sum()  # no element is outside the memory
