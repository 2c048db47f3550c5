"""Layer specs: the modules and fused kernels of a layer, and the selection of experts.

There are two specs: Megatron-Core's local modules with those of modules.py, or Transformer Engine's modules.
`Kernels` selects one; no other file does.

The local spec runs anywhere, also on the CPU. The Transformer Engine spec and the fused kernels were not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from grpo_megatron.config import ConfigError, MegatronConfig
from grpo_megatron.device import Device, read_hardware
from grpo_megatron.imports import replaced
from grpo_megatron.models.architecture import Architecture, Latent, Vision, Yarn, megatron_fields
from grpo_megatron.models.layers.modules import (
    LATENT_KEYS,
    CentredRMSNorm,
    ExpertRowParallelLinear,
    GatedAttention,
    HeadsRMSNorm,
    LatentAttention,
    NormedRowParallelLinear,
    PackedAttention,
    PackedGatedDeltaNet,
    RMSNorm,
    SinkAttention,
)
from grpo_megatron.models.layers.precision import batch_invariance, fp8_settings
from grpo_megatron.transformer_engine import examine_transformer_engine, packed_attention_problem
from grpo_megatron.untrusted import cut, shown


@dataclass(frozen=True)
class Kernels:
    """The fused kernels of a rank. On the CPU there are none. A GPU uses those that are installed; none is required.

    `transformer_engine`: layers, norms, attention over packed sequences, grouped experts, the rotary embedding. `compiled`: torch
    compiles the gated activation and the residual addition. `fused_gradients`: the matrix product that computes a weight
    gradient also adds it to the float32 gradient buffer. Transformer Engine's layers do this themselves; local layers need
    Apex's `fused_weight_gradient_mlp_cuda`. `fused_head`: Triton's kernels of the output head (head_kernel.py). `reason`,
    `head_reason`: why Transformer Engine, or the fused output head, is not used.
    """

    transformer_engine: bool = False
    compiled: bool = False
    fused_gradients: bool = False
    fused_head: bool = False
    reason: str | None = field(default=None, compare=False)
    head_reason: str | None = field(default=None, compare=False)

    def settings(self) -> dict[str, bool]:
        """Returns the TransformerConfig fields. Neither spec has a separate softmax to fuse; Megatron's loss is not used."""
        return {
            "gradient_accumulation_fusion": self.fused_gradients,
            "apply_rope_fusion": self.transformer_engine,
            "bias_activation_fusion": self.compiled,
            "bias_dropout_fusion": self.compiled,
            "masked_softmax_fusion": False,
            "cross_entropy_loss_fusion": False,
            "persist_layer_norm": False,
        }

    def describe(self) -> str:
        """Returns one line for the plan and the start of a run."""
        head = "fused output head (Triton)" if self.fused_head else f"no fused output head: {self.head_reason}"
        if self.transformer_engine:
            return f"Transformer Engine's layers, with fused weight gradients; {head}"
        fused = (
            "fused weight gradients (Apex)" if self.fused_gradients else "no fused weight gradients (they need Apex)"
        )
        without = f"no Transformer Engine: {self.reason}"
        if not self.compiled:
            return f"Megatron-Core's layers; {without}"
        return f"Megatron-Core's layers; {fused}; {without}; {head}"


