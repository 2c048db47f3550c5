"""The merged weight, W = round(W0 + s B A), with bits that do not depend on how the weight is cut.

A matrix product sums over r in an order that depends on the shapes, so that the shard of a policy and that of an engine
in another layout could differ in the last bit. Here every element is computed alone, in float32 and in one order:

    ((s b_1) a_1 + (s b_2) a_2) + ... + (s b_r) a_r, then + W0, then rounded to W0's type

Each operation rounds once, as IEEE 754 prescribes: no fused multiply-add, on no device. So policy and engine merge to the
same bits wherever they run. On CUDA one kernel does it all (merge_kernel.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

MERGE_ELEMENTS = 1 << 18  # of a block of rows on the CPU, whose float32 sum stays in the cache


@torch.no_grad()
def merge(base: Tensor, a: Tensor, b: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """round(base + scale * b a) in base's type: base [m, n], a [r, n], b [m, r]. `out`: where it is written.

    Any rows of `base` and `b`, and any columns of `base` and `a`, give those rows and columns of the whole result.
    """
    out = torch.empty_like(base) if out is None else out
    a, b = a.float(), b.float() * scale
    if base.is_cuda:
        from grpo_megatron.models.lora.merge_kernel import write_merged

        write_merged(out, base, a, b)
        return out
    rows = max(1, MERGE_ELEMENTS // max(1, base.shape[1]))
    for start in range(0, base.shape[0], rows):
        part = slice(start, start + rows)
        total = b[part, :1] * a[:1]
        term = torch.empty_like(total)
        for k in range(1, a.shape[0]):
            torch.mul(b[part, k : k + 1], a[k : k + 1], out=term)
            total += term
        total += base[part]
        out[part] = total
    return out
