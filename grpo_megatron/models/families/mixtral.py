"""Mixtral: Mistral's attention, and few large experts in place of every MLP. A softmax over the logits of the selected
experts gives their weights."""

from __future__ import annotations

from typing import Any

from grpo_megatron.models.architecture import Architecture, common_settings, expert_settings
from grpo_megatron.models.decoder_table import decoder_table, expert_rows
from grpo_megatron.models.mapping import WeightRow


def architecture_from(config: dict[str, Any]) -> Architecture:
    experts = expert_settings(config, width="intermediate_size", renormalise=True)
    return Architecture(
        family="mixtral",
        tied=bool(config.get("tie_word_embeddings", False)),
        sliding_window=config.get("sliding_window"),
        **{**common_settings(config), **experts},
    )


def weight_table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(tied=arch.tied, mlp=expert_rows("block_sparse_moe", "w1", "w3", "w2"))
