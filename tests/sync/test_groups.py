"""Groups: views of neighbouring tensors, memory for the part that a rank reads, and copies in few calls."""

from __future__ import annotations

import pytest
import torch

from grpo_megatron.sync.digest import copy_all, empty_group, group_view
from grpo_megatron.sync.plan import SyncTensor


def test_neighbours_are_one_tensor_and_others_are_not() -> None:
    memory = torch.arange(120.0).view(5, 2, 4, 3)
    parts = [part[1] for part in memory]
    group = group_view(parts)
    assert group is not None and group.data_ptr() == parts[0].data_ptr() and torch.equal(group, torch.stack(parts))
    assert group_view(parts[:1]) is not None
    assert group_view(parts[::-1]) is None, "a view has no negative distances"
    assert group_view([*parts[:2], parts[3]]) is None
    assert group_view([parts[0], parts[1].clone(), parts[2]]) is None
    assert group_view([parts[0], parts[1].t(), parts[2]]) is None
    assert group_view([parts[0], parts[0]]) is None


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("span", [(0, 8), (0, 2), (2, 6), (6, 8)])
def test_a_group_has_memory_for_the_span_only(axis: int, span: tuple[int, int]) -> None:
    shape = (8, 5) if axis == 0 else (5, 8)
    values = [torch.randn(shape) for _ in range(4)]
    group = empty_group(4, SyncTensor("w", shape, axis), span, torch.empty)
    start, length = span[0], span[1] - span[0]
    pairs = zip(group, values, strict=True)
    copy_all([(target.narrow(axis, start, length), value.narrow(axis, start, length)) for target, value in pairs])
    assert torch.equal(group.narrow(axis + 1, start, length), torch.stack(values).narrow(axis + 1, start, length))
    assert group.untyped_storage().nbytes() == 4 * (4 * 5 * length + (8 - length) * (5 if axis == 0 else 1))
    group.sum()  # no element is outside the memory
