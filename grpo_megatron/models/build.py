"""From an Architecture and a layout to a Megatron-Core model that returns log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from grpo_megatron.config import ConfigError, MegatronConfig
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.logprobs import vocab_parallel_logprobs
from grpo_megatron.models.precision import fp8_settings
from grpo_megatron.models.routing import GroupLimitedChoice, Routing
from grpo_megatron.models.spec import Kernels, block_spec, choose_kernels, engine_gradients
from grpo_megatron.models.transformer_fields import expert_config, latent_config, yarn_config
from grpo_megatron.models.tree_attention import TreeParams
from grpo_megatron.models.weights import global_parameters, load_hf, model_rows
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.reading import cut, shown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Targets:
    """What the last stage computes: the log-probability of `tokens` [N] from the hidden states `state_indices` [N]."""

    state_indices: Tensor  # into this rank's tokens of the pack
    tokens: Tensor
    temperature: float
    chunk: int  # rows of logits in memory at a time


@dataclass(frozen=True)
class HeadOutput:
    """What the last stage returns: log-probabilities [N] and entropies [N]. It can be unpacked like a tuple.

    A reward model returns its scores as `values`, and has no entropy. MoE layers read `output.device`.
    """

    values: Tensor
    entropy: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.entropy))

    @property
    def device(self) -> torch.device:
        return self.values.device


class LogprobModel(GPTModel):
    """GPTModel whose last stage returns a `HeadOutput` instead of logits.

    Only hidden states with a target reach the output head: prompt tokens need no product with the vocabulary.
    """

    real_vocab_size: int

    def _preprocess(self, *, position_ids: Tensor, packed_seq_params: Any, **inputs: Any) -> Any:
        """In a pack of trees, a token's angle is that of its position id. Megatron-Core takes one angle per token too."""
        outputs = super()._preprocess(position_ids=position_ids, packed_seq_params=packed_seq_params, **inputs)
        if not isinstance(packed_seq_params, TreeParams):
            return outputs
        hidden, angles, *rest = outputs  # angles [longest sequence, 1, 1, d]
        assert angles is not None, "trees need rotary embeddings outside the attention"
        return (hidden, angles[position_ids[0]], *rest)

    def _postprocess(self, hidden_states: Tensor, labels: Targets, **unused: Any) -> Any:
        """hidden_states [t (/tp under sequence parallelism), 1, h]."""
        if not self.post_process:
            return hidden_states
        # With `overlap_param_gather`, hooks before a module's forward wait for its weights. The output layer is not called.
        for hook in self.output_layer._forward_pre_hooks.values():
            hook(self.output_layer, ())
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden_states)  # backward: reduce-scatter
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)  # backward: all-reduce
        logprobs, entropy = vocab_parallel_logprobs(
            hidden.squeeze(1)[labels.state_indices],
            weight,
            labels.tokens,
            vocab_size=self.real_vocab_size,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            group=parallel_state.get_tensor_model_parallel_group(),
            temperature=labels.temperature,
            chunk=labels.chunk,
        )
        return HeadOutput(logprobs, entropy)


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
    if (
        arch.rope_yarn is not None
    ):  # the fused kernel for packed sequences would drop the attention factor without a word
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
    has_yarn_fields = arch.latent is not None
    for name, value in (yarn_config(arch.rope_yarn) if arch.rope_yarn and not has_yarn_fields else {}).items():
        setattr(config, name, value)
    return config


def _mark_parameters(model: torch.nn.Module, arch: Architecture) -> None:
    """Mark which parameters are cut over tensor-parallel ranks, and which belong to experts.

    Megatron marks cut parameters while it draws initial weights, which this project skips. Without the marks, the gradient
    norm (and so the clipping) would silently count only the first rank's shards.
    Megatron marks expert parameters under expert parallelism only. Here they are always marked. Experts then always have
    their own optimizer, and a checkpoint can be read with another ep.
    """
    rows = model_rows(arch)
    for name, parameter in global_parameters(model).items():
        row = rows.get(name)  # None for a tied head: the table has only the embedding
        if row is None or row.split_dim is not None:
            for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                if hasattr(parameter, attribute):
                    delattr(parameter, attribute)
            dim = 0 if row is None else row.split_dim
            set_tensor_model_parallel_attributes(parameter, True, dim, 1)
        if row is not None and row.expert is not None:
            parameter.allreduce = False  # type: ignore[attr-defined]


def _set_routers(model: torch.nn.Module, routing: Routing) -> None:
    """Megatron-Core's routers select experts as `routing` says, with biases in float32 in a bfloat16 model too."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()
            if routing.groups > 1:
                module.router_replay = GroupLimitedChoice(routing.best_of_group)


def build_model(
    arch: Architecture,
    megatron: MegatronConfig,
    dtype: str,
    device: Device,
    model_class: type[LogprobModel] = LogprobModel,
    *,
    has_gradients: bool = True,
) -> torch.nn.Module:
    """This rank's shard of its stage, without weights. Collective over the model-parallel ranks.

    `has_gradients` False: the model is frozen, and is never wrapped in DDP.
    """
    if arch.post_norms:  # Transformer Engine's fused modules have no place for such norms
        megatron = megatron.model_copy(update={"transformer_impl": "local"})
    kernels = choose_kernels(megatron, device, dtype, has_gradients=has_gradients)
    config = transformer_config(arch, megatron, dtype, device.is_cuda, kernels)
    ep = parallel_state.get_expert_model_parallel_world_size()
    assert ep == megatron.expert_model_parallel_size, f"the mesh was built with ep={ep}"
    cp = parallel_state.get_context_parallel_world_size()
    assert cp == megatron.context_parallel_size, f"the mesh was built with cp={cp}"
    with device.megatron(), engine_gradients(kernels):
        model = model_class(
            config=config,
            transformer_layer_spec=block_spec(config, kernels, arch),
            vocab_size=arch.padded_vocab_size(megatron.tensor_model_parallel_size),
            max_sequence_length=arch.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope" if arch.rope_yarn is None or arch.latent else "yarn",
            rotary_base=arch.rope_theta,  # type: ignore[arg-type]  # a float works, and some models need a float
            rope_scaling=arch.rope_factor is not None,
            rope_scaling_factor=arch.rope_factor or 1.0,
            seq_len_interpolation_factor=arch.rope_linear_factor,
        )
        model.real_vocab_size = arch.vocab_size
        _mark_parameters(model, arch)
        model.to(device.torch_device)
        built = Float16Module(config, model) if config.bf16 else model
        if arch.routing is not None:
            _set_routers(built, arch.routing)
        return built


def load_model(
    folder: Path,
    arch: Architecture,
    megatron: MegatronConfig,
    dtype: str,
    mesh: Mesh,
    device: Device,
    *,
    has_gradients: bool = True,
) -> torch.nn.Module:
    """This rank's shard of its stage, with the weights of a Hugging Face folder. Collective. Raises WeightsError."""
    model = build_model(arch, megatron, dtype, device, has_gradients=has_gradients)
    load_hf(model, folder, arch, mesh)
    return model
