"""Constants: the float32 buffers of a model in the weight stream, beside its parameters.

DeepSeek-V3 chooses experts by score + bias. A bias that is rounded to bfloat16 chooses others wherever two sums are closer
than the rounding. The plan of a weight sync has one dtype, so the biases travel apart. They are small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.weights import model_rows
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sync.tensors import Share, SyncTensor
from grpo_megatron.types import WeightBucket


class Constants:
    """Every rank of a pipeline stage has the constants of its layers, whole."""

    def __init__(self, arch: Architecture, mesh: Mesh, stage_of: Mapping[str, int]) -> None:
        self._mesh = mesh
        self._of_stage: dict[int, list[tuple[str, SyncTensor]]] = {}  # (Megatron name, tensor)
        for row in model_rows(arch).values():
            if row.is_constant:
                tensor = SyncTensor(row.hf[0], row.hf_shapes(arch)[0], 0)
                self._of_stage.setdefault(stage_of[row.megatron], []).append((row.megatron, tensor))

    def shares(self) -> list[Share]:
        """What this rank digests for the attestation: the constants of its stage, if it is the stage's first rank."""
        if (self._mesh.tp_rank, self._mesh.cp_rank, self._mesh.dp_rank) != (0, 0, 0):
            return []
        readers = tuple(range(self._mesh.rollout_tp))
        held = self._of_stage.get(self._mesh.pp_rank, [])
        return [Share(name, tensor, 0, tensor.length, 0, readers) for name, tensor in held]

    def stream(self, parameters: Mapping[str, Tensor], device: torch.device) -> Iterator[WeightBucket]:
        """Every constant on every rank, one bucket per stage. Collective over the pipeline's ranks."""
        for stage, held in sorted(self._of_stage.items()):
            flat = torch.empty(sum(tensor.numel for _, tensor in held), dtype=torch.float32, device=device)
            if self._mesh.pp_rank == stage:
                flat.copy_(torch.cat([parameters[name].detach() for name, _ in held]))
            if self._mesh.pp > 1:
                dist.broadcast(flat, self._mesh.stage_rank(stage), group=self._mesh.pp_group)
            parts = flat.split([tensor.numel for _, tensor in held])
            yield [(tensor.name, part) for (_, tensor), part in zip(held, parts, strict=True)]
