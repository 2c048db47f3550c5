"""Parameter counts of each pipeline stage, as Megatron-Core itself builds it. Nothing is allocated.

The model is built on the meta device, once per pipeline stage. torch's fake process group stands for a world of the full
size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_megatron.config import Fp8Config, MegatronConfig
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.build import build_model
from grpo_megatron.models.weights.stream import CONSTANTS, unwrapped
from grpo_megatron.parallel.mesh import destroy_mesh


@dataclass(frozen=True)
class Stage:
    """One pipeline stage. `whole` is its share of the model: all shards, without padding rows and copies."""

    layers: int
    dense: int  # parameters of one rank, without experts
    experts: int  # parameters of one rank's experts
    whole: int


def count_stages(
    arch: Architecture,
    megatron: MegatronConfig,
    dtype: str,
    world_size: int,
    *,
    is_reward_model: bool = False,
) -> list[Stage]:
    """Every stage of a valid layout. Must not run in a process with a process group.

    FP8, kernels and context parallelism change no count.
    """
    tp, pp, ep = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.expert_model_parallel_size,
    )
    local_layers = megatron.model_copy(
        update={"transformer_impl": "local", "fp8": Fp8Config(), "context_parallel_size": 1}
    )
    options: dict[str, Any] = {}
    if is_reward_model:
        from grpo_megatron.models.heads.scalar import ScalarModel

        options["model_class"] = ScalarModel
    device = Device("cpu")
    device.torch_device = torch.device("meta")
    stages = []
    for stage in range(pp):
        dist.init_process_group("fake", store=FakeStore(), rank=stage * (world_size // pp), world_size=world_size)
        try:
            with device.megatron():
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=tp,
                    pipeline_model_parallel_size=pp,
                    expert_model_parallel_size=ep,
                    create_gloo_process_groups=False,  # the other ranks do not exist
                )
                with torch.device("meta"):
                    model = unwrapped(build_model(arch, local_layers, dtype, device, **options))
            stages.append(_count(model, arch, tp, ep))
        finally:
            destroy_mesh()
    return stages


def _count(model: torch.nn.Module, arch: Architecture, tp: int, ep: int) -> Stage:
    padding = (arch.padded_vocab_size(tp) - arch.vocab_size) * arch.hidden_size
    dense = experts = whole = 0
    for name, parameter in model.named_parameters():
        is_expert = not getattr(parameter, "allreduce", True)
        dense += 0 if is_expert else parameter.numel()
        experts += parameter.numel() if is_expert else 0
        is_end = name in ("embedding.word_embeddings.weight", "output_layer.weight")
        if name == "output_layer.weight" and arch.tied:
            continue  # a copy of the embedding
        cut = tp if getattr(parameter, "tensor_model_parallel", False) else 1
        whole += parameter.numel() * cut * (ep if is_expert else 1) - padding * is_end
    whole += sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith(CONSTANTS))
    return Stage(len(model.decoder.layers), dense, experts, whole)  # type: ignore[arg-type, union-attr]
