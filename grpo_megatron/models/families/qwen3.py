"""Qwen3 (dense): no biases, RMSNorm on every query and key head, a head size given in config.json."""

from __future__ import annotations

from typing import Any

from grpo_megatron.models.architecture import Architecture, UnsupportedModel, common_settings
from grpo_megatron.models.decoder_table import decoder_table
from grpo_megatron.models.mapping import WeightRow


def architecture_from(config: dict[str, Any]) -> Architecture:
    if config.get("attention_bias"):
        raise UnsupportedModel("Qwen3 with attention_bias=true is not supported")
    return Architecture(
        family="qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=True,
        sliding_window=config.get("sliding_window") if config.get("use_sliding_window") else None,
        **common_settings(config),
    )


def weight_table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(qk_norm=True, tied=arch.tied)
