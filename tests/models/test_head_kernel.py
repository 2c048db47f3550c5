"""The Triton kernels of the output head and of merged adapters: by Triton's interpreter against torch, and compiled for GPUs.

None runs on a GPU here.

Against torch on the same logits of size 1, 1e-6 of the largest element: both compute in float32, and sum in other orders. In
bfloat16 the interpreter cuts off the gradients of the logits where a GPU rounds to nearest (`cvt.rn`): each is at most 2**-7
of its size too small, and a sum of 37 of them that cancel differs by at most 2**-6 of the largest sum here.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_megatron.models.layers.head import KeptTargets, vocab_parallel_logprobs
from grpo_megatron.models.layers.spec import Kernels
from tests import tiny, worlds
from tests.models.policies import LAYOUTS, Layout, world
from tests.models.test_kernels import chosen
from tests.models.test_layouts import update
from tests.worlds import ranks

pytest.importorskip("triton", reason="Triton is not installed: the head is torch's")
from grpo_megatron.models.layers import head_kernel
from grpo_megatron.models.lora import merge_kernel
from grpo_megatron.models.lora.merge import merge

HIDDEN, CHUNK, BLOCK = 16, 4, 16
Case = tuple[str, float, int, int, str]  # type, temperature, tokens, vocabulary, outputs with a gradient
CASES: list[Case] = [
    ("float32", 1.0, 9, 37, "both"),  # 37 columns are 3 blocks, the last of which has 5
    ("float32", 0.7, 5, 16, "both"),  # 1 block; on two ranks the vocabulary is cut in two halves of a block
    ("float32", 1.0, 3, 7, "logprobs"),  # on two ranks the second has padding only
    ("float32", 1.0, 3, 33, "entropy"),
    ("bfloat16", 0.7, 6, 37, "both"),
    ("float32", 0.7, 6, 37, "cut"),  # both, over the target and two others
    ("bfloat16", 1.0, 6, 37, "cut"),
]


def inputs(case: Case, tp: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Hidden states, this rank's rows of the padded weight, targets, upstream gradients. Padding rows are huge."""
    dtype, _, tokens, vocabulary, _ = case
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(getattr(torch, dtype))
    weight = torch.randn(vocabulary, HIDDEN, generator=generator) / HIDDEN**0.5
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    upstream = torch.randn(2, tokens, generator=generator)
    padding = torch.full((-vocabulary % (8 * tp), HIDDEN), 1e4)
    weight = torch.cat([weight, padding]).to(hidden.dtype).chunk(tp)[rank].clone()
    return hidden.requires_grad_(), weight.requires_grad_(), targets, upstream


def both_ways(tp: int) -> dict[tuple[Case, bool], dict[str, torch.Tensor]]:
    """Values and gradients of every case, by torch (False) and by the kernels (True)."""
    mesh = world(Layout(tp, tp=tp))[1]
    out = {}
    for case, is_fused in itertools.product(CASES, (False, True)):
        _, temperature, _, vocabulary, which = case
        hidden, weight, targets, upstream = inputs(case, tp, mesh.tp_rank)
        sizes = {"vocab_size": vocabulary, "tp_rank": mesh.tp_rank, "group": mesh.tp_group, "chunk": CHUNK}
        ids, counts = torch.stack([targets, 36 - targets, (targets + 1) % 37], 1), torch.full_like(targets, 3)
        kept = KeptTargets.of(counts, ids.flatten(), ids.device) if which == "cut" else None
        logprobs, entropy = vocab_parallel_logprobs(
            hidden, weight, targets, temperature=temperature, is_fused=is_fused, kept=kept, **sizes
        )
        loss = {"logprobs": upstream[0] @ logprobs, "entropy": upstream[1] @ entropy}
        (sum(loss.values()) if which in ("both", "cut") else loss[which]).backward()
        assert hidden.grad is not None and weight.grad is not None
        got = {"logprobs": logprobs, "entropy": entropy, "hidden": hidden.grad, "weight": weight.grad}
        out[case, is_fused] = {name: tensor.detach() for name, tensor in got.items()}
    return out


