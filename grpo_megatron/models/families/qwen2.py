"""Qwen2 and Qwen2.5: biases on query, key and value. The small sizes have tied embeddings."""

from __future__ import annotations

from typing import Any

from grpo_megatron.models.architecture import Architecture, common_settings
from grpo_megatron.models.decoder_table import decoder_table
from grpo_megatron.models.mapping import WeightRow


def architecture_from(config: dict[str, Any]) -> Architecture:
    return Architecture(
        family="qwen2",
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=True,
        sliding_window=config.get("sliding_window") if config.get("use_sliding_window") else None,
        **common_settings(config),
    )


def weight_table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(qkv_bias=True, tied=arch.tied)
