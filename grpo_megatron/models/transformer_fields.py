"""Fields of Megatron-Core's TransformerConfig that describe RoPE scaling, experts, routing and latent attention."""

from __future__ import annotations

import math
from typing import Any

from grpo_megatron.models.architecture import Architecture, Yarn
from grpo_megatron.models.latent import Latent
from grpo_megatron.models.routing import Routing


def yarn_config(yarn: Yarn) -> dict[str, Any]:
    """What Megatron-Core's YaRN reads from a TransformerConfig. The class has no fields for it."""
    return {
        "yarn_rotary_scaling_factor": yarn.factor,
        "yarn_original_max_position_embeddings": yarn.original_length,
        "yarn_beta_fast": yarn.beta_fast,
        "yarn_beta_slow": yarn.beta_slow,
        "yarn_mscale": yarn.log_scale(),
        "yarn_mscale_all_dim": 0.0,  # the attention factor is (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ... + 1)
        "yarn_correction_range_round_to_int": yarn.truncate,
    }


def expert_config(arch: Architecture) -> dict[str, Any]:
    """TransformerConfig fields of the router and its experts. No token is dropped. Nothing is added to the loss."""
    return {
        "num_moe_experts": arch.num_experts,
        "moe_ffn_hidden_size": arch.ffn_hidden_size,
        "moe_router_topk": arch.experts_per_token,
        # A softmax over the selected logits equals the softmax over all, renormalised over the selected.
        "moe_router_pre_softmax": not arch.renormalise_experts,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        **(routing_config(arch, arch.routing) if arch.routing else {}),
    }


def routing_config(arch: Architecture, routing: Routing) -> dict[str, Any]:
    """TransformerConfig fields of DeepSeek's routers, shared experts and first layers."""
    first = arch.num_dense_layers
    return {
        "ffn_hidden_size": arch.dense_ffn_hidden_size or arch.ffn_hidden_size,
        "moe_layer_freq": [int(layer >= first) for layer in range(arch.num_layers)] if first else 1,
        "moe_shared_expert_intermediate_size": arch.shared_ffn_hidden_size or None,
        "moe_router_score_function": "sigmoid" if routing.is_sigmoid else "softmax",
        "moe_router_enable_expert_bias": routing.is_sigmoid,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": routing.scale,
        "moe_router_num_groups": routing.groups if routing.groups > 1 else None,
        "moe_router_group_topk": routing.groups_per_token if routing.groups > 1 else None,
    }


def latent_config(arch: Architecture, latent: Latent) -> dict[str, Any]:
    """MLATransformerConfig fields. Its YaRN has fields of its own, and scales the logits too."""
    fields: dict[str, Any] = {
        "qk_layernorm": True,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": arch.rope_theta,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "apply_rope_fusion": False,
    }
    if (yarn := arch.rope_yarn) is None:
        return fields
    step = 0.1 * math.log(yarn.factor)
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        # The attention factor is (step mscale + 1) / (step mscale_all_dim + 1).
        "mscale": (yarn.attention_factor * (step * latent.logit_scale + 1) - 1) / step,
        "mscale_all_dim": latent.logit_scale,
    }
