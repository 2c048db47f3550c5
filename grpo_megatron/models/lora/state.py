"""The factors in a checkpoint: canonical tensors under PEFT's names, so that any layout reads what another has written."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.lora.layers import Lora
from grpo_megatron.models.lora.table import Factor
from grpo_megatron.models.weights.stream import global_parameters, unwrapped
from grpo_megatron.parallel.mesh import Mesh


def sharded_factors(model: torch.nn.Module, lora: Lora, arch: Architecture, mesh: Mesh) -> dict[str, Any]:
    """Megatron's description of this rank's factors, by the names of the model's own `state_dict`."""
    parameters = global_parameters(model)
    names = {id(parameter): name for name, parameter in unwrapped(model).named_parameters()}
    return {names[id(parameters[name])]: _entry(row, parameters[name], arch, mesh) for name, row in lora.rows.items()}


def _entry(row: Factor, parameter: Tensor, arch: Architecture, mesh: Mesh) -> ShardedTensorFactory:
    slices, shapes = row.slices(arch, mesh.tp_rank, mesh.tp), row.hf_shapes(arch)
    replica = (0, mesh.tp_rank if row.split_dim is None else 0, mesh.dp_rank)

    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        found = []
        for shard in slices:
            part = tensor.narrow(row.axis, shard.local_start, shard.stop - shard.start)
            shown, shape = row.hf[shard.tensor], shapes[shard.tensor]
            offset = (0,) * row.axis + (shard.start,) + (0,) * (1 - row.axis)
            layout = {"local_shape": tuple(part.shape), "global_shape": shape, "global_offset": offset}
            found.append(
                ShardedTensor(shown, part, part.dtype, **layout, axis_fragmentations=None, replica_id=replica_id)
            )
        return found

    def merge(parts: list[Tensor]) -> Tensor:
        out = torch.zeros_like(parameter)
        for shard, part in zip(slices, parts, strict=True):
            out.narrow(row.axis, shard.local_start, shard.stop - shard.start).copy_(part)
        return out

    parameter.has_unused_rows = sum(p.stop - p.start for p in slices) < parameter.shape[row.axis]  # type: ignore[attr-defined]
    return ShardedTensorFactory(row.megatron, parameter, build, merge, replica)
