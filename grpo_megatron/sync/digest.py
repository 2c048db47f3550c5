"""Digests of tensors: 64 bits that add up over the parts of a tensor, in any order and for any cut.

    digest(part) = sum over rows r and words w of  a[r] * b[w] * word[r, w]   mod 2^64

r and w count within the whole tensor, so the digests of disjoint parts add up to that of the whole. A word is 8 bytes
along the last dimension, as one integer; where a cut falls inside a word, each part has the word with zeros for the other
part's bytes. a and b are odd pseudo-random numbers (splitmix64, Steele et al. 2014), the same for every tensor. A vector
is one row.

A change within one word is always noticed, because a and b are odd. A change of several words is missed with a probability
of about 2^(t - 64), where t is the lowest bit that differs in any word. So only changes that are confined to the highest
bits of words can escape, for example two flipped signs of a bfloat16 tensor, both in columns 3, 7, 11, ...

torch.mv on int64 runs at the speed of a copy on CPU (measured); for large models a compiled kernel is faster (`load_kernel`).
CUDA has no such product, and a kernel of its own (digest_gpu.py), which was not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.sync.tensors import EngineTensors, Interval, Share, SyncTensor, shortened

# -- The sum of a digest on the CPU, compiled by numba: one pass over memory, which also finds NaN and infinities ------
# sum over rows r and words w of a[r] * b[w] * word[r, w]   mod 2^64
#
# torch needs two passes over the policy's weights, a product and a sum, and its product is slower: both digests of a sync
# take 1.5 times as long (measured). Importing numba and compiling take 0.7 s, so `load` does nothing for a small model, nor
# without numba, which comes with vLLM. The values are those of the torch form.

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


def load_kernel(num_bytes: int) -> None:
    """Compile the kernel if a rank digests `num_bytes` at a sync, and that is worth while."""
    if num_bytes >= SMALLEST_SYNC and not _loaded and importlib.util.find_spec("numba") is not None:
        with contextlib.suppress(Exception):  # a numba that does not fit: torch's form gives the same values
            _loaded.append(_compiled())


def _is_compiled_for(words: Tensor) -> bool:
    return bool(_loaded) and words.device.type == "cpu" and words.numel() >= SMALLEST_TENSOR


def _weighted_sum(words: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
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


WORD_BYTES = 8
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
        if _is_compiled_for(words):
            digest, is_finite = _weighted_sum(words, rows, factors, values.dtype)
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
    """The sum of b[w] * word for each row. [R]"""
    if words.device.type == "cpu":
        return torch.mv(words, factors)
    from grpo_megatron.sync.digest_gpu import row_sums

    return row_sums(words, factors)


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


# -- Attestation: what an engine must hold, computed from the policy's shards, and the comparison with what it does hold
# Every part of every tensor has one witness among the ranks that hold it. A witness digests its parts; one all-reduce adds
# them up to a table [tensors, engine ranks] of what each engine rank must hold, and to the digest of each whole tensor.


@dataclass(frozen=True)
class Expected:
    """Digests of a model's weights; they are the same on every rank.

    `digests[name]` has one digest per engine rank, of the part that this rank reads. `weights_digest` is that of all
    tensors whole, in hexadecimal: it does not depend on any layout. `non_finite` names tensors with NaN or infinities.
    """

    digests: Mapping[str, list[int]]
    weights_digest: str
    non_finite: list[str]


@torch.no_grad()
def expected_digests(
    shares: Sequence[Share],
    read: Callable[[str], Tensor],
    engine: EngineTensors,
    reduce: Callable[[Tensor], None],
    device: torch.device,
) -> Expected:
    """The digests of all weights. Collective: `reduce` adds an int64 tensor up over all ranks, in place.

    `shares` are those of which this rank is the witness; shares of one parameter are neighbours. `read` gives a
    parameter as this rank keeps it. An error of `read` is raised after `reduce`, because the other ranks wait there.
    Waits for the device twice.
    """
    names = list(engine.tensors)
    row_of = {name: row for row, name in enumerate(names)}
    num_ranks = len(next(iter(engine.spans.values())))
    whole, non_finite = num_ranks, num_ranks + 1  # columns after those of the engine's ranks
    table = torch.zeros(len(names), num_ranks + 2, dtype=torch.int64, device=device)
    try:
        if shares:
            digests, problems = _digest_shares(shares, read)
            _add(table, shares, row_of, lambda share: (*share.engine_ranks, whole), digests)
            _add(table, shares, row_of, lambda share: (non_finite,), problems)
    finally:
        reduce(table)
    rows = table.tolist()
    return Expected(
        digests={name: row[:num_ranks] for name, row in zip(names, rows, strict=True)},
        weights_digest=_combined(names, [row[whole] for row in rows]),
        non_finite=[name for name, row in zip(names, rows, strict=True) if row[non_finite]],
    )


def _digest_shares(shares: Sequence[Share], read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the digest of each share, and 1 where a share has non-finite values. Two int64 tensors [shares]."""
    digests: list[Tensor] = []
    sums: list[Tensor] = []
    for part, share in _parts(shares, read):
        digest, number = digest_and_sum(part, share.tensor, share.start)
        digests.append(digest)
        sums.append(number)
    is_finite = torch.stack(sums).isfinite()
    if not is_finite.all():  # a sum may also have overflowed
        extremes = torch.stack([value for part, _ in _parts(shares, read) for value in torch.aminmax(part)])
        is_finite = extremes.view(-1, 2).isfinite().all(1)  # NaN if any value is NaN
    return torch.stack(digests), (~is_finite).to(torch.int64)


