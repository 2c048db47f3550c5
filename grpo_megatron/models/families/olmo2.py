"""OLMo-2, arXiv 2501.00656: norms after attention and MLP, inside the residual, and none before them. Queries and keys have a
norm over all heads together."""

from __future__ import annotations

from typing import Any

from grpo_megatron.models.architecture import Architecture, UnsupportedModel, common_settings
from grpo_megatron.models.decoder_table import post_norm_table
from grpo_megatron.models.mapping import WeightRow


def architecture_from(config: dict[str, Any]) -> Architecture:
    if config.get("attention_bias"):
        raise UnsupportedModel("OLMo-2 with attention_bias=true is not supported")
    tied = bool(config.get("tie_word_embeddings", False))
    return Architecture(family="olmo2", tied=tied, post_norms=True, **common_settings(config))


def weight_table(arch: Architecture) -> list[WeightRow]:
    return post_norm_table(tied=arch.tied)