def choose_kernels(
    megatron: MegatronConfig, device: Device, dtype: str = "bfloat16", *, has_gradients: bool = True
) -> Kernels:
    """Chooses the installed kernels, within `actor.megatron.transformer_impl`.

    `has_gradients`: the model will have float32 gradient buffers; a frozen one has none. Raises ConfigError if Transformer
    Engine is needed and cannot be used.
    """
    reason = None
    if not device.is_cuda:
        reason = "this run is on the CPU"
    elif megatron.transformer_impl == "local":
        reason = "transformer_impl=local"
    elif dtype == "float32":
        reason = "model.dtype=float32, which its attention does not support"
    else:
        reason = examine_transformer_engine()[1] or packed_attention_problem(
            read_hardware("auto").capability, deterministic=megatron.deterministic
        )
    if reason is not None:
        for key, is_needed in (
            ("transformer_impl=transformer_engine", megatron.transformer_impl == "transformer_engine"),
            (f"fp8.recipe={megatron.fp8.recipe}", megatron.fp8.recipe is not None),
            (f"context_parallel_size={megatron.context_parallel_size}", megatron.context_parallel_size > 1),
        ):
            if is_needed:
                raise ConfigError(f"actor.megatron.{key} needs Transformer Engine on a GPU, but {reason}; leave it out")
    if not device.is_cuda:
        return Kernels(reason=reason)
    has_te = reason is None
    head_reason = None if importlib.util.find_spec("triton") is not None else "Triton is not installed"
    if not megatron.fused_head:
        head_reason = "fused_head=false"
    return Kernels(
        transformer_engine=has_te,
        compiled=True,
        fused_gradients=has_gradients and (has_te or layers._grad_accum_fusion_available),
        fused_head=head_reason is None,
        reason=reason,
        head_reason=head_reason,
    )


def fused_without_apex(kernels: Kernels) -> contextlib.AbstractContextManager[None]:
    """Lets Megatron-Core build a model with Transformer Engine's fused weight gradients where Apex is missing.

    Megatron-Core refuses `gradient_accumulation_fusion` without Apex when it builds a linear layer of its own. Beside the
    layers of Transformer Engine there is one, the output head. Its fused product is never called: `LogprobModel` computes
    the log-probabilities from its weight.
    """
    has_fusion = layers._grad_accum_fusion_available or (kernels.transformer_engine and kernels.fused_gradients)
    return replaced(layers, _grad_accum_fusion_available=has_fusion)


def block_spec(config: TransformerConfig, kernels: Kernels, arch: Architecture) -> TransformerBlockSubmodules:
    """Returns the spec of every layer of this stage and of the final norm."""
    if kernels.transformer_engine:
        assert not arch.local_reason, "checks refuse it"
        from megatron.core.extensions.transformer_engine import TENorm

        return _block(config, _te_layer, TENorm)
    norm = CentredRMSNorm if arch.centred_norms else RMSNorm
    make = _post_norm_layer if arch.post_norms else _sandwich_layer if arch.sandwich_norms else _local_layer
    return _block(config, make, norm)


def _sandwich_layer(config: TransformerConfig, num_experts: int | None, is_linear: bool) -> ModuleSpec:
    """Returns the spec of a layer that has norms before and after attention and MLP."""
    layer = _local_layer(config, num_experts, is_linear)
    parts = layer.submodules
    parts.self_attention.submodules.linear_proj = parts.mlp.submodules.linear_fc2 = NormedRowParallelLinear
    return layer


def _post_norm_layer(config: TransformerConfig, num_experts: int | None, is_linear: bool) -> ModuleSpec:
    """Returns the spec of a layer whose norms follow attention and MLP."""
    assert not is_linear
    layer = _sandwich_layer(config, num_experts, is_linear)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    parts.sharded_state_dict_keys_map = {}
    attention = parts.self_attention.submodules
    attention.q_layernorm = ModuleSpec(HeadsRMSNorm, params={"num_heads": config.num_attention_heads})
    attention.k_layernorm = ModuleSpec(HeadsRMSNorm, params={"num_heads": config.num_query_groups})
    return layer


