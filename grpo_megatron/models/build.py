"""From an Architecture and a layout to a Megatron-Core model that returns log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from grpo_megatron.config import MegatronConfig
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture, Routing
from grpo_megatron.models.layers.modules import TreeParams
from grpo_megatron.models.layers.spec import GroupLimitedChoice, block_spec, choose_kernels, fused_without_apex
from grpo_megatron.models.layers.transformer_config import transformer_config
from grpo_megatron.models.logprobs import vocab_parallel_logprobs
from grpo_megatron.models.packing import Targets
from grpo_megatron.models.weights.load import global_parameters, load_hf, model_rows
from grpo_megatron.parallel.mesh import Mesh


@dataclass(frozen=True)
class HeadOutput:
    """The output of the last stage: log-probabilities [N] and entropies [N]. It can be unpacked like a tuple.

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
        """Takes a token's angle from its position id in a pack of trees, where Megatron-Core would take it from its place."""
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
    with device.megatron(), fused_without_apex(kernels):
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
