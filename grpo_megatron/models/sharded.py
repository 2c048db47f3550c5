"""ShardedModel: one rank's shard of a model. Forward passes over a batch, and the stream of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.config import ActorConfig
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.forward import Pack, forward_backward, pack
from grpo_megatron.models.precision import token_multiple
from grpo_megatron.models.prefix_tree import pack_trees
from grpo_megatron.models.resharding import Resharding
from grpo_megatron.models.weights import hf_weights, stage_owners
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sync.digest import Expected
from grpo_megatron.types import Batch, WeightBucket


class ShardedModel:
    """`model` is this rank's stage and shard, with its weights. Collective: built on every rank at the same point."""

    def __init__(
        self,
        model: torch.nn.Module,
        arch: Architecture,
        actor: ActorConfig,
        mesh: Mesh,
        device: Device,
        temperature: float = 1.0,
    ) -> None:
        self.model, self.arch, self.actor, self.mesh, self.device = model, arch, actor, mesh, device
        self.temperature, self.chunk = temperature, actor.logprob_chunk_size
        self.multiple = token_multiple(actor.megatron)  # packs are padded to a multiple of this many tokens
        self.stage_of = stage_owners(model, arch, mesh)

    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        """The micro-batches on the device, at `temperature` (None: the model's own)."""
        options: dict[str, Any] = {
            "multiple": self.multiple,
            "temperature": self.temperature if temperature is None else temperature,
            "chunk": self.chunk,
            "device": self.device,
        }
        return [
            pack_trees(batch, rows, **options)
            if batch.shares_prompts and rows
            else pack(batch, rows, **options, cp=self.mesh.cp, cp_rank=self.mesh.cp_rank)
            for rows in micro_batches
        ]

    @torch.no_grad()
    def forward_batch(
        self, batch: Batch, out: Tensor, read: Callable[[Pack, Tensor], Tensor], temperature: float | None = None
    ) -> Tensor:
        """Set each pack's rows of `out` [B, ...] to `read(pack, values)`. The same on every rank of the replica.

        Runs the micro-batches of the batch, so that a later update computes the same numbers. Collective over the replica.
        """

        def consume(current: Pack, values: Tensor, entropy: Tensor) -> None:
            if current.rows:
                out[current.rows] = read(current, values).float().cpu()

        micro_batches = [rows for mini in batch.mini_batches for rows in mini]
        if not micro_batches:  # the batch is empty on every rank
            return out
        packs = self.packs(batch, micro_batches, temperature)
        forward_backward(self.model, packs, consume, device=self.device, forward_only=True)
        return self.from_last_stage(out)

    def from_last_stage(self, out: Tensor) -> Tensor:
        """The host tensor `out` of the last pipeline stage, on the ranks of all stages. Collective over the replica."""
        if self.mesh.pp == 1:
            return out
        shared = out.to(self.device.torch_device)
        dist.broadcast(shared, self.mesh.stage_rank(self.mesh.pp - 1), group=self.mesh.pp_group)
        return shared.cpu()

    def hf_weights(self, bucket_megabytes: int = 512) -> Iterator[WeightBucket]:
        """Collective stream of every Hugging Face tensor, whole, on every rank (see `weights.hf_weights`)."""
        return hf_weights(self.model, self.arch, self.mesh, bucket_megabytes << 20, self.stage_of)

    def engine_weights(self, resharding: Resharding, version: int) -> Iterator[WeightBucket]:
        """Collective stream of the weights for an engine: only the parts that it reads (see `Resharding.stream`)."""
        return resharding.stream(self.model, version)

    def expected_digests(self, resharding: Resharding) -> Expected:
        """The digests of the current weights, for each rank of the engine. Collective (see `Resharding`)."""
        return resharding.expected_digests(self.model)