def _parts(shares: Sequence[Share], read: Callable[[str], Tensor]) -> Iterator[tuple[Tensor, Share]]:
    name, parameter = None, torch.empty(0)
    for share in shares:
        if share.parameter != name:
            name, parameter = share.parameter, read(share.parameter)
        yield parameter.narrow(share.tensor.axis, share.local_start, share.stop - share.start), share


def _add(
    table: Tensor,
    shares: Sequence[Share],
    row_of: Mapping[str, int],
    columns_of: Callable[[Share], tuple[int, ...]],
    values: Tensor,
) -> None:
    """Add each share's value to its tensor's row, in the given columns."""
    cells = [(row_of[s.tensor.name], column, index) for index, s in enumerate(shares) for column in columns_of(s)]
    rows, columns, indices = (torch.tensor(values_of, device=table.device) for values_of in zip(*cells, strict=True))
    table.index_put_((rows, columns), values[indices], accumulate=True)


def _combined(names: Sequence[str], digests: Sequence[int]) -> str:
    text = "\n".join(f"{name} {digest}" for name, digest in sorted(zip(names, digests, strict=True)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def compare(
    expected: Expected, held: Mapping[str, int], engine: EngineTensors, engine_rank: int, rank: int
) -> str | None:
    """Returns what is wrong with an engine rank whose memory has the digests `held`: tensors, slices, and global `rank`."""
    wrong = []
    for name in engine.tensors:
        start, stop = engine.spans[name][engine_rank]
        if start < stop and held.get(name) != expected.digests[name][engine_rank]:
            wrong.append(name)
    if not wrong:
        return None
    # Digests depend on values and positions, not on names: they show what was mistaken for what.
    owner = {digests[engine_rank]: name for name, digests in expected.digests.items()}
    problems = []
    for name in wrong:
        origin = owner.get(held[name]) if name in held else None
        reason = f" (it holds {origin})" if origin else "" if name in held else " (not loaded)"
        problems.append(f"{_slice(engine.tensors[name], engine.spans[name][engine_rank])} on rank {rank}{reason}")
    return shortened(["the engine does not hold the weights that were sent", *problems])


def _slice(tensor: SyncTensor, span: Interval) -> str:
    return f"{tensor.name} {'columns' if tensor.axis else 'rows'} {span[0]} to {span[1]}"
