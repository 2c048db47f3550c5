"""Digests of slices: they add up over every cut, and no single change goes unnoticed.

The reference is the definition itself, in Python's integers: words of 8 bytes, little-endian, zeros after the last column.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.sync import digest
from grpo_megatron.sync.digest import (
    DigestSlice,
    expected_digests,
    group_digests,
    group_magnitudes,
    ragged_digests,
    slice_digest,
)
from grpo_megatron.sync.plan import EngineTensors, SyncTensor

DTYPES = [torch.float32, torch.bfloat16]


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensor_digest(values: torch.Tensor) -> int:
    return int(slice_digest(values, SyncTensor("w", tuple(values.shape), 0), 0))


def splitmix64(seed: int, index: int) -> int:
    z = ((seed << 40) + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31 | 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 13), (3, 8), (9,), (1, 1), (0, 4)])
def test_digest_is_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = tensor_of(shape, dtype)
    rows = values[None] if len(shape) == 1 else values
    total = 0
    for r, row in enumerate(rows):
        data = row.contiguous().view(torch.uint8).numpy().tobytes()
        words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
        total += splitmix64(1, r) * sum(splitmix64(2, w) * word for w, word in enumerate(words))
    assert tensor_digest(values) % 2**64 == total % 2**64


@settings(max_examples=200, deadline=None)
@given(
    shape=st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 12), st.integers(1, 40))),
    axis=st.integers(0, 1),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
def test_slices_add_up_to_the_tensor(
    shape: tuple[int, ...], axis: int, cuts: list[int], dtype: torch.dtype, seed: int
) -> None:
    axis %= len(shape)
    values, tensor = tensor_of(shape, dtype, seed), SyncTensor("w", shape, axis)
    borders = [0, *sorted(min(cut, shape[axis]) for cut in cuts), shape[axis]]
    parts = [(values.narrow(axis, a, b - a), a) for a, b in zip(borders, borders[1:], strict=False)]
    digests = [slice_digest(part, tensor, start) for part, start in parts]
    assert sum(digests[::-1]) == tensor_digest(values)
    copies = [slice_digest(part.clone(), tensor, start) for part, start in parts]  # contiguous, other alignment
    assert copies == digests


@pytest.mark.parametrize(("shape", "axis"), [((8, 12), 0), ((8, 12), 1), ((12,), 0)])
def test_norms_and_projections_add_up_over_slices(shape: tuple[int, ...], axis: int) -> None:
    values, tensor = tensor_of(shape, torch.float32), SyncTensor("w", shape, axis)
    parts = [group_magnitudes(values.narrow(axis, a, b - a)[None], tensor, a) for a, b in ((0, 3), (3, shape[axis]))]
    [norm], [projection] = group_magnitudes(values[None], tensor, 0)
    assert torch.isclose(sum(n.square() for n, _ in parts).sqrt(), norm) and torch.isclose(norm, values.norm())
    assert torch.isclose(sum(p for _, p in parts), projection)
    flipped = values.flip(axis)  # the same norm
    assert abs(group_magnitudes(flipped[None], tensor, 0)[1][0] - projection) > 0.1


def test_rows_of_different_lengths_have_the_digests_of_each_alone() -> None:
    rows = [[5, 0, 7], [], [5, 0], [5], [0], [7, 0, 5]]
    lengths = torch.tensor(list(map(len, rows)))
    flat = torch.tensor([value for row in rows for value in row])
    together, numbers = ragged_digests(flat, lengths, flat)
    alone = [int(ragged_digests(torch.tensor(row, dtype=torch.int64), torch.tensor([len(row)]))[0]) for row in rows]
    assert together.tolist() == alone and len(set(alone)) == len(rows)
    assert numbers[:, 0].tolist() == [4, 0, 2.5, 5, 0, 4] and numbers[3, 1].abs() == 5


def test_memory_layout_does_not_matter() -> None:
    values = tensor_of((6, 10), torch.bfloat16)
    padded = torch.full((6, 13), 7.0, dtype=torch.bfloat16)
    padded[:, 1:11] = values  # neither rows nor start are aligned to words
    assert tensor_digest(padded[:, 1:11]) == tensor_digest(values)
    assert tensor_digest(values.t().contiguous().t()) == tensor_digest(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 7), (11,)])
def test_every_flipped_bit_is_noticed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = tensor_of(shape, dtype)
    healthy = tensor_digest(values)
    data = values.view(-1).view(torch.uint8)
    for byte in range(len(data)):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert tensor_digest(values) != healthy, (byte, bit)
            data[byte] ^= 1 << bit
    assert tensor_digest(values) == healthy


def test_swaps_are_noticed() -> None:
    values = tensor_of((16, 24), torch.bfloat16)
    seen = {tensor_digest(values)}
    swaps = 0
    for axis, size in enumerate(values.shape):
        for i in range(size):
            for j in range(i):
                order = list(range(size))
                order[i], order[j] = j, i
                seen.add(tensor_digest(values.index_select(axis, torch.tensor(order))))
                swaps += 1
    assert len(seen) == 1 + swaps


def test_a_slice_at_another_place_has_another_digest() -> None:
    values = tensor_of((4, 8), torch.float32)
    for axis in (0, 1):
        tensor = SyncTensor("w", (16, 32), axis)
        assert len({int(slice_digest(values, tensor, start)) for start in range(12)}) == 12


def test_the_product_in_blocks_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form for devices without a product of integers."""
    words = torch.randint(-(2**63), 2**63 - 1, (5, 7, 5), generator=torch.Generator().manual_seed(0))
    factors = digest._numbers(digest._WORDS, 3, 8, words.device)
    for block in (12, 75, 1000):  # two rows; two parts; everything
        monkeypatch.setattr(digest, "BLOCK_WORDS", block)
        assert torch.equal(digest._product_in_blocks(words, factors), digest._product(words, factors))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), [((5, 13), 0), ((5, 13), 1), ((6, 16), 1), ((9,), 0)])
