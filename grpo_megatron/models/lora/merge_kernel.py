"""Triton's kernel that merges on CUDA: reads W0 once, writes W once, and adds the r terms in registers (merge.py has the order).

Torch's operations, one per term, would move 16 r bytes per element. torch.addmm adds in an order that depends on the shapes.
Imported on CUDA only. The tests run it by Triton's interpreter, and compile it for GPUs. Not run on a GPU yet.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton would look up annotations of a kernel's arguments when it compiles it.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 16, 256  # of a program: 32 floats of each of 128 threads


@triton.jit
def _merge_kernel(
    out,
    base,
    a,
    b,
    num_rows,
    num_columns,
    rank,
    out_row,
    out_column,
    base_row,
    base_column,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    columns = tl.program_id(1).to(tl.int64) * block_columns + tl.arange(0, block_columns)
    is_row, is_column = rows < num_rows, columns < num_columns
    b_k = tl.load(b + rows * rank, mask=is_row, other=0.0)
    total = b_k[:, None] * tl.load(a + columns, mask=is_column, other=0.0)[None, :]
    for k in range(1, rank):
        b_k = tl.load(b + rows * rank + k, mask=is_row, other=0.0)
        total += b_k[:, None] * tl.load(a + k * num_columns + columns, mask=is_column, other=0.0)[None, :]
    is_inside = is_row[:, None] & is_column[None, :]
    w = tl.load(base + rows[:, None] * base_row + columns[None, :] * base_column, mask=is_inside, other=0.0)
    total += w.to(tl.float32)
    tl.store(out + rows[:, None] * out_row + columns[None, :] * out_column, total, mask=is_inside)


def write_merged(out: Tensor, base: Tensor, a: Tensor, b: Tensor) -> None:
    """Writes round(base + b a) into `out`: base and out [m, n] of any strides, a [r, n] and b [m, r] in float32."""
    num_rows, num_columns = base.shape
    if base.numel():
        grid = triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS)
        sizes = num_rows, num_columns, len(a), *out.stride(), *base.stride(), ROWS, COLUMNS
        _merge_kernel[grid](out, base, a.contiguous(), b.contiguous(), *sizes, enable_fp_fusion=False)
