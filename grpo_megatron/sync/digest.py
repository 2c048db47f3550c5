"""Digests of tensors: 64 bits that add up over the parts of a tensor, in any order and for any cut.

    digest(part) = sum over rows r and words w of  a[r] * b[w] * word[r, w]   mod 2^64

r and w count within the whole tensor, so the digests of disjoint parts add up to that of the whole. A word is 8 bytes
along the last dimension, as one integer; where a cut falls inside a word, each part has the word with zeros for the other
part's bytes. a and b are odd pseudo-random numbers (splitmix64, Steele et al. 2014), the same for every tensor. A vector
is one row.

A change within one word is always noticed, because a and b are odd. A change of several words is missed with a probability
of about 2^(t - 64), where t is the lowest bit that differs in any word. So only changes that are confined to the highest
bits of words can escape, for example two flipped signs of a bfloat16 tensor, both in columns 3, 7, 11, ...

torch.mv on int64 runs at the speed of a copy on CPU (measured). CUDA has no such product: there words are multiplied and
summed in blocks of rows, which was not run on a GPU yet.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_megatron.sync.plan import EngineTensors, SyncTensor, shortened
from grpo_megatron.sync.stacks import as_stack

WORD_BYTES = 8
_ROWS, _WORDS = 1, 2  # seeds of a and b
BLOCK_WORDS = 1 << 23  # that are multiplied at a time where torch has no product: 64 MiB
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> dtype with the same bits


@torch.no_grad()
def part_digest(part: Tensor, tensor: SyncTensor, start: int) -> Tensor:
    """The digest of `part`, which is `tensor` from position `start` of its axis on. int64 [], on the part's device.

    Needs no contiguous memory, and does not wait for the device.
    """
    return stack_digests(part[None], tensor, start)[0]


@torch.no_grad()
def stack_digests(stack: Tensor, tensor: SyncTensor, start: int) -> Tensor:
    """The digests [n] of n parts [n, ...] in as many kernels as one takes. Each is that part of a tensor like `tensor`."""
    is_matrix = stack.dim() > 2
    values = stack.detach().flatten(2) if is_matrix else stack.detach()[:, None]  # [n, R, C]
    row, column = (start, 0) if is_matrix and tensor.axis == 0 else (0, start)  # of the first element
    bits = values.view(_INTEGERS[values.element_size()])
    count, num_rows, num_columns = bits.shape
    per_word = WORD_BYTES // bits.element_size()
    head = min(-column % per_word, num_columns)  # elements before the first whole word
    tail = head + (num_columns - head) // per_word * per_word  # end of the last whole word
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
        return torch.stack([torch.mv(part, factors) for part in words])
    return _product_in_blocks(words, factors)


def _product_in_blocks(words: Tensor, factors: Tensor) -> Tensor:
    rows = max(1, BLOCK_WORDS // words.shape[2])  # of one part, or of several whole parts
    parts = words.split(max(1, rows // words.shape[1]))
    return torch.cat([torch.cat([(b * factors).sum(2) for b in part.split(rows, 1)], 1) for part in parts])


def _edge(bits: Tensor, column: int, per_word: int) -> Tensor:
    """`_product` of a few columns that are no whole word: elements without sign, at their places within the word. [n, R]"""
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


# -- Attestation: what an engine must hold, computed from the policy's shards, and the comparison with what it does hold
# Every part of every tensor has one witness among the ranks that hold it. A witness digests its parts; one all-reduce adds
# them up to a table [tensors, engine ranks] of what each engine rank must hold, and to the digest of each whole tensor.


class Share(NamedTuple):
    """A part of a tensor that one rank digests for all: `[start, stop)`, kept at `local_start` of its `parameter`.

    The shares of all ranks together are every position of every tensor once. `engine_ranks` read all of this part.
    """

    parameter: str
    tensor: SyncTensor
    start: int
    stop: int
    local_start: int
    engine_ranks: tuple[int, ...]


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
            cells = []  # row, column, index in the values
            for index, share in enumerate(shares):
                row = row_of[share.tensor.name]
                cells += [(row, column, index) for column in (*share.engine_ranks, whole)]
                cells.append((row, non_finite, len(shares) + index))
            place = torch.tensor(cells, device=device).T
            table.index_put_((place[0], place[1]), _digest_shares(shares, read)[place[2]], accumulate=True)
    finally:
        reduce(table)
    rows = table.tolist()
    return Expected(
        digests={name: row[:num_ranks] for name, row in zip(names, rows, strict=True)},
        weights_digest=hashlib.blake2b(
            "\n".join(f"{name} {row[whole]}" for name, row in sorted(zip(names, rows, strict=True))).encode(),
            digest_size=8,
        ).hexdigest(),
        non_finite=[name for name, row in zip(names, rows, strict=True) if row[non_finite]],
    )


def _digest_shares(shares: Sequence[Share], read: Callable[[str], Tensor]) -> Tensor:
    """The digest of each share, then 1 for each share that has non-finite values and 0 for others. int64 [2 * shares]."""
    order: list[int] = []  # of the shares in what follows
    digests: list[Tensor] = []
    sums: list[Tensor] = []
    for stack, share, numbers in _stacks(shares, read):
        order += numbers
        digests.append(stack_digests(stack, share.tensor, share.start))
        sums.append(stack.sum(-1).view(len(stack), -1).sum(1))  # aminmax takes twice as long on CPU
    is_finite = torch.cat([values.float() for values in sums]).isfinite()
    if not is_finite.all():  # a sum may also have overflowed
        extremes = [stack.flatten(1).aminmax(dim=1) for stack, _, _ in _stacks(shares, read)]
        is_finite = torch.cat([low.isfinite() & high.isfinite() for low, high in extremes])  # NaN if any value is NaN
    values = torch.stack([torch.cat(digests), (~is_finite).to(torch.int64)])
    out = torch.empty_like(values)
    out[:, torch.tensor(order, device=values.device)] = values
    return out.flatten()


STACK_ELEMENTS = (
    1 << 27
)  # of the parameters that are digested together; they are copied unless they are at equal distances


def share_groups(shares: Sequence[Share]) -> list[list[list[int]]]:
    """Numbers of shares that are digested together: group -> parameter -> its shares. One digest for each of a parameter's.

    The parameters of a group are of one kind (their names differ in numbers only), and their shares are the same parts.
    """
    groups: list[list[list[int]]] = []
    last: dict[object, list[list[int]]] = {}  # the group of each kind that is not full
    by_parameter = itertools.groupby(range(len(shares)), key=lambda number: shares[number].parameter)
    for name, numbers in ((name, list(numbers)) for name, numbers in by_parameter):
        own = [shares[number] for number in numbers]
        kind = (
            re.sub(r"\d+", "#", name),
            *((s.tensor.shape, s.tensor.axis, s.start, s.stop, s.local_start) for s in own),
        )
        size = sum(s.tensor.numel // s.tensor.length * (s.stop - s.start) for s in own)
        if kind not in last or (len(last[kind]) + 1) * size > STACK_ELEMENTS:
            last[kind] = []
            groups.append(last[kind])
        last[kind].append(numbers)
    return groups


def _stacks(shares: Sequence[Share], read: Callable[[str], Tensor]) -> Iterator[tuple[Tensor, Share, list[int]]]:
    """(parts [n, ...], the first one's share, the numbers of their shares), until every share was there once."""
    for group in share_groups(shares):
        parameters = [read(shares[numbers[0]].parameter) for numbers in group]
        stack, backward = (
            as_stack(parameters),
            as_stack(parameters[::-1]),
        )  # Megatron's buffers begin with the last parameter
        if stack is None and backward is not None:
            stack, group = backward, group[::-1]
        elif stack is None:
            stack = torch.stack(parameters)
        for same in zip(*group, strict=True):
            share = shares[same[0]]
            axis, length = share.tensor.axis + 1, share.stop - share.start
            yield stack.narrow(axis, share.local_start, length), share, list(same)


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
        axis, (start, stop) = ("rows", "columns")[engine.tensors[name].axis], engine.spans[name][engine_rank]
        problems.append(f"{name} {axis} {start} to {stop} on rank {rank}{reason}")
    return shortened(["the engine does not hold the weights that were sent", *problems])