def _local_layer(config: TransformerConfig, num_experts: int | None, is_linear: bool) -> ModuleSpec:
    """Returns the spec of one layer, with `num_experts` experts, or None for an MLP. `is_linear`: with a gated delta net."""
    norm = CentredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,  # off: one MLP per expert
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    attention = parts.self_attention.submodules
    attention.core_attention = SinkAttention if config.softmax_type == "learnable" else PackedAttention
    if config.multi_latent_attention:
        parts.self_attention.module = LatentAttention
        latents = parts.self_attention.submodules
        latents.q_layernorm = latents.kv_layernorm = RMSNorm
        parts.sharded_state_dict_keys_map = dict(LATENT_KEYS)
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    if is_linear:
        linear = {"in_proj": ColumnParallelLinear, "out_norm": RMSNorm, "out_proj": RowParallelLinear}
        parts.self_attention = ModuleSpec(PackedGatedDeltaNet, submodules=GatedDeltaNetSubmodules(**linear))
    elif config.attention_output_gate:
        parts.self_attention.module = GatedAttention
    # In a checkpoint of the Transformer Engine spec, the norm before the experts is not fused into a linear layer, and keeps
    # its own name. Keep the same name here, so that either spec reads the other's checkpoints.
    if num_experts and config.add_bias_linear:
        parts.mlp.submodules.experts.submodules.linear_fc2 = ExpertRowParallelLinear
    if num_experts:
        parts.sharded_state_dict_keys_map = {
            name: saved for name, saved in parts.sharded_state_dict_keys_map.items() if name != "pre_mlp_layernorm."
        }
    return layer


def _te_layer(config: TransformerConfig, num_experts: int | None, is_linear: bool) -> ModuleSpec:
    """Returns Transformer Engine's: fused norms, attention over packed sequences, FP8 layers. Not run on a GPU yet."""
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )


def _block(
    config: TransformerConfig, make_layer: Callable[[TransformerConfig, int | None, bool], ModuleSpec], norm: type
) -> TransformerBlockSubmodules:
    """Returns the layers of this stage. `config.moe_layer_freq` is 1, or has 0 for each layer with an MLP instead of experts.

    `config.linear_attention_freq` is None, or has 1 for each layer with a gated delta net.
    """
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    first, count = get_transformer_layer_offset(config), get_num_layers_to_build(config)
    has_experts = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * config.num_layers
    linear = config.linear_attention_freq or [0] * config.num_layers
    kinds = [
        (config.num_moe_experts if f else None, bool(is_linear))
        for f, is_linear in zip(has_experts, linear, strict=True)
    ]
    made = {kind: make_layer(config, *kind) for kind in set(kinds)}
    return TransformerBlockSubmodules(
        layer_specs=[made[kind] for kind in kinds[first : first + count]], layer_norm=norm
    )


class GroupLimitedChoice:
    """Selects experts within a token's best groups. It has the interface of Megatron-Core's `RouterReplay`.

    Megatron-Core's own selection adds up the best topk // groups_per_token experts of a group. For DeepSeek-V2 (6 of 3
    groups) these are two, where the model was trained with one.
    """

    def __init__(self, best_of_group: int) -> None:
        self._best_of_group = best_of_group

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, default: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Selects from scores [t, E]: (scores [t, topk], experts [t, topk])."""
        grouped = scores.view(len(scores), num_groups, -1)  # [t, groups, E / groups]
        group_scores = grouped.topk(self._best_of_group, dim=-1).values.sum(dim=-1)  # [t, groups]
        best = group_scores.topk(group_topk, dim=-1, sorted=False).indices  # [t, groups_per_token]
        is_out = group_scores.new_ones(group_scores.shape).scatter(1, best, 0).bool().unsqueeze(-1)  # [t, groups, 1]
        values, experts = grouped.masked_fill(is_out, float("-inf")).flatten(1).topk(topk, dim=-1)
        return values, experts


# -- TransformerConfig -------------------------------------------------------------------------------------------------


def yarn_config(yarn: Yarn) -> dict[str, Any]:
    """Returns the attributes that Megatron-Core's YaRN reads from a TransformerConfig. The class has no fields for them."""
    return {
        "yarn_rotary_scaling_factor": yarn.factor,
        "yarn_original_max_position_embeddings": yarn.original_length,
        "yarn_beta_fast": yarn.beta_fast,
        "yarn_beta_slow": yarn.beta_slow,
        "yarn_mscale": yarn.log_scale(),
        "yarn_mscale_all_dim": 0.0,  # the attention factor is (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ... + 1)
        "yarn_correction_range_round_to_int": yarn.truncate,
    }


