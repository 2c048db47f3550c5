"""Decoders with grouped-query attention, which differ in a few fields of config.json, from Gemma to Qwen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from grpo_megatron.models.architecture import (
    Architecture,
    DeltaNet,
    UnsupportedModel,
    common_settings,
    expert_settings,
)
from grpo_megatron.models.families.deepseek import shared_expert_settings
from grpo_megatron.models.weights.table import WeightRow, decoder_table
from grpo_megatron.untrusted import shown


@dataclass(frozen=True)
class ModelFamily:
    """A model family: config.json -> Architecture -> weight table.

    `architecture_from` raises UnsupportedModel for what it cannot express. The names in `weight_table` are those of
    Megatron-Core's modules, and of the tensors in the Hugging Face folder.
    """

    architecture_from: Callable[[dict[str, Any]], Architecture]
    weight_table: Callable[[Architecture], list[WeightRow]] = decoder_table


def _family(
    name: str = "",
    refused: Sequence[str] = (),
    *,
    window: str | None = None,
    rotary: float | None = None,
    experts: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: {},
    table: Callable[[Architecture], list[WeightRow]] = decoder_table,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> ModelFamily:
    """Returns a family whose Architecture is `common_settings` and `fields`. Keys in `refused` must not be set.

    `window`: the key that switches `sliding_window` on; "": it is always on. vLLM has it in all layers of these families or in
    none. `rotary`: see `common_settings`. `experts`: config.json -> the fields of experts, and others. `defaults`:
    transformers' values of keys that config.json may leave out, where they are not those of `common_settings`.
    """

    def architecture_from(config: dict[str, Any]) -> Architecture:
        config = {**defaults, **config}
        for key in refused:
            if config.get(key):
                raise UnsupportedModel(f"{name} with {key}=true is not supported")
        settings = {"tied": bool(config.get("tie_word_embeddings", False)), **fields}
        if window is not None and (not window or config.get(window)):
            first = (config.get("max_window_layers") or 0) if window else 0
            settings |= window_settings(config, lambda layer: layer >= first)
            if settings.get("full_layers"):
                raise UnsupportedModel(
                    f"{config['model_type']} with sliding windows in some layers only (layer_types, or max_window_layers="
                    f"{first}): vLLM has them in all layers or in none"
                )
        return Architecture(
            family=config["model_type"], **{**common_settings(config, rotary), **settings, **experts(config)}
        )

    return ModelFamily(architecture_from, table)


def window_settings(config: dict[str, Any], has_window: Callable[[int], bool]) -> dict[str, Any]:
    """Returns the Architecture keywords of sliding windows. Raises UnsupportedModel; KeyError.

    `has_window`: whether a layer, counted from 0, has a window where config.json has no `layer_types`.
    """
    layers, kinds = range(config["num_hidden_layers"]), config.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if has_window(layer) else "full_attention" for layer in layers]
    is_list = isinstance(kinds, list) and all(kind in ("sliding_attention", "full_attention") for kind in kinds)
    if not is_list or len(kinds) != len(layers):
        raise UnsupportedModel(
            f"{config['model_type']} with layer_types={shown(kinds)}: each of the {len(layers)} layers must have"
            " sliding_attention or full_attention"
        )
    window, full = config.get("sliding_window"), tuple(layer for layer in layers if kinds[layer] == "full_attention")
    return {} if window is None or len(full) == len(layers) else {"sliding_window": window, "full_layers": full}


def _mixtral_table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(arch, ("block_sparse_moe", "w1", "w3", "w2"))


def _mixtral_experts(config: dict[str, Any]) -> dict[str, Any]:
    return expert_settings(config, width="intermediate_size", renormalise=True)


def _qwen_experts(config: dict[str, Any], *, always: bool = False) -> dict[str, Any]:
    renormalise = always or bool(config.get("norm_topk_prob", False))
    return expert_settings(config, width="moe_intermediate_size", renormalise=renormalise)


def _seed_settings(config: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": bool(config.get("attention_bias", True))}


def _glm_settings(config: dict[str, Any]) -> dict[str, Any]:
    attention = {"qkv_bias": bool(config.get("attention_bias")), "qk_norm": bool(config.get("use_qk_norm"))}
    return attention | shared_expert_settings(config, is_sigmoid=True)


def _delta_settings(config: dict[str, Any], *, is_fused: bool) -> dict[str, Any]:
    """Returns the Architecture keywords of gated delta nets between layers of gated attention. Raises UnsupportedModel."""
    kinds, every = config.get("layer_types"), config.get("full_attention_interval") or 4
    if kinds is not None:  # transformers 5 writes it
        every = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
        layers = range(1, config["num_hidden_layers"] + 1)
        if not every or kinds != [f"{'linear' if n % every else 'full'}_attention" for n in layers]:
            raise UnsupportedModel(
                f"{config['model_type']} with layer_types={shown(kinds)}: every n-th layer must have full attention, and all"
                " others linear_attention"
            )
    delta = DeltaNet(
        is_fused=is_fused,
        full_every=every,
        kernel=config["linear_conv_kernel_dim"],
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
    )
    return {"delta": delta, "qk_norm": True, "output_gate": True, "centred_norms": True}


def _next_settings(config: dict[str, Any], *, is_fused: bool = True) -> dict[str, Any]:
    shared = {"shared_ffn_hidden_size": config["shared_expert_intermediate_size"], "shared_gates": 1}
    routed = _qwen_experts(
        {"norm_topk_prob": True, **config, "shared_expert_intermediate_size": 0}, always=not is_fused
    )
    return routed | shared | _delta_settings(config, is_fused=is_fused)


def _oss_table(arch: Architecture) -> list[WeightRow]:
    return [
        replace(row, hf=tuple(n.replace(".mlp.gate.", ".mlp.router.") for n in row.hf)) for row in decoder_table(arch)
    ]


def _oss_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Returns windows and experts. vLLM has the two numbers of the SwiGLU, and the places of the windows, built in."""
    for key, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0), ("attention_bias", True)):
        if config.get(key, value) != value:
            raise UnsupportedModel(f"gpt-oss with {key}={shown(config[key])} is not supported (supported: {value})")
    windows = window_settings(config, lambda layer: layer % 2 == 0)
    if windows and windows["full_layers"] != tuple(range(1, config["num_hidden_layers"], 2)):
        raise UnsupportedModel(
            f"gpt-oss with layer_types={shown(config['layer_types'])}: vLLM has sliding windows in every other layer"
        )
    return windows | expert_settings(config, width="intermediate_size", renormalise=True)


