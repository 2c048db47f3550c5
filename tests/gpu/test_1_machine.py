"""The machine and the installed packages, probed in a minute: what the rest of the program takes for granted.

Each test is small and needs nothing of the others, so that the first that fails names the cause. One process runs all.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.building import KIND, mesh_of
from tests.gpu.conftest import needs_gpu, needs_package

Record = Callable[..., None]
pytestmark = pytest.mark.usefixtures("lone_rank")

# -- the machine -------------------------------------------------------------------------------------------------------


def test_device(record_figures: Record) -> None:
    needs_gpu("this")
    capability = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    driver = "?"
    if (tool := shutil.which("nvidia-smi")) is not None:
        query = [tool, "--query-gpu=driver_version,compute_mode", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip().splitlines()[0]
    assert capability >= (8, 0), f"compute capability {capability}: bfloat16 kernels need 8.0"
    record_figures(
        {
            "name": torch.cuda.get_device_name(),
            "capability": ".".join(map(str, capability)),
            "driver": driver,
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "free": (free / 2**30, "GiB"),
            "total": (total / 2**30, "GiB"),
            "cores": os.cpu_count(),
        }
    )


def test_process_groups(record_figures: Record) -> None:
    """NCCL for tensors, gloo for messages, as the program builds them."""
    from grpo_megatron.device import Device

    mesh = mesh_of(Device(KIND))  # type: ignore[arg-type]
    ones = torch.ones(1 << 20, device=KIND)
    torch.distributed.all_reduce(ones)
    assert float(ones.sum()) == mesh.world_size * 2**20
    mesh.agree(None)
    assert mesh.all_gather("here") == ["here"] * mesh.world_size
    record_figures({"backend": torch.distributed.get_backend(), "control": torch.distributed.get_backend(mesh.control)})


def test_digests(record_figures: Record) -> None:
    """The digest of a weight: the same number as on the CPU."""
    needs_gpu("this")
    from grpo_megatron.sync.digest import slice_digest
    from grpo_megatron.sync.plan import SyncTensor

    weight = torch.randn(1 << 14, 1 << 14, device="cuda").bfloat16()
    whole = SyncTensor("weight", tuple(weight.shape), 1)
    for cut in (weight, weight[:, 5:1027]):
        assert int(slice_digest(cut, whole, 5)) == int(slice_digest(cut.cpu(), whole, 5))


# -- torch and Megatron-Core -------------------------------------------------------------------------------------------


def test_compiled_activation(record_figures: Record) -> None:
    """Megatron-Core's gated activation, compiled by torch on first use (on a GPU with Triton, which needs a C compiler)."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    x = torch.randn(64, 256, device=KIND, dtype=torch.bfloat16, requires_grad=True)
    got = bias_swiglu_impl(x, None)
    gate, up = x.float().chunk(2, dim=-1)
    difference = float((got.float() - F.silu(gate) * up).abs().max())
    got.float().sum().backward()
    assert difference <= 0.1 and x.grad is not None and x.grad.isfinite().all()
    record_figures({"max |difference|": difference})


def test_packed_attention(record_figures: Record) -> None:
    """The local layers' attention in bf16, against exact attention, with gradients."""
    from grpo_megatron.models.layers.modules import causal_attention, packed_attention

    cuts = torch.tensor([0, 100, 333, 640], dtype=torch.int32, device=KIND)
    q, k, v = heads_of(64)
    got = packed_attention(q, k, v, cuts, causal_attention)
    difference = float((got.float() - exact_attention(q, k, v, cuts.tolist())).abs().max())
    got.float().sum().backward()
    assert difference <= 0.05 and all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
    record_figures({"max |difference|": difference})


