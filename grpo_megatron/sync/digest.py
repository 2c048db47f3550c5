"""Digests of tensors: 64 bits that add up over the slices of a tensor, in any order and for any cut.

`slice_digest` has the formula. `expected_digests` computes what each engine rank must have, from the policy's shards, and
`compare` compares it with the digests of the engine's memory.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_megatron.sync.plan import EngineTensors, Interval, SyncTensor, shortened

WORD_BYTES = 8
_ROWS, _WORDS = 1, 2  # seeds of a and b
BLOCK_WORDS = 1 << 23  # that are multiplied at a time where torch has no product: 64 MiB
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> dtype with the same bits


@torch.no_grad()
def slice_digest(values: Tensor, tensor: SyncTensor, start: int) -> Tensor:
    """Digest `values`, which are `tensor` from position `start` of its axis on. int64 [], on their device.

        digest(slice) = sum over rows r and words w of  a[r] * b[w] * word[r, w]   mod 2^64

    r and w count within the complete tensor, so the digests of disjoint slices add up to that of the tensor. A word is 8
    bytes along the last dimension, as one integer; where a cut falls inside a word, each slice has the word with zeros for
    the other slice's bytes. a and b are odd pseudo-random numbers (splitmix64, Steele et al. 2014), the same for every
    tensor. A vector is one row. Needs no contiguous memory, and does not wait for the device.

    A change within one word is always noticed, because a and b are odd. A change of several words is missed with a
    probability of about 2^(t - 64), where t is the lowest bit that differs in any word. So only changes that are confined to
    the highest bits of words can escape, for example two flipped signs of a bfloat16 tensor, both in columns 3, 7, 11, ...
    """
    return group_digests(values[None], tensor, start)[0]


@torch.no_grad()
def ragged_digests(values: Tensor, lengths: Tensor, numbers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Digest rows of different lengths, which stand one after the other in `values`, int64 [..., N]. int64 [..., rows].

        digest(row) = (length + 1) * a[0] + sum over t of  b[t] * value[t]   mod 2^64

    Also returns the mean and the projection (see `group_magnitudes`) of each row of `numbers`, [..., N]. float64 [..., rows, 2].
    """
    ends, device = lengths.cumsum(0), values.device
    begins = ends - lengths
    places = torch.arange(values.shape[-1], device=device) - begins.repeat_interleave(lengths)
    factors = _numbers(_WORDS, 0, int(lengths.max()) if len(lengths) else 0, device)[places]
    sums = torch.nn.functional.pad((values * factors).cumsum(-1), (1, 0))
    digests = sums[..., ends] - sums[..., begins] + (lengths + 1) * _numbers(_ROWS, 0, 1, device)
    if numbers is None:
        return digests, torch.empty(*digests.shape, 0)
    numbers = numbers.double()
    both = torch.nn.functional.pad(torch.stack([numbers, numbers * (1 - (factors & 2))]).cumsum(-1), (1, 0))
    means, projections = both[..., ends] - both[..., begins]
    return digests, torch.stack([means / lengths.clamp(min=1), projections], -1)


def group_magnitudes(group: Tensor, tensor: SyncTensor, start: int) -> tuple[Tensor, Tensor]:
    """Compute norm and projection of slices as in `group_digests`. Squares and projections add up over slices. Both [n].

        projection = sum over r and c of  u[r] * v[c] * value[r, c],  with pseudo-random signs u and v

    The projection of a difference D of two tensors has the mean square |D|^2, so two projections estimate how far two tensors
    are from each other (Johnson and Lindenstrauss 1984). On CPU torch.mv takes a quarter of the time of a batched product.
    """
    is_matrix = group.dim() > 2
    values = (group.flatten(2) if is_matrix else group[:, None]).float()
    row, column = (start, 0) if is_matrix and tensor.axis == 0 else (0, start)
    u = _signs(_ROWS, row, row + values.shape[1], values.device)
    v = _signs(_WORDS, column, column + values.shape[2], values.device)
    products = torch.stack([torch.mv(matrix, v) for matrix in values]) if values.device.type == "cpu" else values @ v
    return torch.linalg.vector_norm(values, dim=(1, 2)), products @ u


@functools.lru_cache(maxsize=4096)
def _signs(seed: int, start: int, stop: int, device: torch.device) -> Tensor:
    return 1.0 - (_numbers(seed, start, stop, device) & 2)


