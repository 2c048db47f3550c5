"""Gradients of `model.exact`: summed over rows, parts of a mini-batch and ranks in an order that no layout decides.

A mini-batch has NUM_BLOCKS parts of neighbouring rows (`algo.plan.assign_leaves`). Each row is a micro-batch of its own, so its
gradients have the same bits wherever it is computed. They are added row by row within a part, and the parts by one tree, of
which a data-parallel rank has a whole subtree. The squares of the norm are added as integers. Everything after that, clipping
and Adam, is element by element.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import optimizer as megatron_optimizer
from torch import Tensor

from grpo_megatron.exact.layers import tree_all_reduce
from grpo_megatron.exact.rowwise import NUM_BLOCKS
from grpo_megatron.imports import replaced


class LeafGradients:
    """A context in which Megatron's gradient buffers get the sum over all parts and data-parallel ranks, without its own sums."""

    def __init__(self, ddp: Any) -> None:
        self._ddp, self._config = ddp, ddp.config
        self._group = parallel_state.get_data_parallel_group()
        self._sums: list[
            tuple[int, list[Tensor]]
        ] = []  # (height, the buffers' sums) of complete subtrees, highest first

    def __enter__(self) -> LeafGradients:
        self._finalize, self._config.finalize_model_grads_func = self._config.finalize_model_grads_func, None
        return self

    def leaves(self, packs: list[Any]) -> Iterator[list[Any]]:
        """The micro-batches of each part of this rank. Their gradients are taken when the next part is asked for."""
        count = NUM_BLOCKS // self._group.size()
        size = len(packs) // count
        for leaf in range(count):
            self._ddp.zero_grad_buffer()
            yield packs[leaf * size : (leaf + 1) * size]
            self._add(0, [buffer.grad_data.clone() for buffer in self._ddp.buffers])

    def _add(self, height: int, sums: list[Tensor]) -> None:
        while self._sums and self._sums[-1][0] == height:
            sums = [left + right for left, right in zip(self._sums.pop()[1], sums, strict=True)]
            height += 1
        self._sums.append((height, sums))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._config.finalize_model_grads_func = self._finalize
        if error is None:
            [(_, sums)] = self._sums
            for buffer, own in zip(self._ddp.buffers, sums, strict=True):
                buffer.grad_data.copy_(tree_all_reduce(own, self._group))


@contextlib.contextmanager
def order_free_norm() -> Iterator[None]:
    """Megatron's gradient norm is `_order_free_norm` inside the block."""
    with replaced(megatron_optimizer, get_grad_norm_fp32=_order_free_norm):
        yield


def _order_free_norm(grads: Any, norm_type: float = 2.0, grad_stats_parallel_group: Any = None) -> float:
    """The norm of float32 tensors over all ranks, from squares in fixed point: integers have the same sum in any order."""
    grads = [grads] if isinstance(grads, Tensor) else grads
    sizes = torch.tensor([max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)], dtype=torch.float64)
    count = torch.tensor([sum(g.numel() for g in grads)])
    dist.all_reduce(sizes, dist.ReduceOp.MAX, grad_stats_parallel_group)
    dist.all_reduce(count, group=grad_stats_parallel_group)
    if not 0 < (top := sizes.item()) < math.inf:
        return top
    unit = math.frexp(top * top)[1] + int(count).bit_length() - 62  # no sum is as large as 2 ** 62 units
    total = torch.zeros(1, dtype=torch.int64)
    for grad in grads:
        total += torch.ldexp(grad.double().square(), torch.tensor(-unit)).round().long().sum()
    dist.all_reduce(total, group=grad_stats_parallel_group)
    return math.sqrt(math.ldexp(int(total), unit))
