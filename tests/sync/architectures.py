"""Architectures and worlds for the weight sync: numbers only, without a model folder."""

from __future__ import annotations

from typing import Any

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of, table_of
from grpo_megatron.models.weights.table import expand_table

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # more engine or training ranks than key-value heads
    "max_position_embeddings": 512,
    "vocab_size": 101,  # odd: both layouts pad it
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,  # the size that vLLM computes on the CPU
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
SIGMOID: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-groups": {"model_type": "llama", "num_key_value_heads": 8},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},  # biases
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},  # q and k norms
    "qwen3-moe": {"model_type": "qwen3_moe", "head_dim": 16, **EXPERTS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek-v3": {"model_type": "deepseek_v3", **LATENT, **SIGMOID},
}


def architecture(family: str, **changes: Any) -> Architecture:
    return architecture_of({**SMALL, **FAMILIES[family], **changes})


def planned_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """The tensors of a sync's plan: all but the constants, which travel apart (models/weights/resharding.py)."""
    rows = [row for row in expand_table(table_of(arch), arch) if not row.is_constant]
    return {name: shape for row in rows for name, shape in zip(row.hf, row.hf_shapes(arch), strict=True)}
