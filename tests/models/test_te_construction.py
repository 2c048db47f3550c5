"""Models with Transformer Engine's layers, built on a CPU: modules, weights, stream, DDP, optimizer, checkpoints.

No forward pass: its kernels need a GPU. It runs where a usable Transformer Engine is installed, and needs its CUDA libraries,
but no GPU and no driver. There is no such installation in CI.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.config import ActorConfig
from grpo_megatron.device import Device
from grpo_megatron.models import build
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.layers.precision import RECIPES
from grpo_megatron.models.layers.spec import Kernels
from grpo_megatron.models.optimizer import each_optimizer
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.sharded_state import load_sharded, save_sharded
from grpo_megatron.models.weights.stream import unwrapped
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.transformer_engine import examine_transformer_engine
from tests import tiny
from tests.models.policies import LAYOUTS, stream, world
from tests.models.test_kernels import chosen
from tests.worlds import ranks

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    # The others always have Megatron-Core's layers.
    **{name: changes for name, changes in tiny.FAMILIES.items() if name not in ("olmo2", "gemma3")},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 64, "num_experts": 4, **EXPERTS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None, **EXPERTS},
}
# Every family in bfloat16 or with a recipe; every recipe once.
RECIPE_OF = {**dict.fromkeys(MODELS), **dict(zip(("qwen2", "qwen3", "llama3", "mixtral"), RECIPES, strict=True))}


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Transformer Engine asks for a device while it builds a layer. This one answers like an H100."""
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *device: (9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *device: properties),
    ):
        yield


@ranks(1)
def construct(folders: dict[str, Path], recipes: dict[str, str | None], root: Path) -> dict[str, Any]:
    """Family -> what was built from its folder with the FP8 recipe. Checkpoints are written under `root`."""
    device, mesh = world(LAYOUTS["1"])
    return {name: _construct(folder, recipes[name], mesh, device, root / name) for name, folder in folders.items()}


def _construct(folder: Path, recipe: str | None, mesh: Mesh, device: Device, root: Path) -> dict[str, Any]:
    actor = ActorConfig.model_validate({"megatron": {"fp8": {"recipe": recipe}}})
    arch = read_architecture(folder)

    def make(kernels: Kernels, actor: ActorConfig) -> Policy:
        with chosen(kernels), pretended_gpu():
            policy = Policy.load(folder, "bfloat16", arch, actor, mesh, device)
            policy.set_optimizer(actor.optim, 1)
        return policy

    kernels = Kernels(transformer_engine=True, compiled=True, fused_gradients=True)
    engine, local = make(kernels, actor), make(Kernels(), ActorConfig())
    with chosen(replace(kernels, fused_gradients=False)), pretended_gpu():
        frozen = build.build_model(arch, actor.megatron, "bfloat16", device)
    with device.megatron():
        engine.ddp.offload_grad_buffers(empty_cache=False)
        engine.ddp.restore_grad_buffers()
    layer = unwrapped(engine.ddp).decoder.layers[0]  # type: ignore[union-attr, index]
    return {
        "modules": {name: type(module).__name__ for name, module in layer.named_modules()},
        "final norm": type(unwrapped(engine.ddp).decoder.final_layernorm).__module__,  # type: ignore[union-attr]
        "streamed": stream(engine),
        "fused": _fused(engine.ddp),
        "frozen fused": _fused(frozen),
        "gradients": {buffer.grad_dtype for buffer in (*engine.ddp.buffers, *engine.ddp.expert_parallel_buffers)},
        "optimizers": {type(part.optimizer).__module__ for part in each_optimizer(engine.optimizer)},
        "read by the other spec": {
            "engine's": _round_trip(engine, local, root / "engine"),
            "local": _round_trip(local, engine, root / "local"),
        },
    }


def _fused(model: torch.nn.Module) -> set[bool]:
    return {module.fuse_wgrad_accumulation for module in model.modules() if hasattr(module, "fuse_wgrad_accumulation")}


def _round_trip(source: Policy, target: Policy, folder: Path) -> bool:
    """Whether `target` has the weights of `source` after it has read its checkpoint. `source` gets other weights before."""
    with torch.no_grad():
        for parameter in source.ddp.parameters():
            parameter.add_(1)
    save_sharded(source, folder)
    load_sharded(target, folder, same_world=True)
    written, read = stream(source), stream(target)
    return written.keys() == read.keys() and all(torch.equal(written[name], read[name]) for name in written)


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
    (result,) = construct(folders=folders, recipes=RECIPE_OF, root=root)
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