def on_logits() -> dict[str, Any]:
    """The kernels alone: rows without a finite maximum to start from, columns of probability 0, results in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(6, 53, generator=generator)
    logits[:, 40:] = -torch.inf  # a block and a half
    logits[1] *= 300  # exp without the maximum subtracted would overflow
    logits[2, :16] = -torch.inf  # a whole block, before any other
    logits[3, 7] = torch.nan
    columns = torch.tensor([0, 39, 17, 2, -1, 53])  # the last two belong to other ranks
    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        given = logits.to(dtype)
        statistics = head_kernel.row_statistics(given, columns, 0.7)
        lse, entropy = statistics[0] + statistics[1].log(), statistics[1].log() - statistics[2] / statistics[1]
        upstream = torch.randn(2, 6, generator=generator)
        gradient = given.clone()
        head_kernel.write_gradient(gradient, columns, lse, entropy, *upstream, 0.7)
        out[str(dtype)] = given, columns, statistics, lse, entropy, upstream, gradient
    return out


def merges() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A weight merged by the kernel and by torch, full and in part: odd sizes, strided rows, negative zeros, ranks 1 and 5."""
    generator, out = torch.Generator().manual_seed(2), []
    for rank in (1, 5):
        base, a, b = (torch.randn(shape, generator=generator) for shape in ((37, 611), (rank, 611), (37, rank)))
        base[3], b[3] = -0.0, 0.0
        for rows, columns in ((slice(0, 37), slice(0, 611)), (slice(2, 35), slice(7, 300))):
            part = base[rows, columns], a[:, columns], b[rows]
            got = torch.full_like(base, torch.nan)[rows, columns]
            merge_kernel.write_merged(got, part[0], part[1], part[2] * (5 / 3))
            out.append((got, merge(*part, 5 / 3)))
    return out


@ranks(2)
def updates(folder: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """An update of a policy built without and with the kernels, and how often the forward kernel was called."""
    parts = folder, tiny.make_sequences(3, longest=8), LAYOUTS["TP2+SP"], 2, True
    plain = update(*parts)
    with (
        chosen(Kernels(fused_head=True)),
        mock.patch.object(head_kernel, "row_statistics", wraps=head_kernel.row_statistics) as kernel,
    ):
        fused = update(*parts)
    return plain, fused, kernel.call_count


def main(folder: str, path: str) -> None:
    """Triton's interpreter runs the kernels on the CPU. TRITON_INTERPRET=1 must be set before anything imports Triton, which
    vLLM does in the fork server of tests/worlds.py. So this is a process of its own, and its ranks are forked from it."""
    with (
        mock.patch.object(worlds, "_context", lambda: multiprocessing.get_context("fork")),
        mock.patch.object(head_kernel, "BLOCK", BLOCK),
    ):
        results = {tp: worlds.run(both_ways, tp, tp=tp) for tp in (1, 2)}
        parts = {"updates": updates(folder=Path(folder)), "logits": on_logits(), "merges": merges()}
        torch.save({"ranks": results, **parts}, path)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("head")
    model, path = tiny.make_model(folder / "model", "qwen2-tied"), folder / "results.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.models.test_head_kernel", str(model), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path, weights_only=False)  # type: ignore[no-any-return]


def both(results: dict[str, Any], tp: int) -> Iterator[tuple[Any, int, dict[str, Any], dict[str, Any]]]:
    for rank, result in enumerate(results["ranks"][tp]):
        for case, is_fused in result:
            if is_fused:
                yield case, rank, result[case, True], result[case, False]


@pytest.mark.parametrize("tp", [1, 2])
def test_values_and_gradients_equal_torchs(results: dict[str, Any], tp: int) -> None:
    count = 0
    for case, rank, fused, plain in both(results, tp):
        for name in ("logprobs", "entropy", "hidden", "weight"):
            is_rounded = case[0] == "bfloat16" and name in ("hidden", "weight")
            largest = max(1.0, float(plain[name].float().abs().max()))
            tolerance = (2.0**-6 if is_rounded else 1e-6) * largest
            assert fused[name].dtype == plain[name].dtype
            torch.testing.assert_close(fused[name], plain[name], rtol=0, atol=tolerance, msg=f"{case} {rank} {name}")
            count += fused[name].numel()
        assert plain["hidden"].abs().max() > 0 or rank == 1  # the second rank may have padding only
    assert count > 1000


def test_ranks_agree_and_padding_has_no_gradient(results: dict[str, Any]) -> None:
    first, second = results["ranks"][2]
    for (case, is_fused), got in first.items():
        other = second[case, is_fused]
        assert torch.equal(got["logprobs"], other["logprobs"]) and torch.equal(got["entropy"], other["entropy"])
        assert (torch.cat([got["weight"], other["weight"]])[case[3] :] == 0).all()


def test_a_policy_with_the_kernels_is_updated_as_one_without(results: dict[str, Any]) -> None:
    """Two ranks with sequence parallelism, an entropy bonus, two micro-batches; the head is tied to the embedding."""
    for plain, fused, calls in results["updates"]:
        assert calls >= 2
        assert fused["norm"] == pytest.approx(plain["norm"], rel=1e-6)
        for kind in ("gradients", "weights"):
            for name, tensor in plain[kind].items():
                tolerance = 1e-6 * max(1.0, float(tensor.abs().max()))
                torch.testing.assert_close(fused[kind][name], tensor, rtol=0, atol=tolerance, msg=name)


