"""Triton's kernels of the output head on CUDA: one pass over a shard's logits forward, one backward (head.py).

The logits stay in the type of the matrix product; the arithmetic is float32. Columns are in the shard's own numbering: a target
outside [0, v) belongs to another rank. Imported on CUDA only, since Triton is no requirement on the CPU. The tests run the
kernels by Triton's interpreter (TRITON_INTERPRET=1), and compile them for GPUs. Not run on a GPU yet.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton would look up annotations of a kernel's arguments when it compiles it.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # columns of one program at a time: 16 floats of each of 256 threads
NUM_WARPS = 8
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32; finite, so that neither 0 times it nor its exp is NaN


@triton.jit
def _statistics_kernel(
    logits, columns, statistics, num_columns, temperature, is_tempered: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * num_columns
    top = tl.full([], LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.full([], 0.0, tl.float32)
    for first in range(0, num_columns, block):
        offsets = first + tl.arange(0, block)
        z = tl.load(start + offsets, mask=offsets < num_columns, other=-float("inf")).to(tl.float32)
        if is_tempered:
            z = tl.div_rn(z, temperature)
        new_top = tl.maximum(top, tl.max(z, 0))
        z -= new_top
        exp = tl.exp(z)
        shift = top - new_top
        weighted = tl.exp(shift) * (weighted + shift * total) + tl.sum(exp * tl.maximum(z, LOWEST), 0)
        total = tl.exp(shift) * total + tl.sum(exp, 0)
        top = new_top
    column = tl.load(columns + row)
    at_target = tl.load(start + column, mask=(column >= 0) & (column < num_columns), other=0.0).to(tl.float32)
    if is_tempered:
        at_target = tl.div_rn(at_target, temperature)
    tl.store(statistics + 4 * row, top)
    tl.store(statistics + 4 * row + 1, total)
    tl.store(statistics + 4 * row + 2, weighted)
    tl.store(statistics + 4 * row + 3, at_target)


@triton.jit
def _gradient_kernel(
    logits,
    columns,
    lse,
    entropy,
    grad_logprobs,
    grad_entropy,
    num_columns,
    temperature,
    is_tempered: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    offsets = tl.program_id(1) * block + tl.arange(0, block)
    places = logits + row.to(tl.int64) * num_columns + offsets
    is_real = offsets < num_columns
    z = tl.load(places, mask=is_real, other=-float("inf")).to(tl.float32)
    if is_tempered:
        z = tl.div_rn(z, temperature)
    logp = z - tl.load(lse + row)
    p = tl.exp(logp)
    d_entropy = -p * (tl.maximum(logp, LOWEST) + tl.load(entropy + row))
    d_logprob = tl.where(offsets == tl.load(columns + row), 1.0, 0.0) - p
    grad = tl.load(grad_logprobs + row) * d_logprob + tl.load(grad_entropy + row) * d_entropy
    if is_tempered:
        grad = tl.div_rn(grad, temperature)
    tl.store(places, grad, mask=is_real)


def row_statistics(logits: Tensor, columns: Tensor, temperature: float) -> Tensor:
    """Returns for each row of logits [n, v]: the maximum m, sum_v exp(z_v - m), sum_v exp(z_v - m) (z_v - m), the target's z.

    z = logits / T; result [4, n]; without a target on this shard its z is 0. The sums are an online softmax (Milakov and
    Gimelshein, arXiv 1805.02867): where a block of columns raises the maximum, the sums so far are scaled down. With
    shift = m_old - m_new, the second sum becomes exp(shift) (its old value + shift times the first sum).
    """
    num_rows, num_columns = logits.shape
    assert logits.is_contiguous() and columns.is_contiguous()
    statistics = torch.empty(num_rows, 4, dtype=torch.float32, device=logits.device)
    if num_rows:
        _statistics_kernel[(num_rows,)](
            logits, columns, statistics, num_columns, temperature, temperature != 1, BLOCK, num_warps=NUM_WARPS
        )
    return statistics.T


def write_gradient(
    logits: Tensor,
    columns: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    temperature: float,
) -> None:
    """Overwrite logits [n, v] by the gradient of sum(grad_logprobs * logprobs + grad_entropy * entropy); the others are [n]."""
    num_rows, num_columns = logits.shape
    tensors = (logits, columns, lse, entropy, grad_logprobs, grad_entropy)
    assert all(tensor.is_contiguous() for tensor in tensors)
    if logits.numel():
        _gradient_kernel[(num_rows, triton.cdiv(num_columns, BLOCK))](
            *tensors, num_columns, temperature, temperature != 1, BLOCK, num_warps=NUM_WARPS
        )
