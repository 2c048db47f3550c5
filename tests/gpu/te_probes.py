"""Probes of Transformer Engine: what every layer of the program uses of it, and the FP8 recipes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.gpu.probes import PROBES, exact_attention, heads_of, needs_package, probe
from tests.gpu.reports import Skipped

RECIPE_CLASSES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


@probe
def te_import() -> dict[str, Any]:
    needs_package("transformer_engine", "Transformer Engine")
    import transformer_engine
    import transformer_engine.pytorch

    from grpo_megatron.config import MegatronConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.layers.spec import choose_kernels

    kernels = choose_kernels(MegatronConfig(transformer_impl="transformer_engine"), Device("cuda"))
    assert kernels.transformer_engine
    return {"version": transformer_engine.__version__, "fused weight gradients": kernels.apex_gradients}


@probe
def te_linear() -> dict[str, Any]:
    needs_package("transformer_engine", "Transformer Engine")
    import transformer_engine.pytorch as te

    layer = te.LayerNormLinear(
        256, 512, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16, device="cuda"
    )
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    got = layer(x)
    exact = F.rms_norm(x.float(), (256,), eps=layer.eps) @ layer.weight.detach().float().T
    got.float().sum().backward()
    difference = float((got.float() - exact).abs().max())
    assert difference <= 0.05 and layer.weight.grad.isfinite().all()
    return {"max |difference|": difference}


def _te_attention(head_dim: int) -> dict[str, Any]:
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
    return {"max |difference|": difference}


for _head_dim in (32, 64, 128):
    PROBES[f"te_attention_{_head_dim}"] = lambda head_dim=_head_dim: _te_attention(head_dim)


def _te_recipe(recipe: str) -> dict[str, Any]:
    """A linear layer in FP8, forward and backward, with 128 rows; then which smaller numbers of rows work."""
    needs_package("transformer_engine", "Transformer Engine")
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    from grpo_megatron.config import Config
    from grpo_megatron.device import read_hardware
    from grpo_megatron.models.layers.precision import hardware_problems

    wanted = Config.model_validate({"model": {"path": "x"}, "actor": {"megatron": {"fp8": {"recipe": recipe}}}})
    if problems := list(hardware_problems(wanted, read_hardware("cuda"))):
        raise Skipped(problems[0])
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
    return {"relative error": relative, "smallest number of rows": works[-1]}


for _recipe in RECIPE_CLASSES:
    PROBES[f"te_{_recipe}"] = lambda recipe=_recipe: _te_recipe(recipe)
