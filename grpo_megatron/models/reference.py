"""Frozen models in the policy's layout: the reference of the KL term, and the base of frozen reward models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from grpo_megatron.config import ActorConfig, ModelConfig
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.build import load_model
from grpo_megatron.models.forward import LanguageModel, ShardedModel
from grpo_megatron.models.optimizer import OffloadedTensors
from grpo_megatron.models.packing import Pack
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.load import unwrapped
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import Batch


class FrozenModel(ShardedModel):
    """A model that is never trained. `actor.megatron.offload_reference` keeps its weights on the host between passes."""

    def __init__(
        self,
        inner: torch.nn.Module,
        arch: Architecture,
        actor: ActorConfig,
        mesh: Mesh,
        device: Device,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(inner.requires_grad_(False), arch, actor, mesh, device, temperature)
        self._offloaded = OffloadedTensors(device)
        self._offload()

    def _offload(self, *, unchanged: bool = False) -> None:
        if self.actor.megatron.offload_reference:
            self._offloaded.offload(self.model.parameters(), unchanged=unchanged)

    @contextlib.contextmanager
    def readable_weights(self, *, unchanged: bool = True) -> Iterator[None]:
        """Keeps the weights on the device inside the block. `unchanged`: the block does not write to them."""
        was_offloaded = self._offloaded.is_offloaded
        self._offloaded.onload()
        try:
            yield
        finally:
            if was_offloaded:
                self._offload(unchanged=unchanged)

    def forward_batch(
        self, batch: Batch, out: Tensor, read: Callable[[Pack, Tensor], Tensor], temperature: float | None = None
    ) -> Tensor:
        """See ShardedModel."""
        with self.readable_weights():
            return super().forward_batch(batch, out, read, temperature)


class Reference(FrozenModel, LanguageModel):
    """Its weights come from `path`. `copy_from` replaces them with the policy's current weights."""

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
        inner = load_model(path, arch, actor.megatron, model.dtype, mesh, device, has_gradients=False)
        super().__init__(inner, arch, actor, mesh, device, temperature)

    @torch.no_grad()
    def copy_from(self, policy: Policy) -> None:
        """The layouts are the same, so every rank copies its own shard. No communication."""
        source = dict(unwrapped(policy.ddp).named_parameters())
        with self.readable_weights(unchanged=False):
            for name, parameter in unwrapped(self.model).named_parameters():
                parameter.copy_(source[name])
