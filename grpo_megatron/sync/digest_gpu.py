"""The sums of a digest on a GPU: a Triton kernel, which reads the words once and writes one number per row.

torch has no product of an int64 matrix with a vector on CUDA. Its product and sum of whole tensors write and read as many
bytes again: about three times the traffic. Imports Triton, which comes with torch for CUDA; import this file only where it
is needed. Compiled for GPUs, and checked against torch by Triton's interpreter. Not run on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 1024  # words of a row at a time


def row_sums(words: Tensor, factors: Tensor) -> Tensor:
    """Returns the sum of factors[w] * word for each row, mod 2^64. int64 [R, W] and [W] -> [R].

    Words of a row must be neighbours; rows may have gaps between them.
    """
    num_rows, num_columns = words.shape
    sums = torch.empty(num_rows, dtype=torch.int64, device=words.device)
    if num_rows:
        _sum_rows[(num_rows,)](words, factors, sums, num_columns, words.stride(0), BLOCK_WORDS)
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(words, factors, sums, num_columns, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    # Triton's compiler evaluates annotations, and knows its own types only.
    row = tl.program_id(0).to(tl.int64)
    first = words + row * stride
    total = tl.zeros([block], dtype=tl.int64)
    for start in range(0, num_columns, block):
        columns = start + tl.arange(0, block)
        is_inside = columns < num_columns
        word = tl.load(first + columns, mask=is_inside, other=0)
        total += word * tl.load(factors + columns, mask=is_inside, other=0)
    tl.store(sums + row, tl.sum(total, axis=0))
