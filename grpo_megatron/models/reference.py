"""Reference: the frozen model that the KL term measures against, in the policy's layout; or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from grpo_megatron.config import ActorConfig, ModelConfig
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.build import load_model
from grpo_megatron.models.offload import Offloaded
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.scorer import Scorer
from grpo_megatron.models.weights import bare, hf_weights, stage_owners
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import Batch, WeightBucket


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
        inner = load_model(path, arch, actor.megatron, model.dtype, mesh, device)
        inner.requires_grad_(False)
        self.arch, self.stage_of = arch, stage_owners(inner, arch, mesh)
        super().__init__(inner, actor.megatron, mesh, device, temperature, actor.logprob_chunk_size)
        self._stays = not actor.megatron.offload_reference
        self._away = Offloaded(device)
        self._leave()

    def _leave(self, *, unchanged: bool = False) -> None:
        if not self._stays:
            self._away.leave(self.model.parameters(), unchanged=unchanged)

    @contextlib.contextmanager
    def _resident(self, *, unchanged: bool = True) -> Iterator[None]:
        """The weights are on the device, which `actor.megatron.offload_reference` otherwise keeps free of them."""
        was_away = self._away.is_away
        self._away.come_back()
        try:
            yield
        finally:
            if was_away:
                self._leave(unchanged=unchanged)

    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        with self._resident():
            return super().logprobs(batch, temperature)

    def hf_weights(self, bucket_megabytes: int = 512) -> Iterator[WeightBucket]:
        """Collective stream of every Hugging Face tensor, as the policy's (RFT draws from the reference)."""
        with self._resident():
            yield from hf_weights(self.model, self.arch, self.mesh, bucket_megabytes << 20, self.stage_of)

    @torch.no_grad()
    def copy_from(self, policy: Policy) -> None:
        """Same layout, so rank by rank; no communication."""
        theirs = dict(bare(policy.ddp).named_parameters())
        with self._resident(unchanged=False):
            for name, parameter in bare(self.model).named_parameters():
                parameter.copy_(theirs[name])
