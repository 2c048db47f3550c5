"""LatentAttention: Megatron-Core's multi-head latent attention with projections to the latents that are whole on every rank.

Megatron-Core's local modules cut these projections over tensor-parallel ranks and gather the result. Each rank's heads use
the rotated key, and the backward pass of that gather does not sum its gradients over the ranks: with tensor parallelism,
they would be those of one rank's heads. Transformer Engine's modules have whole projections, each rank on its part of the
sequence, and there the gradients are summed. This class has the same for the local modules. It needs sequence parallelism.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

# Prefixes of a layer's parameters -> those in a checkpoint, as Transformer Engine's fused modules have them.
LATENT_KEYS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class WholeLinear(torch.nn.Module):
    """A linear layer without a bias that every tensor-parallel rank has whole.

    The weight's attribute `sequence_parallel` makes Megatron sum its gradient over tensor-parallel ranks.
    """

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[s, b, inputs] -> ([s, b, outputs], no bias), as Megatron's linear layers return it."""
        return F.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Built by Megatron-Core, then with `WholeLinear` in place of the projections to the latents."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        # Without Transformer Engine, Megatron-Core 0.16.1 sets HAVE_TE here all the same, and TELinear is no class.
        has_engine = isinstance(multi_latent_attention.TELinear, type)
        with mock.patch.object(multi_latent_attention, "HAVE_TE", has_engine):
            super().__init__(config, *args, **kwargs)
        rows = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config.hidden_size, rows, config)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)
