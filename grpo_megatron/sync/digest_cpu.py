"""The sum of a digest on the CPU, compiled by numba: one pass over memory, which also finds NaN and infinities.

    sum over rows r and words w of a[r] * b[w] * word[r, w]   mod 2^64

torch needs two passes over the policy's weights, a product and a sum, and its product is slower: both digests of a sync
take 1.5 times as long (measured). Importing numba and compiling take 0.7 s, so `load` does nothing for a small model, nor
without numba, which comes with vLLM. The values are those of the torch form.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALLEST_SYNC = 256 << 20  # bytes that a rank digests: the kernel has then saved its 0.7 s after about 100 syncs
SMALLEST_TENSOR = 1 << 16  # words; calling the kernel takes as long as torch needs for fewer
_EXPONENTS = {  # dtype -> (bits of the exponent, its lowest bit); all of them are set in NaN and infinities
    torch.bfloat16: (0x7F80, 0x0080),
    torch.float16: (0x7C00, 0x0400),
    torch.float32: (0x7F800000, 0x00800000),
    torch.float64: (0x7FF0000000000000, 0x0010000000000000),
}

_Sum = Callable[..., tuple[int, int]]
_loaded: list[_Sum] = []  # the kernel, once it has been compiled


def load(num_bytes: int) -> None:
    """Compile the kernel if a rank digests `num_bytes` at a sync, and that is worth while."""
    if num_bytes >= SMALLEST_SYNC and not _loaded and importlib.util.find_spec("numba") is not None:
        with contextlib.suppress(Exception):  # a numba that does not fit: torch's form gives the same values
            _loaded.append(_compiled())


def is_used_for(words: Tensor) -> bool:
    return bool(_loaded) and words.device.type == "cpu" and words.numel() >= SMALLEST_TENSOR


def weighted_sum(words: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """The sum over `words` [R, W], with `a` [R] and `b` [W], and whether all values are finite. All tensors are int64.

    Rows must be contiguous, and may have gaps between them. `dtype` is that of the values in the words.
    """
    numpy = words.numpy().view(np.uint64)
    factors, columns = (tensor.numpy().view(np.uint64) for tensor in (a, b))
    ones, lowest = (_in_every_value(bits, dtype) for bits in _EXPONENTS[dtype])
    total, carries = 0, 0
    # The compiler makes fast loops of contiguous memory. All rows but the last are so with the gap behind them.
    stride = numpy.strides[0] // numpy.itemsize
    with_gaps = np.lib.stride_tricks.as_strided(numpy, (len(numpy) - 1, stride), (numpy.strides[0], numpy.itemsize))
    for rows, of_rows in ((with_gaps, factors[:-1]), (numpy[-1:], factors[-1:])):
        part, seen = _loaded[0](np.ascontiguousarray(rows), of_rows, columns, ones, lowest)
        total, carries = (total + int(part)) % (1 << 64), carries | int(seen)
    signed = total - (1 << 64) if total >> 63 else total
    return torch.tensor(signed), not carries & int(_in_every_value(1 << 8 * dtype.itemsize - 1, dtype))


@functools.cache
def _in_every_value(bits: int, dtype: torch.dtype) -> np.uint64:
    """A word in whose every value `bits` are set."""
    width = 8 * dtype.itemsize
    return np.uint64(sum(bits << shift for shift in range(0, 64, width)))


def _compiled() -> _Sum:
    from numba import njit, uint64

    @njit("Tuple((uint64, uint64))(uint64[:, ::1], uint64[::1], uint64[::1], uint64, uint64)", nogil=True)
    def sum_of_words(words: Any, a: Any, b: Any, ones: Any, lowest: Any) -> tuple[Any, Any]:
        total, seen = uint64(0), uint64(0)
        num_columns = b.shape[0]
        for r in range(words.shape[0]):
            of_row, carries = uint64(0), uint64(0)
            for w in range(num_columns):
                word = words[r, w]
                of_row += word * b[w]
                carries |= (word & ones) + lowest  # an exponent of ones carries into the sign's bit, which is masked
            total += of_row * a[r]
            seen |= carries
        return total, seen

    return sum_of_words  # type: ignore[no-any-return]