def heads_of(head_dim: int) -> list[torch.Tensor]:
    """Query of 16 heads, key and value of 4, [640, heads, head_dim]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((640, heads, head_dim) for heads in (16, 4, 4))
    made = [torch.randn(shape, generator=generator).to(KIND, torch.bfloat16) for shape in shapes]
    return [x.requires_grad_() for x in made]


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """[640, 16, head_dim] in float32, one sequence at a time."""
    out = []
    for start, end in itertools.pairwise(cuts):
        a, b, c = (x[start:end].detach().float().transpose(0, 1)[None] for x in (q, k, v))
        out.append(F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)


# The second vocabulary has rows that are not aligned.
@pytest.mark.parametrize(("dtype", "vocabulary"), [(torch.bfloat16, 151936), (torch.float32, 50257)])
def test_output_head(record_figures: Record, dtype: torch.dtype, vocabulary: int) -> None:
    """Log-probabilities, entropies and gradients by Triton's kernels beside torch on the same GPU."""
    needs_package("triton", "Triton")
    from grpo_megatron.device import Device
    from grpo_megatron.models.layers.head import vocab_parallel_logprobs

    group, results = mesh_of(Device(KIND)).tp_group, []  # type: ignore[arg-type]
    figures: dict[str, Any] = {}
    generator = torch.Generator("cuda").manual_seed(0)
    draw: dict[str, Any] = {"generator": generator, "device": "cuda"}
    hidden, weight = torch.randn(2053, 896, **draw), torch.randn(vocabulary, 896, **draw) * 0.1
    targets, upstream = torch.randint(vocabulary, (2053,), **draw), torch.randn(2, 2053, **draw)
    for is_fused in (False, True):
        for _ in range(2):  # the first compiles the kernels
            inputs = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight)]
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            marks[0].record()
            values = vocab_parallel_logprobs(
                inputs[0],
                inputs[1],
                targets,
                vocab_size=vocabulary,
                tp_rank=0,
                group=group,
                temperature=0.7,
                is_fused=is_fused,
            )
            marks[1].record()
            (upstream * torch.stack(values)).sum().backward()
            marks[2].record()
            torch.cuda.synchronize()
        way = "fused" if is_fused else "torch"
        figures[f"{way}, forward"] = (marks[0].elapsed_time(marks[1]), "ms")
        figures[f"{way}, backward"] = (marks[1].elapsed_time(marks[2]), "ms")
        results.append([*values, *(tensor.grad for tensor in inputs)])
    relative = 1e-5 if dtype == torch.float32 else 2e-3  # few gradients of logits are rounded otherwise in bfloat16
    for name, bound, plain, fused in zip(
        ("logprobs", "entropy", "hidden", "weight"), (1e-6, 1e-6, relative, relative), *results, strict=True
    ):
        error = float((fused.float() - plain.float()).norm() / plain.float().norm())
        figures[f"{name}, relative error"] = error
        assert error <= bound, f"{name}: {error:.3g}"
    record_figures(figures)


def test_head_gradient_is_added_in_float32(record_figures: Record) -> None:
    """A product of bfloat16 to rows of a float32 sum. Rounded to bfloat16 first it would be off by 2**-9."""
    from grpo_megatron.models.layers.head import _add_weight_gradient

    total = torch.randn(1000, 896, device=KIND)
    grad, hidden = (torch.randn(2053, size, device=KIND).bfloat16() for size in (997, 896))
    want = total[:997].double() + grad.double().T @ hidden.double()
    padding = total[997:].clone()
    _add_weight_gradient(total[:997], grad, hidden)
    error = float((total[:997] - want).abs().max() / want.abs().max())
    record_figures({"error of the largest": error})
    assert error <= 1e-5 and torch.equal(total[997:], padding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merged_adapter(record_figures: Record, dtype: torch.dtype) -> None:
    """Triton's kernel rounds each product and each sum: the CPU's bits. An 8B model's gate and up, rank 32."""
    needs_package("triton", "Triton")
    from grpo_megatron.models.lora.merge import merge

    rows, columns, rank = 28672, 4096, 32
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=generator) for shape in ((rows, columns), (rank, columns), (rows, rank))]
    base, a, b = (tensor.to(dtype) for tensor in parts)
    on_gpu = base.cuda(), a.cuda(), b.cuda()
    merge(*on_gpu, 0.5)  # compiles the kernel
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    merged = merge(*on_gpu, 0.5)
    marks[1].record()
    torch.cuda.synchronize()
    record_figures({"a weight merged": (marks[0].elapsed_time(marks[1]), "ms")})
    few = torch.cat([torch.arange(100), torch.arange(rows - 100, rows)])
    assert torch.equal(merged.cpu()[few], merge(base[few], a, b[few], 0.5))


