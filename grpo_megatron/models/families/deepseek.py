"""DeepSeek-V2 and V3 (also R1): latent attention, shared experts beside routed ones, dense MLPs in the first layers.

The two differ in their routers only (see `Routing`). Megatron-Core and vLLM normalise the latents with `rms_norm_eps`, and
transformers with 1e-6: another value is refused, because the three would not agree.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from grpo_megatron.models.architecture import Architecture, Latent, Routing, UnsupportedModel, common_settings
from grpo_megatron.untrusted import shown

# Values of config.json that the modules of Megatron-Core, transformers and vLLM all have.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "moe_layer_freq": (1, None),
    "rope_interleave": (True, None),
    "ep_size": (1, None),
    "rms_norm_eps": (1e-6, None),
}
ROUTERS = {  # model_type -> (scoring_func, topk_method): values that vLLM reads as this model
    "deepseek_v2": (("softmax", None), ("greedy", "group_limited_greedy")),
    "deepseek_v3": (("sigmoid",), ("noaux_tc",)),
}


def architecture_from(config: dict[str, Any]) -> Architecture:
    """Returns the architecture of a config.json. Raises UnsupportedModel."""
    family = config["model_type"]
    for key, values in SUPPORTED_VALUES.items():
        if config.get(key) not in values:
            raise UnsupportedModel(
                f"{family} with {key}={shown(config[key])} is not supported (supported: {values[0]})"
            )
    if config.get("num_key_value_heads", config.get("num_attention_heads")) != config.get("num_attention_heads"):
        raise UnsupportedModel(
            f"{family} with num_key_value_heads={shown(config['num_key_value_heads'])}: latent attention has a key head for"
            f" each of the {shown(config.get('num_attention_heads'))} query heads"
        )
    given = config.get("scoring_func"), config.get("topk_method")
    for key, value, values in zip(("scoring_func", "topk_method"), given, ROUTERS[family], strict=True):
        if value not in values:
            raise UnsupportedModel(
                f"{family} with {key}={shown(value)}: vLLM would route other than transformers; config.json must have one"
                f" of {', '.join(str(v) for v in values if v is not None)}"
            )
    common = common_settings(config)
    latent = _latent(config, common)
    same = {"head_dim": latent.key_dim, "num_query_groups": config["num_attention_heads"]}
    experts = shared_expert_settings(config, is_sigmoid=family == "deepseek_v3")
    tied = bool(config.get("tie_word_embeddings", False))
    return Architecture(family=family, tied=tied, latent=latent, **{**common, **experts, **same})


def shared_expert_settings(config: dict[str, Any], *, is_sigmoid: bool) -> dict[str, Any]:
    """Returns the Architecture keywords of routed experts beside shared ones, after dense layers. Raises UnsupportedModel."""
    family, dense, routing = (
        config["model_type"],
        config.get("first_k_dense_replace") or 0,
        _routing(config, is_sigmoid),
    )
    if dense >= config["num_hidden_layers"]:
        raise UnsupportedModel(
            f"{family} with first_k_dense_replace={dense} of {config['num_hidden_layers']} layers:"
            " a model without experts is not supported"
        )
    return {
        "ffn_hidden_size": config["moe_intermediate_size"],
        "num_experts": config["n_routed_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "num_dense_layers": dense,
        "dense_ffn_hidden_size": config["intermediate_size"] if dense else 0,
        "shared_ffn_hidden_size": config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
        "renormalise_experts": is_sigmoid,
        "routing": routing,
        "num_extra_layers": config.get("num_nextn_predict_layers") or 0,
    }


def _latent(config: dict[str, Any], common: dict[str, Any]) -> Latent:
    latent = Latent(
        kv_rank=config["kv_lora_rank"],
        rope_dim=config["qk_rope_head_dim"],
        nope_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
        q_rank=config.get("q_lora_rank"),
    )
    if common.get("rope_factor") or common.get("rope_linear_factor"):
        raise UnsupportedModel("latent attention with llama3 or linear RoPE scaling is not supported (supported: yarn)")
    if "rope_yarn" not in common:
        return latent
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    lower = scaling.get("mscale_all_dim") or 0.0
    # With one of the two, transformers takes the paper's attention factor, and vLLM one from the value that is given.
    if scaling.get("attention_factor") is not None or bool(scaling.get("mscale")) != bool(lower):
        raise UnsupportedModel(
            "latent attention with yarn RoPE scaling needs mscale and mscale_all_dim, or neither, and no attention_factor:"
            f" config.json gives mscale={shown(scaling.get('mscale'))}, mscale_all_dim={shown(lower)},"
            f" attention_factor={shown(scaling.get('attention_factor'))}"
        )
    if scaling.get("truncate", True) is not True:
        raise UnsupportedModel("latent attention with truncate=false in its yarn RoPE scaling is not supported")
    return replace(latent, logit_scale=float(lower))


def _routing(config: dict[str, Any], is_sigmoid: bool) -> Routing:
    family = config["model_type"]
    if bool(config.get("norm_topk_prob")) != is_sigmoid:
        raise UnsupportedModel(f"{family} with norm_topk_prob={shown(config.get('norm_topk_prob'))} is not supported")
    experts, per_token = config["n_routed_experts"], config["num_experts_per_tok"]
    groups, reached = config.get("n_group") or 1, config.get("topk_group") or 1
    if groups > 1 and config.get("topk_method") == "greedy":
        raise UnsupportedModel(f"{family} with topk_method=greedy and n_group={groups}: vLLM would limit the groups")
    best = 2 if is_sigmoid else 1
    if experts % groups or not 1 <= reached <= groups or per_token > reached * (experts // groups):
        raise UnsupportedModel(
            f"{family} with {experts} experts in n_group={groups}, of which topk_group={reached} are reached: a token"
            f" cannot select num_experts_per_tok={per_token} of them"
        )
    if groups > 1 and experts // groups < best:
        raise UnsupportedModel(f"{family} with n_group={groups} of {experts} experts: a group needs {best} experts")
    scale = float(config.get("routed_scaling_factor") or 1.0)
    if not 0 < scale < math.inf or per_token < 2:
        raise UnsupportedModel(
            f"{family} with routed_scaling_factor={scale:g}, num_experts_per_tok={per_token}: the first must be positive and"
            " finite, the second at least 2"
        )
    return Routing(is_sigmoid, scale, groups, reached, best)
