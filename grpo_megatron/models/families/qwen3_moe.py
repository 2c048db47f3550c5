"""Qwen3-MoE: Qwen3's attention, and routed experts in place of every MLP. There is no shared expert."""

from __future__ import annotations

from typing import Any

from grpo_megatron.models.architecture import Architecture, UnsupportedModel, common_settings, expert_settings
from grpo_megatron.models.decoder_table import decoder_table, expert_rows
from grpo_megatron.models.mapping import WeightRow


def architecture_from(config: dict[str, Any]) -> Architecture:
    if config.get("attention_bias"):
        raise UnsupportedModel("Qwen3-MoE with attention_bias=true is not supported")
    renormalise = bool(config.get("norm_topk_prob", False))
    experts = expert_settings(config, width="moe_intermediate_size", renormalise=renormalise)
    return Architecture(
        family="qwen3_moe",
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=True,
        sliding_window=config.get("sliding_window") if config.get("use_sliding_window") else None,
        **{**common_settings(config), **experts},
    )


def weight_table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(qk_norm=True, tied=arch.tied, mlp=expert_rows("mlp", "gate_proj", "up_proj", "down_proj"))
