"""Reference: the frozen model that the KL term measures against, in the policy's layout; or none."""

from __future__ import annotations

from pathlib import Path

import torch

from grpo_megatron.config import ActorConfig, ModelConfig
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.build import build_model
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.scorer import Scorer
from grpo_megatron.models.weights import bare, load_hf
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import Batch


class NoReference:
    """Stands in where no KL term asks for a reference."""

    def logprobs(self, batch: Batch) -> None:
        return None

    def copy_from(self, policy: Policy) -> None:
        return None


class Reference(Scorer):
    """Weights come from `path`; `copy_from` replaces them by the policy's present ones."""

    def __init__(
        self,
        path: Path,
        model: ModelConfig,
        actor: ActorConfig,
        arch: Architecture,
        mesh: Mesh,
        device: Device,
        *,
        temperature: float = 1.0,
    ) -> None:
        inner = build_model(arch, actor.megatron, model.dtype, device)
        load_hf(inner, path, arch, mesh)
        inner.requires_grad_(False)
        super().__init__(inner, actor.megatron, mesh, device, temperature, actor.logprob_chunk_size)

    @torch.no_grad()
    def copy_from(self, policy: Policy) -> None:
        """Same layout, so rank by rank; no communication."""
        theirs = dict(bare(policy.ddp).named_parameters())
        for name, parameter in bare(self.model).named_parameters():
            parameter.copy_(theirs[name])
