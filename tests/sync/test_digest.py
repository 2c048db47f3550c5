"""Digests of parts: they add up over every cut, and no single change goes unnoticed.

The reference is the definition itself, in Python's integers: words of 8 bytes, little-endian, zeros after the last column.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.sync import digest
from grpo_megatron.sync.digest import digest_and_sum, part_digest
from grpo_megatron.sync.tensors import SyncTensor

DTYPES = [torch.float32, torch.bfloat16]


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole_digest(values: torch.Tensor) -> int:
    return int(part_digest(values, SyncTensor("w", tuple(values.shape), 0), 0))


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
    assert whole_digest(values) % 2**64 == total % 2**64


@settings(max_examples=200, deadline=None)
@given(
    shape=st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 12), st.integers(1, 40))),
    axis=st.integers(0, 1),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
def test_parts_add_up_to_the_whole(
    shape: tuple[int, ...], axis: int, cuts: list[int], dtype: torch.dtype, seed: int
) -> None:
    axis %= len(shape)
    values, tensor = tensor_of(shape, dtype, seed), SyncTensor("w", shape, axis)
    borders = [0, *sorted(min(cut, shape[axis]) for cut in cuts), shape[axis]]
    parts = [(values.narrow(axis, a, b - a), a) for a, b in zip(borders, borders[1:], strict=False)]
    digests = [part_digest(part, tensor, start) for part, start in parts]
    assert sum(digests[::-1]) == whole_digest(values)
    copies = [part_digest(part.clone(), tensor, start) for part, start in parts]  # contiguous, other alignment
    assert copies == digests


def test_memory_layout_does_not_matter() -> None:
    values = tensor_of((6, 10), torch.bfloat16)
    padded = torch.full((6, 13), 7.0, dtype=torch.bfloat16)
    padded[:, 1:11] = values  # neither rows nor start are aligned to words
    assert whole_digest(padded[:, 1:11]) == whole_digest(values)
    assert whole_digest(values.t().contiguous().t()) == whole_digest(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 7), (11,)])
def test_every_flipped_bit_is_noticed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = tensor_of(shape, dtype)
    healthy = whole_digest(values)
    data = values.view(-1).view(torch.uint8)
    for byte in range(len(data)):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert whole_digest(values) != healthy, (byte, bit)
            data[byte] ^= 1 << bit
    assert whole_digest(values) == healthy


def test_swaps_are_noticed() -> None:
    values = tensor_of((16, 24), torch.bfloat16)
    seen = {whole_digest(values)}
    swaps = 0
    for axis, size in enumerate(values.shape):
        for i in range(size):
            for j in range(i):
                order = list(range(size))
                order[i], order[j] = j, i
                seen.add(whole_digest(values.index_select(axis, torch.tensor(order))))
                swaps += 1
    assert len(seen) == 1 + swaps


def test_a_part_at_another_place_has_another_digest() -> None:
    values = tensor_of((4, 8), torch.float32)
    for axis in (0, 1):
        tensor = SyncTensor("w", (16, 32), axis)
        assert len({int(part_digest(values, tensor, start)) for start in range(12)}) == 12


# -- the compiled kernel -----------------------------------------------------------------------------------------------

ALL_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [math.nan, math.inf, -math.inf, -0.0, 0.0, 6e-8, -65504.0]  # a subnormal float16, and its largest value


@pytest.fixture(scope="module")
def kernel() -> Iterator[None]:
    if importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed; torch's form is used then")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "SMALLEST_TENSOR", 1)
        patch.setattr(digest, "_loaded", [])
        digest.load_kernel(digest.SMALLEST_SYNC)
        yield


@settings(max_examples=300, deadline=None)
@given(
    shape=st.one_of(st.tuples(st.integers(1, 60)), st.tuples(st.integers(1, 9), st.integers(1, 60))),
    axis=st.integers(0, 1),
    start=st.integers(0, 60),
    stop=st.integers(0, 60),
    dtype=st.sampled_from(ALL_DTYPES),
    special=st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(SPECIAL)), max_size=3),
)
def test_the_compiled_kernel_gives_what_torch_gives(
    kernel: None,
    shape: tuple[int, ...],
    axis: int,
    start: int,
    stop: int,
    dtype: torch.dtype,
    special: list[tuple[int, float]],
) -> None:
    """The digest of each cut, and whether it is finite: any alignment, rows with gaps, edges of less than a word."""
    axis %= len(shape)
    values = tensor_of(shape, dtype)
    for place, value in special:
        values.view(-1)[place % values.numel()] = value
    low, high = sorted((min(start, shape[axis]), min(stop, shape[axis])))
    part, tensor = values.narrow(axis, low, high - low), SyncTensor("w", shape, axis)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "_is_compiled_for", lambda words: False)
        expected = part_digest(part, tensor, low)
    got, number = digest_and_sum(part, tensor, low)
    assert got == expected
    assert number.isfinite() == part.isfinite().all()


def test_every_exponent_of_bfloat16_is_classified(kernel: None) -> None:
    """All 65,536 values, each with finite neighbours in its word."""
    values = torch.ones(1 << 16, 4, dtype=torch.bfloat16)
    values[:, 2] = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for row in values[:: 1 << 7]:  # one sign, exponent and first bit of the fraction each
        _, number = digest_and_sum(row, SyncTensor("w", (4,), 0), 0)
        assert number.isfinite() == row.isfinite().all()


def test_the_kernel_is_compiled_for_large_models_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_loaded", [])
    monkeypatch.setattr(digest, "_compiled", lambda: "compiled")
    digest.load_kernel(digest.SMALLEST_SYNC - 1)
    assert not digest._loaded
    monkeypatch.setattr(digest.importlib.util, "find_spec", lambda name: None)
    digest.load_kernel(digest.SMALLEST_SYNC)
    assert not digest._loaded and not digest._is_compiled_for(torch.zeros(1 << 20, dtype=torch.int64))


# -- the Triton kernel without a GPU; tests/gpu runs it on one ---------------------------------------------------------


INTERPRETED = """
import torch
from grpo_megatron.sync import digest
from grpo_megatron.sync.digest_gpu import BLOCK_WORDS, row_sums

generator = torch.Generator().manual_seed(0)
count = 0
shapes = [(3, 5, 0, 0), (1, BLOCK_WORDS, 0, 0), (4, BLOCK_WORDS + 1, 0, 3), (2, 3 * BLOCK_WORDS - 1, 2, 1), (0, 4, 0, 0)]
for rows, columns, before, after in shapes:
    memory = torch.randint(-(2**63), 2**63 - 1, (rows, before + columns + after), generator=generator)
    words = memory[:, before : before + columns]
    factors = digest._numbers(digest._WORDS, 7, 7 + columns, words.device)
    expected = torch.mv(words, factors)
    assert torch.equal(row_sums(words, factors), expected), (rows, columns)
    count += 1
print(count, "shapes")
"""


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from grpo_megatron.sync.digest_gpu import BLOCK_WORDS, _sum_rows

signature = {"words": "*i64", "factors": "*i64", "sums": "*i64", "num_columns": "i32", "stride": "i32", "block": "constexpr"}
source = ASTSource(fn=_sum_rows, signature=signature, constexprs={"block": BLOCK_WORDS})
kernel = compile(source, target=GPUTarget("cuda", 90, 32))
print("st.global" in kernel.asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "interpret", "printed"), [(INTERPRETED, "1", "5 shapes"), (COMPILED, "0", "True")])
def test_the_kernel_without_a_gpu(script: str, interpret: str, printed: str, tmp_path: Path) -> None:
    """In a process of its own: Triton asks for the interpreter when it is imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr
