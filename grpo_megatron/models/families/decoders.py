"""Decoders with grouped-query attention, which differ in a few fields of config.json.

family      model_type   beside common_settings
Llama       llama        2, 3, 3.1, 3.2, 3.3; from 3.1 on with llama3 RoPE scaling
Mistral     mistral      Llama's shapes; v0.1 has a sliding window: sequences longer than it are refused
Mixtral     mixtral      Mistral's attention, and few large experts in place of every MLP; a softmax over the logits of the
                         selected experts gives their weights
OLMo-2      olmo2        arXiv 2501.00656: norms after attention and MLP, inside the residual, and none before them; queries
                         and keys have a norm over all heads together
Qwen2, 2.5  qwen2        biases on query, key and value; the small sizes have tied embeddings
Qwen3       qwen3        no biases, RMSNorm on every query and key head, a head size given in config.json
Qwen3-MoE   qwen3_moe    Qwen3's attention, and routed experts in place of every MLP; no shared expert
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_megatron.models.architecture import Architecture, UnsupportedModel, common_settings, expert_settings
from grpo_megatron.models.weights.decoder_table import decoder_table, expert_rows, post_norm_table
from grpo_megatron.models.weights.table import WeightRow


@dataclass(frozen=True)
class ModelFamily:
    """A model family: config.json -> Architecture -> weight table.

    `architecture_from` raises UnsupportedModel for what it cannot express. The names in `weight_table` are those of
    Megatron-Core's modules, and of the tensors in the Hugging Face folder.
    """

    architecture_from: Callable[[dict[str, Any]], Architecture]
    weight_table: Callable[[Architecture], list[WeightRow]]


def _refuse(config: dict[str, Any], name: str, *keys: str) -> None:
    for key in keys:
        if config.get(key):
            raise UnsupportedModel(f"{name} with {key}=true is not supported")


def _decoder(config: dict[str, Any], **fields: Any) -> Architecture:
    tied = bool(config.get("tie_word_embeddings", False))
    return Architecture(family=config["model_type"], tied=tied, **{**common_settings(config), **fields})


def _window(config: dict[str, Any]) -> int | None:
    """Qwen's config.json gives a window that is in use only with `use_sliding_window`."""
    return config.get("sliding_window") if config.get("use_sliding_window") else None


def _llama(config: dict[str, Any]) -> Architecture:
    _refuse(config, "Llama", "attention_bias", "mlp_bias")
    return _decoder(config)


def _mistral(config: dict[str, Any]) -> Architecture:
    return _decoder(config, sliding_window=config.get("sliding_window"))


def _mixtral(config: dict[str, Any]) -> Architecture:
    experts = expert_settings(config, width="intermediate_size", renormalise=True)
    return _decoder(config, sliding_window=config.get("sliding_window"), **experts)


def _olmo2(config: dict[str, Any]) -> Architecture:
    _refuse(config, "OLMo-2", "attention_bias")
    return _decoder(config, post_norms=True)


def _qwen2(config: dict[str, Any]) -> Architecture:
    return _decoder(config, qkv_bias=True, sliding_window=_window(config))


def _qwen3(config: dict[str, Any]) -> Architecture:
    _refuse(config, "Qwen3", "attention_bias")
    return _decoder(config, qk_norm=True, sliding_window=_window(config))


def _qwen3_moe(config: dict[str, Any]) -> Architecture:
    _refuse(config, "Qwen3-MoE", "attention_bias")
    renormalise = bool(config.get("norm_topk_prob", False))
    experts = expert_settings(config, width="moe_intermediate_size", renormalise=renormalise)
    return _decoder(config, qk_norm=True, sliding_window=_window(config), **experts)


def _plain_table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(qkv_bias=arch.qkv_bias, qk_norm=arch.qk_norm, tied=arch.tied)


def _mixtral_table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(tied=arch.tied, mlp=expert_rows("block_sparse_moe", "w1", "w3", "w2"))


def _olmo2_table(arch: Architecture) -> list[WeightRow]:
    return post_norm_table(tied=arch.tied)


def _qwen3_moe_table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(qk_norm=True, tied=arch.tied, mlp=expert_rows("mlp", "gate_proj", "up_proj", "down_proj"))


DECODERS = {
    "llama": ModelFamily(_llama, _plain_table),
    "mistral": ModelFamily(_mistral, _plain_table),
    "mixtral": ModelFamily(_mixtral, _mixtral_table),
    "olmo2": ModelFamily(_olmo2, _olmo2_table),
    "qwen2": ModelFamily(_qwen2, _plain_table),
    "qwen3": ModelFamily(_qwen3, _plain_table),
    "qwen3_moe": ModelFamily(_qwen3_moe, _qwen3_moe_table),
}