@torch.no_grad()
def group_digests(group: Tensor, tensor: SyncTensor, start: int) -> Tensor:
    """Digest n slices [n, ...], each of a tensor like `tensor`, in as many kernels as one takes. int64 [n].

    torch.mv on int64 runs at the speed of a copy on CPU (measured). CUDA has no such product: there words are multiplied and
    summed in blocks of rows, which was not run on a GPU yet.
    """
    is_matrix = group.dim() > 2
    values = group.detach().flatten(2) if is_matrix else group.detach()[:, None]  # [n, R, C]
    row, column = (start, 0) if is_matrix and tensor.axis == 0 else (0, start)  # of the first element
    bits = values.view(_INTEGERS[values.element_size()])
    count, num_rows, num_columns = bits.shape
    per_word = WORD_BYTES // bits.element_size()
    head = min(-column % per_word, num_columns)  # elements before the first complete word
    tail = head + (num_columns - head) // per_word * per_word  # end of the last complete word
    rows = _numbers(_ROWS, row, row + num_rows, bits.device)
    digests = torch.zeros(count, dtype=torch.int64, device=bits.device)
    if tail > head:
        words, first_word = _as_words(bits[..., head:tail]), (column + head) // per_word
        factors = _numbers(_WORDS, first_word, first_word + words.shape[2], words.device)
        digests = (_product(words, factors) * rows).sum(1)
    for first, last in ((0, head), (tail, num_columns)):
        if last > first:
            digests = digests + (_edge(bits[..., first:last], column + first, per_word) * rows).sum(1)
    return digests


def _as_words(bits: Tensor) -> Tensor:
    """[n, R, C] -> [n, R, C * itemsize / 8] of int64. Copies where the rows are not aligned to words."""
    per_word = WORD_BYTES // bits.element_size()
    distances = *bits.stride()[:-1], bits.storage_offset()
    if bits.stride(-1) != 1 or any(distance % per_word for distance in distances):
        bits = bits.clone(memory_format=torch.contiguous_format)
    return bits.view(torch.int64)


def _product(words: Tensor, factors: Tensor) -> Tensor:
    """The sum of b[w] * word for each row. [n, R]"""
    if words.device.type == "cpu":
        return torch.stack([torch.mv(matrix, factors) for matrix in words])
    return _product_in_blocks(words, factors)


