"""Layer specs: the modules and fused kernels of a layer.

There are two specs: Megatron-Core's local modules with this file's norm and attention, or Transformer Engine's modules.
`Kernels` selects one; no other file does.

The local spec runs anywhere, also on the CPU. The Transformer Engine spec and the fused kernels were not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from grpo_megatron.config import ConfigError, MegatronConfig
from grpo_megatron.device import Device
from grpo_megatron.extensions import examine_engine
from grpo_megatron.models.tree_attention import TreeParams, tree_attention


@dataclass(frozen=True)
class Kernels:
    """The fused kernels of a rank. On the CPU there are none. A GPU uses those that are installed; none is required.

    `transformer_engine`: layers, norms, attention over packed sequences and the rotary embedding. `compiled`: torch
    compiles the gated activation and the residual addition. `fused_gradients`: the matrix product that computes a weight
    gradient also adds it to the float32 gradient buffer. Transformer Engine's layers do this themselves; local layers need
    Apex's `fused_weight_gradient_mlp_cuda`. `reason`: why Transformer Engine is not used.
    """

    transformer_engine: bool = False
    compiled: bool = False
    fused_gradients: bool = False
    reason: str | None = field(default=None, compare=False)

    def settings(self) -> dict[str, bool]:
        """TransformerConfig fields. Neither spec's attention has a separate softmax to fuse; Megatron's loss is not used."""
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
        """One line for the plan and the start of a run."""
        if self.transformer_engine:
            return "Transformer Engine's layers, with fused weight gradients"
        fused = (
            "fused weight gradients (Apex)" if self.fused_gradients else "no fused weight gradients (they need Apex)"
        )
        without = f"no Transformer Engine: {self.reason}"
        return f"Megatron-Core's layers; {fused}; {without}" if self.compiled else f"Megatron-Core's layers; {without}"


def choose_kernels(
    megatron: MegatronConfig, device: Device, dtype: str = "bfloat16", *, has_gradients: bool = True
) -> Kernels:
    """The installed kernels, within `actor.megatron.transformer_impl`. Raises ConfigError if Transformer Engine is needed
    and cannot be used. `has_gradients`: the model will have float32 gradient buffers; a frozen one has none."""
    reason = None
    if not device.is_cuda:
        reason = "this run is on the CPU"
    elif megatron.transformer_impl == "local":
        reason = "transformer_impl=local"
    elif dtype == "float32":
        reason = "model.dtype=float32, which its attention does not support"
    else:
        reason = examine_engine()[1]
    if reason is not None:
        _require_none(megatron, reason)
    if not device.is_cuda:
        return Kernels(reason=reason)
    has_engine = reason is None
    return Kernels(
        transformer_engine=has_engine,
        compiled=True,
        fused_gradients=has_gradients and (has_engine or layers._grad_accum_fusion_available),
        reason=reason,
    )


def _require_none(megatron: MegatronConfig, reason: str) -> None:
    """Raise ConfigError with the key if the config needs Transformer Engine."""
    needed = {
        "transformer_impl=transformer_engine": megatron.transformer_impl == "transformer_engine",
        f"fp8.recipe={megatron.fp8.recipe}": megatron.fp8.recipe is not None,
        f"context_parallel_size={megatron.context_parallel_size}": megatron.context_parallel_size > 1,
    }
    for key, is_needed in needed.items():
        if is_needed:
            raise ConfigError(f"actor.megatron.{key} needs Transformer Engine on a GPU, but {reason}; leave it out")


@contextlib.contextmanager
def engine_gradients(kernels: Kernels) -> Iterator[None]:
    """Build a model with Transformer Engine's fused weight gradients where Apex is missing.

    Megatron-Core refuses `gradient_accumulation_fusion` without Apex when it builds a linear layer of its own. Beside the
    layers of Transformer Engine there is one, the output head. Its fused product is never called: `LogprobModel` computes
    the log-probabilities from its weight.
    """
    has_fusion = layers._grad_accum_fusion_available or (kernels.transformer_engine and kernels.fused_gradients)
    with mock.patch.object(layers, "_grad_accum_fusion_available", has_fusion):
        yield


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv:1910.07467) in float32. Megatron's wrapper of torch's norm refuses sequence parallelism.

    The weight's attribute `sequence_parallel` makes Megatron sum its gradient over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype) * self.weight


class PackedAttention(torch.nn.Module):
    """Causal grouped-query attention over packed sequences, one fused kernel call per sequence.

    torch's scaled_dot_product_attention never materialises the [S, S] attention scores. Each sequence is computed alone, so
    nothing is computed between two sequences or for padding between them. Megatron's DotProductAttention materialises the
    scores, computes padding and refuses packed sequences.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams,
        **kwargs: Any,
    ) -> Tensor:
        """query [t, H, d], key and value [t, G, d], all sequences end to end -> [t, H, d]."""
        if isinstance(packed_seq_params, TreeParams):
            return tree_attention(query, key, value, packed_seq_params.branches)
        cuts = packed_seq_params.cu_seqlens_q
        lengths = (cuts[1:] - cuts[:-1]).tolist()
        out = []
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        for q, k, v in parts:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H or G, s, d]
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            out.append(o.squeeze(0).transpose(0, 1))  # [s, H, d]
        return torch.cat(out)


def block_spec(config: TransformerConfig, kernels: Kernels) -> TransformerBlockSubmodules:
    """The spec of every layer of this stage and of the final norm."""
    return te_block_spec(config) if kernels.transformer_engine else local_block_spec(config)


def local_block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The spec with Megatron-Core's local modules."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,  # off unless overridden: one MLP per expert
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    # In a checkpoint of the Transformer Engine spec, the norm before the experts is not fused into a linear layer, and keeps
    # its own name. Keep the same name here, so that either spec reads the other's checkpoints.
    if config.num_moe_experts:
        parts.sharded_state_dict_keys_map = {
            name: saved for name, saved in parts.sharded_state_dict_keys_map.items() if name != "pre_mlp_layernorm."
        }
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return _block(layer, config, RMSNorm)


def te_block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The spec with Transformer Engine: fused norms, attention over packed sequences, FP8 linear layers. Not run on a GPU yet."""
    from megatron.core.extensions.transformer_engine import TENorm

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    return _block(layer, config, TENorm)


def _block(layer: ModuleSpec, config: TransformerConfig, norm: type) -> TransformerBlockSubmodules:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=norm)