# -- Transformer Engine ------------------------------------------------------------------------------------------------

RECIPE_CLASSES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


def test_te_import(record_figures: Record) -> None:
    needs_package("transformer_engine", "Transformer Engine")
    import transformer_engine
    import transformer_engine.pytorch

    from grpo_megatron.config import MegatronConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.layers.spec import choose_kernels

    kernels = choose_kernels(MegatronConfig(transformer_impl="transformer_engine"), Device("cuda"))
    assert kernels.transformer_engine
    record_figures({"version": transformer_engine.__version__, "fused weight gradients": kernels.fused_gradients})


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_te_attention(record_figures: Record, head_dim: int) -> None:
    """Attention over packed sequences ("thd") with grouped queries, which every TE layer of the program uses."""
    needs_package("transformer_engine", "Transformer Engine")
    import transformer_engine.pytorch as te

    attention = te.DotProductAttention(
        16, head_dim, num_gqa_groups=4, attn_mask_type="padding_causal", attention_dropout=0.0
    )
    q, k, v = heads_of(head_dim)
    cuts = torch.tensor([0, 100, 333, 640], dtype=torch.int32, device="cuda")
    got = attention(
        q,
        k,
        v,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        cu_seqlens_q=cuts,
        cu_seqlens_kv=cuts,
        max_seqlen_q=307,
        max_seqlen_kv=307,
    )
    got.float().sum().backward()
    difference = float((got.view_as(q).float() - exact_attention(q, k, v, cuts.tolist())).abs().max())
    assert difference <= 0.05 and all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
    record_figures({"max |difference|": difference})


@pytest.mark.parametrize("recipe", RECIPE_CLASSES)
def test_te_recipe(record_figures: Record, recipe: str) -> None:
    """A linear layer in FP8, forward and backward, with 128 rows; then which smaller numbers of rows work."""
    needs_package("transformer_engine", "Transformer Engine")
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    from grpo_megatron.config import Config
    from grpo_megatron.device import read_hardware
    from grpo_megatron.models.layers.precision import hardware_problems

    wanted = Config.model_validate({"model": {"path": "x"}, "actor": {"megatron": {"fp8": {"recipe": recipe}}}})
    if problems := list(hardware_problems(wanted, read_hardware("cuda"))):
        pytest.skip(problems[0])
    layer = te.Linear(256, 512, bias=False, params_dtype=torch.bfloat16, device="cuda")

    def error(rows: int) -> float:
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with te.fp8_autocast(enabled=True, fp8_recipe=getattr(recipes, RECIPE_CLASSES[recipe])()):
            got = layer(x)
        got.float().sum().backward()
        assert layer.weight.grad.isfinite().all()
        exact = x.detach().float() @ layer.weight.detach().float().T
        return float((got.float() - exact).norm() / exact.norm())

    for _ in range(2):
        relative = error(128)  # the scales of the second pass come from the first, where they are delayed
    assert 1e-4 < relative <= 0.1, f"relative error {relative:.3g}: not FP8, or wrong"
    works = [128]
    for rows in (64, 32, 16, 8):
        try:
            error(rows)
        except (AssertionError, RuntimeError, ValueError):
            break
        works.append(rows)
    record_figures({"relative error": relative, "smallest number of rows": works[-1]})


# -- vLLM's kernels and memory pool, without an engine -----------------------------------------------------------------


def test_vllm_import(record_figures: Record) -> None:
    needs_package("vllm", "vLLM")
    from grpo_megatron.device import Device
    from grpo_megatron.rollout.vllm import process as vllm_process

    vllm = vllm_process._import_vllm(Device("cuda"))
    import vllm.vllm_flash_attn.flash_attn_interface as flash
    from vllm.device_allocator.cumem import cumem_available

    figures: dict[str, Any] = {"version": vllm.__version__, "sleep pool": cumem_available}
    for number in (2, 3, 4):
        available = getattr(flash, f"FA{number}_AVAILABLE", False)
        why = getattr(flash, f"FA{number}_UNAVAILABLE_REASON", "unknown to this vLLM")
        figures[f"FlashAttention {number}"] = "yes" if available else f"no ({str(why)[:80]})"
    assert cumem_available, "without vLLM's memory pool the engine cannot sleep"
    record_figures(figures)
