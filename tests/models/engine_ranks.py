"""What the ranks of the kernel tests run: everything of Transformer Engine and of Apex that needs no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import layers

from grpo_megatron.config import ActorConfig
from grpo_megatron.device import Device
from grpo_megatron.models import build
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.layers.spec import Kernels
from grpo_megatron.models.optimizer import each_optimizer
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.sharded_state import load_sharded, save_sharded
from grpo_megatron.models.weights.stream import unwrapped
from grpo_megatron.parallel.mesh import Mesh, build_mesh
from tests.models import policy_ranks


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


@contextlib.contextmanager
def chosen(kernels: Kernels) -> Iterator[None]:
    """Models are built with `kernels`, and with Transformer Engine's as on a GPU."""
    config = build.transformer_config
    is_engine = kernels.transformer_engine
    with (
        mock.patch.object(build, "choose_kernels", lambda *args, **options: kernels),
        mock.patch.object(build, "transformer_config", lambda a, m, dtype, _, k: config(a, m, dtype, is_engine, k)),
    ):
        yield


def construct(folders: dict[str, Path], recipes: dict[str, str | None], root: Path) -> dict[str, Any]:
    """Family -> what was built from its folder with the FP8 recipe. Checkpoints are written under `root`."""
    device = Device("cpu")
    mesh = build_mesh(device, tp=1, pp=1, rollout_tp=1)
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
        "streamed": policy_ranks.stream(engine),
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
    from transformer_engine.pytorch.optimizers import fused_adam

    with mock.patch.object(fused_adam, "multi_tensor_applier", lambda *args: None):  # a kernel, in a step of zeros
        load_sharded(target, folder, same_world=True)
    written, read = policy_ranks.stream(source), policy_ranks.stream(target)
    return written.keys() == read.keys() and all(torch.equal(written[name], read[name]) for name in written)


def apex_gradients(folder: Path, pairs: Any) -> tuple[dict[str, Any], dict[str, Any], int]:
    """An update without and with Apex's weight gradients, in plain torch, and how often their product was computed."""
    layout, calls = policy_ranks.LAYOUTS["1"], []

    def accumulate(inputs: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        """What `wgrad_gemm_accum_fp32` computes. inputs [t, in], gradient [t, out], main_grad [out, in] in float32."""
        calls.append(1)
        main_grad.add_(gradient.float().T @ inputs.float())

    plain = policy_ranks.update(folder, pairs, layout, 2, True)
    fake = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    with (
        chosen(Kernels(fused_gradients=True)),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", fake, create=True),
    ):
        fused = policy_ranks.update(folder, pairs, layout, 2, True)
    return plain, fused, len(calls)