def test_a_group_has_the_digests_of_its_tensors(shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> None:
    """Contiguous, and as the upper half of a larger memory, as vLLM keeps gate and up of all experts."""
    tensor, whole = SyncTensor("w", (64, 64)[: len(shape)], axis), tensor_of((3, *shape), dtype)
    half = torch.cat([whole, whole], 1)[:, shape[0] :]
    want = [int(slice_digest(part, tensor, 3)) for part in whole]
    assert group_digests(whole, tensor, 3).tolist() == group_digests(half, tensor, 3).tolist() == want


MEMORIES = {  # how a rank keeps the parameters of all experts
    "by themselves": lambda tensors: [tensor.clone() for tensor in tensors],
    "one after the other": lambda tensors: list(torch.stack(tensors)),
    "from the last to the first": lambda tensors: list(torch.stack(tensors[::-1]))[::-1],  # Megatron's buffers
    "in two buffers": lambda tensors: [*torch.stack(tensors[:2]), *torch.stack(tensors[2:])],
}


@pytest.mark.parametrize("memory", MEMORIES)
def test_parameters_of_one_kind_are_digested_together(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five experts, each one parameter of two tensors; and one tensor by itself. A value that is not finite is named."""
    values = [tensor_of((6, 8), torch.bfloat16, seed) for seed in range(5)]
    parameters = {f"layers.0.{n}.fc1": v for n, v in enumerate(MEMORIES[memory](values))}
    parameters["norm"] = tensor_of((8,), torch.bfloat16)
    shares = [DigestSlice("norm", SyncTensor("norm", (8,), 0), 0, 8, 0, (0,))]
    for n in range(5):
        shares += [
            DigestSlice(f"layers.0.{n}.fc1", SyncTensor(f"{n}.{i}", (3, 8), 0), 0, 3, 3 * i, (0,)) for i in (0, 1)
        ]
    engine = EngineTensors({s.tensor.name: s.tensor for s in shares}, {s.tensor.name: ((0, 3),) for s in shares})
    calls = mock.Mock(side_effect=group_digests)
    monkeypatch.setattr(digest, "group_digests", calls)
    got = expected_digests(shares, parameters.__getitem__, engine, lambda table: None, torch.device("cpu"))
    assert calls.call_count == 3 == sum(len(group[0]) for group in digest.digest_groups(shares)) and not got.non_finite
    for share in shares:
        part = parameters[share.parameter].narrow(0, share.local_start, share.stop)
        assert got.digests[share.tensor.name] == [int(slice_digest(part, share.tensor, 0))], share.tensor.name
    parameters["layers.0.3.fc1"][4, 2] = torch.nan
    got = expected_digests(shares, parameters.__getitem__, engine, lambda table: None, torch.device("cpu"))
    assert got.non_finite == ["3.1"]
    monkeypatch.setattr(digest, "GROUP_ELEMENTS", 2 * 48)  # two parameters: 2, 2 and 1
    calls.reset_mock()
    expected_digests(shares, parameters.__getitem__, engine, lambda table: None, torch.device("cpu"))
    assert calls.call_count == 1 + 2 * 3
