"""The Triton kernel of the digests without a GPU: its values in Triton's interpreter, and whether it compiles.

The interpreter accepts what the compiler refuses. tests/gpu runs the kernel on a device.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert torch.equal(digest._product_in_chunks(words, factors), expected)
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
