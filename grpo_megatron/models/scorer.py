"""Scorer: log-probabilities of a batch under one model, the same on every rank of the replica. Policy and reference."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.config import MegatronConfig
from grpo_megatron.device import Device
from grpo_megatron.models.forward import Pack, pack, run, unpack
from grpo_megatron.models.precision import token_multiple
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import Batch


class Scorer:
    def __init__(
        self,
        model: torch.nn.Module,
        megatron: MegatronConfig,
        mesh: Mesh,
        device: Device,
        temperature: float,
        chunk: int,
    ) -> None:
        self.model, self.mesh, self.device = model, mesh, device
        self.temperature, self.chunk = temperature, chunk
        self.multiple = token_multiple(megatron)

    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        return [
            pack(
                batch,
                rows,
                multiple=self.multiple,
                temperature=self.temperature if temperature is None else temperature,
                chunk=self.chunk,
                device=self.device,
                cp=self.mesh.cp,
                cp_rank=self.mesh.cp_rank,
            )
            for rows in micro_batches
        ]

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        """Log-probability of every response token [B, R], float32 on the host, 0 behind the end. Collective.

        Runs the batch's own micro-batches, so that an update that follows sees the same numbers.
        """
        width = batch.response_mask.shape[1]
        out = torch.zeros(len(batch), width)

        def consume(current: Pack, logprobs: Tensor, entropy: Tensor) -> None:
            if current.rows:
                out[current.rows] = unpack(logprobs, current.lengths, width).cpu()

        micro_batches = [rows for mini in batch.mini_batches for rows in mini]
        if not micro_batches:  # nothing to train on, on any rank
            return out
        run(self.model, self.packs(batch, micro_batches, temperature), consume, device=self.device, forward_only=True)
        if self.mesh.pp > 1:
            shared = out.to(self.device.torch_device)
            dist.broadcast(shared, self.mesh.stage_rank(self.mesh.pp - 1), group=self.mesh.pp_group)
            out = shared.cpu()
        return out
