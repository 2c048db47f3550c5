"""The shape of a model for counting its FLOP, and what one sequence costs."""

from __future__ import annotations

from grpo_megatron.algo.packing import SequenceCost
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.flops import ModelShape


def model_shape(arch: Architecture) -> ModelShape:
    latent, attention = arch.latent, None
    if latent is not None:
        attention = (
            latent.num_parameters(arch.hidden_size, arch.num_attention_heads) - latent.kv_rank - (latent.q_rank or 0)
        )
    return ModelShape(
        hidden_size=arch.hidden_size,
        num_layers=arch.num_layers,
        num_heads=arch.num_attention_heads,
        num_kv_heads=arch.num_query_groups,
        head_dim=arch.head_dim if latent is None else (latent.key_dim + latent.value_dim) / 2,
        ffn_size=arch.ffn_hidden_size,
        vocab_size=arch.vocab_size,
        num_experts=arch.num_experts,
        experts_per_token=arch.experts_per_token,
        shared_ffn_size=arch.shared_ffn_hidden_size,
        num_dense_layers=arch.num_dense_layers,
        dense_ffn_size=arch.dense_ffn_hidden_size,
        attention_parameters=attention,
    )


def sequence_cost(arch: Architecture) -> SequenceCost:
    """The multiply-adds by which rows are balanced over data-parallel ranks."""
    shape = model_shape(arch)
    head = shape.vocab_size * shape.hidden_size
    return SequenceCost(
        per_token=shape.active_parameters - 2 * head,  # without embedding and head
        per_response_token=head,
        per_square=round(shape.head_dim * shape.num_heads * shape.num_layers),
    )