def _product_in_blocks(words: Tensor, factors: Tensor) -> Tensor:
    rows = max(1, BLOCK_WORDS // words.shape[2])  # of one slice, or of several complete ones
    matrices = words.split(max(1, rows // words.shape[1]))
    return torch.cat([torch.cat([(b * factors).sum(2) for b in matrix.split(rows, 1)], 1) for matrix in matrices])


def _edge(bits: Tensor, column: int, per_word: int) -> Tensor:
    """`_product` of a few columns that are no complete word: elements without sign, at their places within the word. [n, R]"""
    num_bits = 64 // per_word
    values = bits.to(torch.int64) if per_word == 1 else bits.to(torch.int64) & ((1 << num_bits) - 1)
    columns = torch.arange(column, column + bits.shape[2], device=bits.device)
    first = column // per_word
    factors = _numbers(_WORDS, first, (column + bits.shape[2] - 1) // per_word + 1, bits.device)
    return (values * (factors[columns // per_word - first] << (columns % per_word * num_bits))).sum(2)


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


# -- Attestation -------------------------------------------------------------------------------------------------------


class DigestSlice(NamedTuple):
    """A slice of a tensor on one of its holders: `[start, stop)`, at `local_start` of its `parameter`.

    `engine_ranks` read all of this slice. It is number `copy` of the equal `num_copies`. First copies are every position of
    every tensor once; the engine must have their digests.
    """

    parameter: str
    tensor: SyncTensor
    start: int
    stop: int
    local_start: int
    engine_ranks: tuple[int, ...]
    copy: int = 0
    num_copies: int = 1


@functools.cache
def _factor(copy: int, num_copies: int) -> int:
    """Returns a copy's factor in a sum of digests that is 0 mod 2^64 if all copies are equal. With two, only then."""
    return pow(3, copy, 1 << 64) if copy else -sum(pow(3, other, 1 << 64) for other in range(1, num_copies))


@dataclass(frozen=True)
class Expected:
    """Digests of a model's weights; they are the same on every rank.

    `digests[name]` has one digest per engine rank, of the slice that this rank reads. `weights_digest` is that of all
    complete tensors, in hexadecimal: it does not depend on any layout. `complete` are the digests that it is made of.
    `non_finite` names tensors with NaN or infinities, and `unequal` those of which not all holders have the same bits.
    """

    digests: Mapping[str, list[int]]
    weights_digest: str
    non_finite: list[str]
    unequal: list[str] = field(default_factory=list)
    complete: Mapping[str, int] = field(default_factory=dict)


@torch.no_grad()
def expected_digests(
    slices: Sequence[DigestSlice],
    read: Callable[[str], Tensor],
    engine: EngineTensors,
    reduce: Callable[[Tensor], None],
    device: torch.device,
) -> Expected:
    """Compute the digests of all weights. Collective: `reduce` adds an int64 tensor up over all ranks, in place.

    It adds a table [tensors, engine ranks] of what each engine rank must have, the digest of each complete tensor, and a sum
    over all copies of it. `slices` are those that this rank has; slices of one parameter are neighbours. `read` returns this
    rank's shard of a parameter. An error of `read` is raised after `reduce`, because the other ranks wait there. Waits for
    the device twice.
    """
    names, slices = list(engine.tensors), [part for slice_ in slices for part in _kept_parts(slice_, engine)]
    row_of = {name: row for row, name in enumerate(names)}
    num_ranks = len(next(iter(engine.spans.values())))
    complete, non_finite, unequal = range(num_ranks, num_ranks + 3)  # columns after those of the engine's ranks
    table = torch.zeros(len(names), num_ranks + 3, dtype=torch.int64, device=device)
    try:
        if slices:
            cells = []  # row, column, index in the values, factor
            for index, slice_ in enumerate(slices):
                row, factor = row_of[slice_.tensor.name], _factor(slice_.copy, slice_.num_copies)
                columns = () if slice_.copy else (*slice_.engine_ranks, complete)
                cells += [(row, column, index, 1) for column in columns]
                cells.append((row, non_finite, len(slices) + index, 1))
                cells.append((row, unequal, index, _signed(factor % (1 << 64))))
            place = torch.tensor(cells, device=device).T
            table.index_put_((place[0], place[1]), _digest_slices(slices, read)[place[2]] * place[3], accumulate=True)
    finally:
        reduce(table)
    rows = table.tolist()
    return Expected(
        digests={name: row[:num_ranks] for name, row in zip(names, rows, strict=True)},
        weights_digest=hashlib.blake2b(
            "\n".join(f"{name} {row[complete]}" for name, row in sorted(zip(names, rows, strict=True))).encode(),
            digest_size=8,
        ).hexdigest(),
        non_finite=[name for name, row in zip(names, rows, strict=True) if row[non_finite]],
        unequal=[name for name, row in zip(names, rows, strict=True) if row[unequal]],
        complete={name: row[complete] for name, row in zip(names, rows, strict=True)},
    )


def _kept_parts(slice_: DigestSlice, engine: EngineTensors) -> Iterator[DigestSlice]:
    """Yields the slice, cut where intervals begin or end that an engine rank keeps of what it reads."""
    if (kept := engine.kept.get(slice_.tensor.name)) is None:
        yield slice_
        return
    start, stop = slice_.start, slice_.stop
    inside = {border for of_rank in kept for span in of_rank for border in span if start < border < stop}
    for low, high in itertools.pairwise(sorted({start, stop, *inside})):
        ranks = tuple(rank for rank in slice_.engine_ranks if any(a <= low < b for a, b in kept[rank]))
        place = slice_.local_start + low - start
        yield slice_._replace(start=low, stop=high, local_start=place, engine_ranks=ranks)


def _digest_slices(slices: Sequence[DigestSlice], read: Callable[[str], Tensor]) -> Tensor:
    """The digest of each slice, then 1 for each slice that has non-finite values and 0 for others. int64 [2 * slices]."""
    order: list[int] = []  # of the slices in what follows
    digests: list[Tensor] = []
    sums: list[Tensor] = []
    for group, slice_, numbers in grouped_values(slices, read):
        order += numbers
        digests.append(group_digests(group, slice_.tensor, slice_.start))
        sums.append(group.sum(-1).view(len(group), -1).sum(1))  # aminmax takes twice as long on CPU
    is_finite = torch.cat([values.float() for values in sums]).isfinite()
    if not is_finite.all():  # a sum may also have overflowed
        extremes = [group.flatten(1).aminmax(dim=1) for group, _, _ in grouped_values(slices, read)]
        is_finite = torch.cat([low.isfinite() & high.isfinite() for low, high in extremes])  # NaN if any value is NaN
    values = torch.stack([torch.cat(digests), (~is_finite).to(torch.int64)])
    out = torch.empty_like(values)
    out[:, torch.tensor(order, device=values.device)] = values
    return out.flatten()


GROUP_ELEMENTS = 1 << 27  # of parameters that are digested together: a copy, unless they are at equal distances


def digest_groups(slices: Sequence[DigestSlice]) -> list[list[list[int]]]:
    """Group the numbers of slices that are digested together: group -> parameter -> its slices.

    The parameters of a group are of one kind (their names differ in numbers only), and have slices at the same places.
    """
    groups: list[list[list[int]]] = []
    last: dict[object, list[list[int]]] = {}  # the group of each kind that is not full
    for name, iterator in itertools.groupby(range(len(slices)), key=lambda number: slices[number].parameter):
        numbers = list(iterator)
        places = [
            (s.tensor.shape, s.tensor.axis, s.start, s.stop, s.local_start) for s in map(slices.__getitem__, numbers)
        ]
        kind = (re.sub(r"\d+", "#", name), *places)
        size = sum(math.prod(shape) // shape[axis] * (stop - start) for shape, axis, start, stop, _ in places)
        if kind not in last or (len(last[kind]) + 1) * size > GROUP_ELEMENTS:
            last[kind] = []
            groups.append(last[kind])
        last[kind].append(numbers)
    return groups


def grouped_values(
    slices: Sequence[DigestSlice], read: Callable[[str], Tensor], groups: Sequence[list[list[int]]] | None = None
) -> Iterator[tuple[Tensor, DigestSlice, list[int]]]:
    """Yield (values [n, ...], the first slice of them, the numbers of all), until every slice was there once."""
    for group in digest_groups(slices) if groups is None else groups:
        parameters = [read(slices[numbers[0]].parameter) for numbers in group]
        values = group_view(parameters)
        if values is None and (backward := group_view(parameters[::-1])) is not None:
            values, group = backward, group[::-1]  # Megatron's buffers begin with the last parameter
        elif values is None:
            values = torch.stack(parameters)
        for same in zip(*group, strict=True):
            slice_ = slices[same[0]]
            axis, length = slice_.tensor.axis + 1, slice_.stop - slice_.start
            yield values.narrow(axis, slice_.local_start, length), slice_, list(same)


def compare(
    expected: Expected, digests: Mapping[str, int], engine: EngineTensors, engine_rank: int, rank: int
) -> str | None:
    """Say which tensors and slices of an engine rank are wrong, if its memory has these digests. `rank`: the global one."""
    wrong = []
    for name in engine.tensors:
        start, stop = engine.spans[name][engine_rank]
        if start < stop and digests.get(name) != expected.digests[name][engine_rank]:
            wrong.append(name)
    if not wrong:
        return None
    # Digests depend on values and positions, not on names: they show what was mistaken for what.
    owner = {of_tensor[engine_rank]: name for name, of_tensor in expected.digests.items()}
    problems = []
    for name in wrong:
        origin = owner.get(digests[name]) if name in digests else None
        reason = f" (it holds {origin})" if origin else "" if name in digests else " (not loaded)"
        axis, (start, stop) = ("rows", "columns")[engine.tensors[name].axis], engine.spans[name][engine_rank]
        problems.append(f"{name} {axis} {start} to {stop} on rank {rank}{reason}")
    return shortened(["the engine does not hold the weights that were sent", *problems])


# -- Groups: tensors of one shape that are copied, loaded and digested in one call, such as one linear layer of all experts
# A model with experts has tens of thousands of small tensors: 18,432 in Qwen3-30B-A3B, 144 if those of a layer are grouped.
# Each call on a GPU takes a few microseconds of the host, whatever its size.


def group_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """View tensors that are at equal distances in one memory, in their order, as one [n, ...]. None: they are not."""
    first = tensors[0]
    if len(tensors) == 1:
        return first[None]
    distance = tensors[1].storage_offset() - first.storage_offset()
    memory = first.untyped_storage().data_ptr()
    kind = (first.shape, first.stride(), first.dtype, first.device)
    for number, tensor in enumerate(tensors):
        is_next = tensor.storage_offset() == first.storage_offset() + number * distance
        if not is_next or (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) != kind:
            return None
        if tensor.untyped_storage().data_ptr() != memory:
            return None
    if distance <= 0:
        return None
    return first.as_strided((len(tensors), *first.shape), (distance, *first.stride()))


def empty_group(
    count: int, tensor: SyncTensor, span: Interval, allocate: Callable[[tuple[int, ...]], Tensor]
) -> Tensor:
    """Allocate [count, *tensor.shape], of which only `span` of each tensor's axis has memory of its own.

    The rest overlaps, and is undefined: a rank of an engine that reads an eighth of every expert needs memory for an
    eighth. `allocate` is like `torch.empty`.
    """
    start, stop = span
    shape = [*tensor.shape[: tensor.axis], stop - start, *tensor.shape[tensor.axis + 1 :]]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # Position p of the axis is at p * stride, and `span` begins `start` positions after the beginning of the memory.
    outside = (tensor.length - (stop - start)) * strides[tensor.axis]
    memory = allocate((count * math.prod(shape) + outside,))
    return memory.as_strided((count, *tensor.shape), (math.prod(shape), *strides))


@torch.no_grad()
def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first. One call for those that are contiguous, which CUDA copies in few kernels."""
    for is_dense in (True, False):
        chosen = [pair for pair in pairs if (pair[0].is_contiguous() and pair[1].is_contiguous()) == is_dense]
        if chosen:
            torch._foreach_copy_([target for target, _ in chosen], [source for _, source in chosen])
