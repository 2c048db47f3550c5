"""Llama 2, 3, 3.1, 3.2, 3.3: grouped-query attention, no biases. From 3.1 on with llama3 RoPE scaling."""

from __future__ import annotations

from typing import Any

from grpo_megatron.models.architecture import Architecture, UnsupportedModel, common_settings
from grpo_megatron.models.decoder_table import decoder_table
from grpo_megatron.models.mapping import WeightRow


def architecture_from(config: dict[str, Any]) -> Architecture:
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UnsupportedModel(f"Llama with {key}=true is not supported")
    return Architecture(family="llama", tied=bool(config.get("tie_word_embeddings", False)), **common_settings(config))


def weight_table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(tied=arch.tied)
