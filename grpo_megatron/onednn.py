"""Matrix products of float32 on the CPU by oneDNN, instead of by the BLAS that torch was built with.

torch's wheels multiply with Intel's MKL, which takes its AVX2 kernels on processors of other makers. oneDNN is in the same
wheels and takes AVX-512 wherever there is any: on an AMD EPYC (Zen 5) products of 2,240 rows run at 110 to 210 GFLOP/s per
core, with MKL at 75 to 95 (measured, one thread). Sums are made in another order, so results differ by rounding.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

FEWEST_WEIGHTS = 1 << 14  # elements of the right factor; with fewer, a product costs more to hand over than it gains

_registered: list[Any] = []  # torch.library.Library: its kernels are replaced as long as the object lives


def use_onednn() -> None:
    """Replace the CPU kernels of `mm` and `addmm` in this process, from now on. A second call does nothing.

    These two are what matrix products and linear layers come down to, forward and backward, in any library.
    """
    if _registered:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # that a kernel is replaced
        warnings.simplefilter("ignore", UserWarning)
        library.impl("mm", _mm, "CPU", allow_override=True)
        library.impl("addmm", _addmm, "CPU", allow_override=True)
    _registered.append(library)


def _mm(left: Tensor, right: Tensor) -> Tensor:
    if _is_worth_it(left, right):
        return _linear(left, right.t(), None)
    out = left.new_empty(left.shape[0], right.shape[1])
    return torch.ops.aten.mm.out(left, right, out=out)


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta == alpha == 1 and bias.dim() == 1 and bias.dtype == torch.float32 and _is_worth_it(left, right):
        return _linear(left, right.t(), bias)
    out = left.new_empty(left.shape[0], right.shape[1])
    return torch.ops.aten.addmm.out(bias, left, right, beta=beta, alpha=alpha, out=out)


def _linear(left: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """left [M, K] times weight [N, K] transposed, plus bias [N]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, weight, bias, "none", [], "")
    return product


def _is_worth_it(left: Tensor, right: Tensor) -> bool:
    return bool(
        left.dtype == right.dtype == torch.float32
        and right.numel() >= FEWEST_WEIGHTS  # whatever the rows: the bits of one must not depend on how many there are
        and _has_unit_stride(left)
        and _has_unit_stride(right)
    )


def _has_unit_stride(matrix: Tensor) -> bool:
    """Rows or columns lie one after another without overlap."""
    rows, columns = matrix.shape
    down, across = matrix.stride()
    return (across == 1 and down >= columns) or (down == 1 and across >= rows)
