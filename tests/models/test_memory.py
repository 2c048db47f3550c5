"""What must not be in memory: attention's [S, S] scores, and the other ranks' weights while one rank loads its own."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch

from grpo_megatron.models.families import architecture_of, hf_shapes
from grpo_megatron.models.weights.stream import model_rows
from tests import tiny
from tests.worlds import ranks


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@ranks(1)
def attend(length: int, heads: int, window: int | None) -> float:
    """How many MiB one attention over `length` tokens, forward and backward, adds to this process's peak."""
    from grpo_megatron.models.layers.modules import causal_attention, packed_attention

    cuts = torch.tensor([0, length], dtype=torch.int32)
    query = torch.randn(length, heads, 32, requires_grad=True)
    key, value = (torch.randn(length, heads // 4, 32, requires_grad=True) for _ in range(2))
    before = peak_mib()
    packed_attention(query, key, value, cuts, causal_attention, window=window).sum().backward()
    return peak_mib() - before


@pytest.mark.parametrize("window", [None, 500])
def test_attention_keeps_no_scores(window: int | None) -> None:
    """4096^2 float32 scores of 8 heads would be 512 MiB. Queries, outputs and gradients are 4 MiB each."""
    (added,) = attend(length=4096, heads=8, window=window)
    assert added < 100


class Counting:
    """A tensor that can only be sliced, and counts the numbers in its slices."""

    def __init__(self, shape: tuple[int, ...], counts: list[int]) -> None:
        self.tensor, self.counts = torch.zeros(shape), counts

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.tensor[index]
        self.counts.append(part.numel())
        return part


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_reads_only_its_own_slices(tp: int) -> None:
    """The ranks together read everything once, except the norms, which each rank reads."""
    arch = architecture_of({**tiny.COMMON, **tiny.FAMILIES["qwen3"]})
    shapes = hf_shapes(arch)
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    norms = sum(torch.Size(shape).numel() for name, shape in shapes.items() if "norm" in name)
    for rank in range(tp):
        counts: list[int] = []

        def read(name: str, counts: list[int] = counts) -> Counting:
            return Counting(shapes[name], counts)

        for row in model_rows(arch).values():
            part = row.shard(read, arch, rank, tp)
            assert tuple(part.shape) == row.local_shape(arch, tp)
        whole = (total - norms) / tp + norms
        assert abs(sum(counts) - whole) <= 2 * 16 * tp * arch.hidden_size  # padded vocabulary rows are not read
