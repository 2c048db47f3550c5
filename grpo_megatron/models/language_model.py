"""LanguageModel: a sharded model that computes log-probabilities of a batch: the policy or the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_megatron.models.forward import Pack, unpack
from grpo_megatron.models.sharded import ShardedModel
from grpo_megatron.types import Batch


class LanguageModel(ShardedModel):
    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        """Log-probability of every response token [B, R], float32 on the host, 0 after the end. Collective."""
        width = batch.response_mask.shape[1]

        def read(current: Pack, values: Tensor) -> Tensor:
            return unpack(values, current.lengths, width)

        return self.forward_batch(batch, torch.zeros(len(batch), width), read, temperature)
