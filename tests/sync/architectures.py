"""Architectures and worlds for the weight sync: numbers only, without a model folder."""

from __future__ import annotations

from typing import Any

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of

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
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-groups": {"model_type": "llama", "num_key_value_heads": 8},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},  # biases
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},  # q and k norms
    "qwen3-moe": {"model_type": "qwen3_moe", "head_dim": 16, **EXPERTS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


def architecture(family: str, **changes: Any) -> Architecture:
    return architecture_of({**SMALL, **FAMILIES[family], **changes})
