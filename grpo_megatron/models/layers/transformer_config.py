"""Fields of Megatron-Core's TransformerConfig that describe RoPE scaling, experts, routing and latent attention."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from grpo_megatron.config import ConfigError, MegatronConfig
from grpo_megatron.models.architecture import Architecture, Latent, Routing, Yarn
from grpo_megatron.models.layers.precision import fp8_settings
from grpo_megatron.models.layers.spec import Kernels
from grpo_megatron.reading import cut, shown


def yarn_config(yarn: Yarn) -> dict[str, Any]:
    """The attributes that Megatron-Core's YaRN reads from a TransformerConfig. The class has no fields for them."""
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


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    arch: Architecture, megatron: MegatronConfig, dtype: str, on_cuda: bool, kernels: Kernels | None = None
) -> TransformerConfig:
    """Every TransformerConfig field that this project decides. `override_transformer_config` is applied last.

    `kernels` None: no fused kernels. Raises ConfigError for a value that Megatron-Core refuses.
    """
    torch_dtype = DTYPES[dtype]
    kernels = kernels or Kernels()
    settings: dict[str, Any] = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.ffn_hidden_size,
        "num_attention_heads": arch.num_attention_heads,
        "num_query_groups": arch.num_query_groups,
        "kv_channels": arch.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_eps,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "qk_layernorm": arch.qk_norm,
        "hidden_dropout": 0.0,  # with dropout a policy would differ from its own rollouts
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "context_parallel_size": megatron.context_parallel_size,
        "sequence_parallel": megatron.use_sequence_parallel,
        "params_dtype": torch_dtype,
        "pipeline_dtype": torch_dtype,
        "bf16": dtype == "bfloat16",
        "perform_initialization": False,  # weights are always loaded
        "use_cpu_initialization": not on_cuda,
        "calculate_per_token_loss": True,  # sum only: the token weights contain every denominator
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # required by variable_seq_lengths, even for dense models
        "deallocate_pipeline_outputs": True,
        "batch_p2p_comm": on_cuda,
        "transformer_impl": "transformer_engine" if kernels.transformer_engine else "local",
        **kernels.settings(),
        **fp8_settings(megatron.fp8),
        **(expert_config(arch) if arch.num_experts else {}),
        **(latent_config(arch, arch.latent) if arch.latent else {}),
        **megatron.override_transformer_config,
    }
    if arch.rope_yarn is not None:  # the fused kernel for packed sequences would silently drop the attention factor
        settings["apply_rope_fusion"] = False
    try:
        config = (MLATransformerConfig if arch.latent else TransformerConfig)(**settings)
    except Exception as error:
        given = megatron.override_transformer_config
        if not given:
            raise
        reason = cut(f"{type(error).__name__}: {error}".replace("\n", " "), 500)
        raise ConfigError(
            f"actor.megatron.override_transformer_config={shown(given)}: Megatron-Core refuses it ({reason}); correct it,"
            " or leave it out"
        ) from error
    if arch.rope_yarn is not None and arch.latent is None:  # MLATransformerConfig has fields for it
        for name, value in yarn_config(arch.rope_yarn).items():
            setattr(config, name, value)
    return config
