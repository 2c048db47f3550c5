"""Models with Transformer Engine's layers, built on a CPU: modules, weights, stream, DDP, optimizer, checkpoints.

No forward pass: its kernels need a GPU. It runs where a usable Transformer Engine is installed, and needs its CUDA libraries,
but no GPU and no driver. There is no such installation in CI.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.models.layers.precision import RECIPES
from grpo_megatron.transformer_engine import examine_transformer_engine
from tests import tiny, worlds
from tests.models import engine_ranks

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    **{name: changes for name, changes in tiny.FAMILIES.items() if name != "olmo2"},  # always Megatron-Core's layers
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 64, "num_experts": 4, **EXPERTS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None, **EXPERTS},
}
# Every family in bfloat16 or with a recipe; every recipe once.
RECIPE_OF = {**dict.fromkeys(MODELS), **dict(zip(("qwen2", "qwen3", "llama3", "mixtral"), RECIPES, strict=True))}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    _, problem = examine_transformer_engine()
    if problem is not None:
        pytest.skip(f"needs Transformer Engine, and {problem}")
    root = tmp_path_factory.mktemp("models")
    return {name: tiny.make_model(root / name, "llama2", **changes) for name, changes in MODELS.items()}


@pytest.fixture(scope="module")
def built(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("checkpoints")
    (result,) = worlds.run(engine_ranks.construct, 1, folders=folders, recipes=RECIPE_OF, root=root)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_a_model_of_the_engine_is_built(built: dict[str, Any], folders: dict[str, Path], family: str) -> None:
    model = built[family]
    assert model["modules"]["self_attention.linear_qkv"] == "TELayerNormColumnParallelLinear"
    assert model["modules"]["self_attention.core_attention"] == "TEDotProductAttention"
    if "mlp.experts" in model["modules"]:
        assert model["modules"]["mlp.experts.linear_fc1"] == "TEColumnParallelGroupedLinear"
    assert model["final norm"].startswith("transformer_engine")
    assert model["fused"] == {True} and model["frozen fused"] == {False}
    assert model["gradients"] == {torch.float32}
    assert all(name.startswith("transformer_engine") for name in model["optimizers"])
    files = {n: t for file in folders[family].glob("*.safetensors") for n, t in load_file(file).items()}
    assert model["streamed"].keys() >= files.keys()
    for name, tensor in files.items():
        torch.testing.assert_close(model["streamed"][name], tensor.bfloat16(), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_each_spec_reads_the_checkpoints_of_the_other(built: dict[str, Any], family: str) -> None:
    assert built[family]["read by the other spec"] == {"engine's": True, "local": True}
