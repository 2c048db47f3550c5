"""Digests of tensors: 64 bits that add up over the parts of a tensor, in any order and for any cut.

    digest(part) = sum over rows r and words w of  a[r] * b[w] * word[r, w]   mod 2^64

r and w count within the whole tensor, so the digests of disjoint parts add up to that of the whole. A word is 8 bytes
along the last dimension, as one integer; where a cut falls inside a word, each part has the word with zeros for the other
part's bytes. a and b are odd pseudo-random numbers (splitmix64, Steele et al. 2014), the same for every tensor. A vector
is one row.

A change within one word is always noticed, because a and b are odd. A change of several words is missed with a probability
of about 2^(t - 64), where t is the lowest bit that differs in any word. So only changes that are confined to the highest
bits of words can escape, for example two flipped signs of a bfloat16 tensor, both in columns 3, 7, 11, ...

torch.mv on int64 runs at the speed of a copy on CPU (measured); for large models a compiled kernel is faster (digest_cpu.py).
CUDA has no such product, and a kernel of its own (digest_gpu.py), which was not run on a GPU yet.
"""

from __future__ import annotations

import functools
import importlib.util
import math

import torch
from torch import Tensor

from grpo_megatron.sync import digest_cpu
from grpo_megatron.sync.tensors import SyncTensor

WORD_BYTES = 8
_CHUNK_BYTES = 64 << 20  # temporary memory of a product on devices without an integer mv
_ROWS, _WORDS = 1, 2  # seeds of a and b
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> dtype with the same bits


@torch.no_grad()
def part_digest(part: Tensor, tensor: SyncTensor, start: int) -> Tensor:
    """The digest of `part`, which is `tensor` from position `start` of its axis on. int64 [], on the part's device.

    Needs no contiguous memory, and does not wait for the device.
    """
    return _digest(*_placed(part, tensor, start))[0]


@torch.no_grad()
def digest_and_sum(part: Tensor, tensor: SyncTensor, start: int) -> tuple[Tensor, Tensor]:
    """`part_digest`, and a number that is not finite if any value is not: the sum of the values, or 0 or NaN.

    The sum may also overflow.
    """
    placed = _placed(part, tensor, start)
    digest, number = _digest(*placed)
    return digest, placed[0].sum(-1).sum() if number is None else number  # aminmax takes twice as long on CPU


def _placed(part: Tensor, tensor: SyncTensor, start: int) -> tuple[Tensor, int, int]:
    """The part in two dimensions, and the row and column of its first element."""
    part = part.detach()
    if part.dim() == 1:
        return part[None], 0, start
    return (part, start, 0) if tensor.axis == 0 else (part, 0, start)


def _digest(values: Tensor, row: int, column: int) -> tuple[Tensor, Tensor | None]:
    """The digest of values [R, C], whose first one is at (row, column) of the whole tensor; NaN or a sum if any is not
    finite, or None if that was not looked at."""
    bits = values.view(_INTEGERS[values.element_size()])
    num_rows, num_columns = bits.shape
    per_word = WORD_BYTES // bits.element_size()
    head = min(-column % per_word, num_columns)  # elements before the first whole word
    tail = head + (num_columns - head) // per_word * per_word  # end of the last whole word
    rows = _numbers(_ROWS, row, row + num_rows, bits.device)
    digest, number = torch.zeros((), dtype=torch.int64, device=bits.device), None
    if tail > head:
        words, first_word = _as_words(bits[:, head:tail]), (column + head) // per_word
        factors = _numbers(_WORDS, first_word, first_word + words.shape[1], words.device)
        if digest_cpu.is_used_for(words):
            digest, is_finite = digest_cpu.weighted_sum(words, rows, factors, values.dtype)
            number = torch.tensor(0.0 if is_finite else math.nan)
        else:
            digest = (_product(words, factors) * rows).sum()
    for first, last in ((0, head), (tail, num_columns)):
        if last > first:
            digest = digest + (_edge(bits[:, first:last], column + first, per_word) * rows).sum()
            number = None if number is None else number + values[:, first:last].sum()
    return digest, number


def _as_words(bits: Tensor) -> Tensor:
    """[R, C] -> [R, C * itemsize / 8] of int64. Copies where the rows are not aligned to words."""
    per_word = WORD_BYTES // bits.element_size()
    is_aligned = bits.stride(1) == 1 and bits.stride(0) % per_word == 0 and bits.storage_offset() % per_word == 0
    if not is_aligned:
        bits = bits.clone(memory_format=torch.contiguous_format)
    return bits.view(torch.int64)


def _product(words: Tensor, factors: Tensor) -> Tensor:
    """Per row the sum of b[w] * word. [R]"""
    if words.device.type == "cpu":
        return torch.mv(words, factors)
    if not _has_triton():
        return _product_in_chunks(words, factors)
    from grpo_megatron.sync.digest_gpu import row_sums

    return row_sums(words, factors)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _product_in_chunks(words: Tensor, factors: Tensor) -> Tensor:
    """torch.mv for devices that have none for integers, and no Triton. Not run on a GPU yet."""
    chunks = words.split(max(1, _CHUNK_BYTES // (words.shape[1] * WORD_BYTES)))
    return torch.cat([(chunk * factors).sum(1) for chunk in chunks])


def _edge(bits: Tensor, column: int, per_word: int) -> Tensor:
    """`_product` of a few columns that are no whole word: elements without sign, at their places within the word. [R]"""
    num_bits = 64 // per_word
    values = bits.to(torch.int64) if per_word == 1 else bits.to(torch.int64) & ((1 << num_bits) - 1)
    columns = torch.arange(column, column + bits.shape[1], device=bits.device)
    first = column // per_word
    factors = _numbers(_WORDS, first, (column + bits.shape[1] - 1) // per_word + 1, bits.device)
    return (values * (factors[columns // per_word - first] << (columns % per_word * num_bits))).sum(1)


def _numbers(seed: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Numbers start to stop of a fixed sequence of odd numbers. [stop - start]"""
    size = 1 << max(10, (stop - 1).bit_length())
    return _table(seed, size, device)[start:stop]


@functools.lru_cache(maxsize=64)
def _table(seed: int, size: int, device: torch.device) -> Tensor:
    """splitmix64 of `seed` in int64, whose arithmetic is that of 64-bit words. [size]"""

    def shifted(values: Tensor, count: int) -> Tensor:  # logical: torch's own shift keeps the sign
        return (values >> count) & ((1 << (64 - count)) - 1)

    z = torch.arange(1, size + 1, device=device) * _signed(0x9E3779B97F4A7C15) + (seed << 40)
    z = (z ^ shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ shifted(z, 31)) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