def test_a_merged_weight_has_the_bits_of_torchs_order(results: dict[str, Any]) -> None:
    assert len(results["merges"]) == 4
    for got, want in results["merges"]:
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))  # signs of zeros, too


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_rows_with_columns_of_probability_zero(results: dict[str, Any], dtype: str) -> None:
    """Against the definition in float64 over the finite columns. Row 3 has a NaN, which must not be lost."""
    logits, columns, statistics, lse, entropy, (g, h), gradient = results["logits"][dtype]
    z = (logits.float() / 0.7).double()
    p, is_real = z.softmax(1), z > -torch.inf
    logp = torch.where(is_real, z.log_softmax(1), 0.0)
    whole_entropy = -(p * logp).sum(1)
    one_hot = columns[:, None] == torch.arange(z.shape[1])
    want = (g[:, None] * (one_hot.double() - p) - h[:, None] * p * (logp + whole_entropy[:, None])) / 0.7
    rows = [0, 1, 2, 4, 5]
    size = z[rows].where(is_real[rows], 0).abs().amax(1)
    assert torch.equal(statistics[0][rows], z[rows].amax(1).float())  # a division is rounded as torch's
    assert ((lse - z.logsumexp(1)).abs()[rows] <= 1e-6 * size).all()
    assert ((entropy - whole_entropy).abs()[rows] <= 1e-6 * size).all()
    assert statistics[3].tolist() == [z[0, 0], z[1, 39], z[2, 17], z[3, 2], 0, 0]
    tolerance = 1e-6 * size[:, None] + (2.0**-7 * want.abs()[rows] if dtype == "torch.bfloat16" else 0)
    assert ((gradient.double() - want).abs()[rows] <= tolerance).all()
    assert (gradient[rows][:, 40:] == 0).all()
    assert all(tensor[3].isnan() for tensor in (lse, entropy)) and gradient[3].isnan().all()


@pytest.mark.parametrize(
    ("capability", "dtype"), [pytest.param(80, "bf16", marks=pytest.mark.soak), (90, "bf16"), (100, "fp32")]
)
def test_kernels_compile_and_pass_once_over_their_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int, dtype: str
) -> None:
    """For GPUs by Triton's own ptxas. A thread loads BLOCK / 256 logits of a block, and one for the row's target.

    Of a weight a thread merges 16 x 256 / 128 elements. A sum of products that rounded once would not be the CPU's.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    itemsize = {"bf16": 2, "fp32": 4}[dtype]
    vectors = head_kernel.BLOCK // (32 * head_kernel.NUM_WARPS) * itemsize // 16  # of 16 bytes
    for kernel, stores in ((head_kernel._statistics_kernel, 0), (head_kernel._gradient_kernel, vectors)):
        types = dict.fromkeys(kernel.arg_names, "*fp32")
        types |= {"logits": f"*{dtype}", "columns": "*i64", "num_columns": "i32"}
        types |= {"temperature": "fp32", "is_tempered": "constexpr", "block": "constexpr"}
        places = {name: (number,) for number, name in enumerate(kernel.arg_names)}
        source = ASTSource(
            fn=kernel,
            signature={name: types[name] for name in kernel.arg_names},
            constexprs={"is_tempered": True, "block": head_kernel.BLOCK},
            attrs={places[name]: [["tt.divisibility", 16]] for name in ("logits", "num_columns")},
        )
        options = {"num_warps": head_kernel.NUM_WARPS}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        ptx = compiled.asm["ptx"]
        assert len(compiled.asm["cubin"]) > 0 and ".local" not in ptx  # no register is spilled to memory
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == vectors
        assert ("cvt.rn.bf16x2.f32" in ptx) == (dtype == "bf16" and stores > 0)
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == stores
    kernel = merge_kernel._merge_kernel
    types = dict.fromkeys(kernel.arg_names, "i32") | {"a": "*fp32", "b": "*fp32"}
    types |= dict.fromkeys(("out", "base"), f"*{dtype}")
    sizes = {"block_rows": merge_kernel.ROWS, "block_columns": merge_kernel.COLUMNS, "out_column": 1, "base_column": 1}
    types |= dict.fromkeys(sizes, "constexpr")
    aligned = ("out", "base", "a", "num_columns", "out_row", "base_row")
    places = {name: (number,) for number, name in enumerate(kernel.arg_names)}
    attrs = {places[name]: [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=types, constexprs=sizes, attrs=attrs)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    vectors = merge_kernel.ROWS * merge_kernel.COLUMNS // 128 * itemsize // 16
    assert ".local" not in ptx and "fma" not in ptx and len(re.findall(r"st\.global\.v4\.b32", ptx)) == vectors
    assert ("cvt.rn.bf16x2.f32" in ptx) == (dtype == "bf16")


if __name__ == "__main__":
    main(*sys.argv[1:])