_GEMMA3: dict[str, Any] = {  # what the published files leave out: the defaults of transformers
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window_pattern": 6,
}


def _gemma3(config: dict[str, Any]) -> Architecture:
    config = _GEMMA3 | {key: value for key, value in config.items() if value is not None}
    for key in ("attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise UnsupportedModel(f"Gemma 3 with {key}={shown(config[key])} is not supported")
    if config["hidden_activation"] != _GEMMA3["hidden_activation"]:
        raise UnsupportedModel(f"Gemma 3 with hidden_activation={shown(config['hidden_activation'])} is not supported")
    of_types = config.get("rope_parameters") or {}
    rope = {
        "rope_theta": config.get("rope_theta", 1e6),
        **config.get("rope_scaling", {}),
        **(of_types.get("full_attention") or {}),
    }
    local = {"rope_theta": config.get("rope_local_base_freq", 1e4), **(of_types.get("sliding_attention") or {})}
    for kind, parameters, supported in (("full", rope, ("default", "linear")), ("sliding", local, ("default",))):
        if parameters.get("rope_type", "default") not in supported:
            raise UnsupportedModel(
                f"Gemma 3 with RoPE scaling {shown(parameters['rope_type'])} of its layers with {kind} attention is not"
                f" supported (supported: {', '.join(supported)})"
            )
    pattern = config["sliding_window_pattern"]
    windows = window_settings(config, lambda layer: (layer + 1) % pattern != 0)
    return Architecture(
        family=config["model_type"],
        tied=config["tie_word_embeddings"],
        qk_norm=True,
        centred_norms=True,
        sandwich_norms=True,
        scaled_embedding=True,
        gelu=True,
        query_scalar=config["query_pre_attn_scalar"],
        local_rope_theta=float(local["rope_theta"]) if windows else None,
        **common_settings({**config, "hidden_act": "silu", "rope_scaling": None, "rope_parameters": rope}),
        **windows,
    )


def _with_tower(config: dict[str, Any]) -> Architecture:
    raise UnsupportedModel(
        f"model_type={config['model_type']}: its vision tower is not supported; save the text model alone (docs/models.md)"
    )


def _text_of(family: ModelFamily) -> ModelFamily:
    """Returns the family of folders that have the decoder's settings in `text_config`. Their tower is not read."""

    def architecture_from(config: dict[str, Any]) -> Architecture:
        kept: dict[str, Any] = {key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config}
        if not isinstance(text := config["text_config"], dict):
            raise UnsupportedModel(f"config.json gives text_config={shown(text)}, not an object")
        return family.architecture_from({**text, **kept})

    return ModelFamily(architecture_from, family.weight_table)


_QWEN35 = _family(
    "Qwen3.5", ["attention_bias"], rotary=0.25, experts=functools.partial(_delta_settings, is_fused=False)
)
_QWEN35_MOE = _family(
    "Qwen3.5-MoE",
    ["attention_bias"],
    rotary=0.25,
    experts=functools.partial(_next_settings, is_fused=False),
)
# Qwen's config.json gives a window that is in use only with `use_sliding_window`.
_QWEN3: dict[str, Any] = {"refused": ["attention_bias"], "window": "use_sliding_window", "qk_norm": True}
_EPS = {"rms_norm_eps": 1e-5}
DECODERS = {
    # arXiv 2503.19786: windows in five of six layers, with a base of RoPE of their own; norms before and after.
    "gemma3": ModelFamily(_with_tower),
    "gemma3_text": ModelFamily(_gemma3),
    # GLM-4.5, 4.6 and Air, arXiv 2508.06471: DeepSeek-V3's experts and router; the first half of every head rotates.
    "glm4_moe": _family("GLM-4.5", rotary=0.5, experts=_glm_settings, defaults=_EPS),
    # gpt-oss, arXiv 2508.10925: sinks, biases everywhere, clamped SwiGLU. Files have the experts of a layer in one tensor.
    "gpt_oss": _family(
        experts=_oss_settings,
        table=_oss_table,
        defaults={**_EPS, "sliding_window": 128, "rope_theta": 150_000.0},
        qkv_bias=True,
        linear_bias=True,
        sinks=True,
        swiglu_limit=7.0,
    ),
    # Llama 2, 3, 3.1, 3.2, 3.3; from 3.1 on with llama3 RoPE scaling.
    "llama": _family("Llama", ["attention_bias", "mlp_bias"]),
    # Llama's shapes. v0.1 has a sliding window in every layer.
    "mistral": _family(window="", defaults={"sliding_window": 4096}),
    # Few large experts in place of every MLP; a softmax over the logits of the selected experts gives their weights.
    "mixtral": _family(window="", experts=_mixtral_experts, table=_mixtral_table, defaults={**_EPS, "rope_theta": 1e6}),
    # arXiv 2501.00656: norms after attention and MLP, none before; a norm of queries and of keys over all heads together.
    "olmo2": _family("OLMo-2", ["attention_bias"], defaults=_EPS, post_norms=True),
    # Qwen2 and 2.5: biases on query, key and value. The small sizes have tied embeddings.
    "qwen2": _family(window="use_sliding_window", qkv_bias=True),
    # RMSNorm on every query and key head, and a head size given in config.json.
    "qwen3": _family("Qwen3", **_QWEN3),
    "qwen3_moe": _family("Qwen3-MoE", **_QWEN3, experts=_qwen_experts),
    # Qwen2's layers, with a head size given in config.json.
    "seed_oss": _family("Seed-OSS", ["attention_out_bias", "mlp_bias"], experts=_seed_settings),
    # Gated delta nets in three of four layers, gated attention in the fourth, a shared expert with a gate.
    "qwen3_next": _family("Qwen3-Next", ["attention_bias"], rotary=0.25, experts=_next_settings),
    # Qwen3-Next's layers with an MLP, or with its experts. Published folders have a vision tower, too.
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": _QWEN35_MOE,
    "qwen3_5": _text_of(_QWEN35),
    "qwen3_5_moe": _text_of(_QWEN35_MOE),
}
