"""Mistral: Llama's shapes; v0.1 attends within a sliding window, and sequences longer than it are refused."""

from __future__ import annotations

from typing import Any

from grpo_megatron.models.architecture import Architecture, common_settings
from grpo_megatron.models.mapping import WeightRow, decoder_table


def architecture(config: dict[str, Any]) -> Architecture:
    return Architecture(
        family="mistral",
        tied=bool(config.get("tie_word_embeddings", False)),
        sliding_window=config.get("sliding_window"),
        **common_settings(config),
    )


def table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(tied=arch.tied)
