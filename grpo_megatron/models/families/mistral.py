"""Mistral: the same shapes as Llama. v0.1 has a sliding window; sequences longer than the window are refused."""

from __future__ import annotations

from typing import Any

from grpo_megatron.models.architecture import Architecture, common_settings
from grpo_megatron.models.decoder_table import decoder_table
from grpo_megatron.models.mapping import WeightRow


def architecture_from(config: dict[str, Any]) -> Architecture:
    return Architecture(
        family="mistral",
        tied=bool(config.get("tie_word_embeddings", False)),
        sliding_window=config.get("sliding_window"),
        **common_settings(config),
    )


def weight_table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(tied=arch.tied)