def expert_config(arch: Architecture, kernels: Kernels) -> dict[str, Any]:
    """Returns the fields of the router and its experts. No token is dropped. Nothing is added to the loss.

    Transformer Engine multiplies all experts of a rank in one call. Without it, Megatron-Core has one MLP per expert. The
    parameters are one per expert in either form, and either form reads the other's checkpoints.
    """
    return {
        "num_moe_experts": arch.num_experts,
        "moe_router_dtype": "fp32",
        "moe_router_bias_update_rate": 0.0,
        "moe_grouped_gemm": kernels.transformer_engine,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def latent_config(arch: Architecture, latent: Latent) -> dict[str, Any]:
    """Returns the fields of MLATransformerConfig alone. Its YaRN has fields of its own, and scales the logits too."""
    fields: dict[str, Any] = {
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


def mrope_chunks(vision: Vision) -> list[int]:
    """Returns sizes of chunks of half a head's angles. Megatron-Core's chunk i turns with the axis i % 3: time, row, column.

    Qwen3-VL's angle j turns with the axis j % 3 while that has angles left in its section, then with the time. Chunks of size 0
    skip an axis.
    """
    if not vision.positions:
        return list(vision.sections)
    chunks: list[int] = []
    for angle in range(sum(vision.sections)):
        axis = angle % 3 if angle < 3 * vision.sections[angle % 3] else 0
        chunks += [0] * ((axis - len(chunks)) % 3) + [1]
    return chunks + [0] * (-len(chunks) % 3)


gelu_tanh = functools.partial(F.gelu, approximate="tanh")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    arch: Architecture, megatron: MegatronConfig, dtype: str, on_cuda: bool, kernels: Kernels | None = None
) -> TransformerConfig:
    """Returns every TransformerConfig field that this project decides. `override_transformer_config` is applied last.

    `kernels` None: no fused kernels. Raises ConfigError for a value that Megatron-Core refuses.
    """
    torch_dtype = DTYPES[dtype]
    kernels = kernels or Kernels()
    settings: dict[str, Any] = {
        **megatron_fields(arch),
        "layernorm_epsilon": arch.norm_eps,
        "gated_linear_unit": True,
        "activation_func": gelu_tanh if arch.gelu else quick_gelu if arch.swiglu_limit else F.silu,
        "softmax_scale": arch.query_scalar and arch.query_scalar**-0.5,
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
        "deterministic_mode": megatron.deterministic,
        "transformer_impl": "transformer_engine" if kernels.transformer_engine else "local",
        **kernels.settings(),
        **fp8_settings(megatron.fp8),
        **(batch_invariance() if megatron.batch_invariant else {}),
        **(expert_config(arch, kernels) if arch.num_experts else {}),
        **(latent_config(arch, arch.latent) if arch.latent else {}),
        **megatron.override_transformer_config,
    }
    if arch.gelu:  # the fused kernels are of other activations
        settings["bias_activation_fusion"] = False
    if arch.rope_yarn is not None:  # the fused kernel for packed sequences would silently drop the attention factor
        settings["apply_rope_fusion"] = False
    if arch.vision is not None:  # as would the kernel for the angles of rows and columns
        settings |= {"apply_rope_fusion": False, "mrope_section": mrope_chunks(arch.vision)}
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
    # Megatron-Core refuses experts with biases under tensor parallelism. `ExpertRowParallelLinear` adds them once.
    config.add_bias_linear = arch.linear_bias
    if arch.rope_yarn is not None and arch.latent is None:  # MLATransformerConfig has fields for it
        for name, value in yarn_config(arch.rope_yarn).items():
            setattr(config, name, value)
    return config
