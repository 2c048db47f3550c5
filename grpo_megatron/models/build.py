"""From an Architecture and a layout to a Megatron-Core model that returns log-probabilities of tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from grpo_megatron.config import MegatronConfig
from grpo_megatron.device import Device
from grpo_megatron.exact import layers as exact
from grpo_megatron.models.architecture import Architecture, Routing
from grpo_megatron.models.layers.divergence import SoftTargets, vocab_parallel_divergence, vocab_parallel_top
from grpo_megatron.models.layers.head import KeptTargets, vocab_parallel_logprobs, vocab_parallel_squares
from grpo_megatron.models.layers.modules import PackedAttention, RMSNorm, TreeParams
from grpo_megatron.models.layers.spec import (
    GroupLimitedChoice,
    block_spec,
    choose_kernels,
    fused_without_apex,
    transformer_config,
)
from grpo_megatron.models.vision import Features, add_level, build_tower, with_images
from grpo_megatron.models.weights.stream import global_parameters, model_rows


@dataclass(frozen=True)
class Targets:
    """The work of the last stage: the log-probability of `tokens` [N] from the hidden states `state_indices` [N].

    `soft`: and the divergence from teachers. `top_k`: the model is a teacher itself. It also returns the `top_k` best ids
    below `num_ids` of each target, or, for 0, the hidden states (layers/divergence.py).
    """

    state_indices: Tensor  # into this rank's tokens of the pack
    tokens: Tensor
    temperature: float
    chunk: int  # rows of logits in memory at a time
    soft: SoftTargets | None = None
    top_k: int | None = None
    num_ids: int = 0
    has_squares: bool = False  # returns the sum of the squared probabilities, too
    kept: KeptTargets | None = None  # the ids that each target was sampled from


@dataclass(frozen=True)
class HeadOutput:
    """The output of the last stage: log-probabilities [N] and entropies [N]. It can be unpacked like a tuple.

    A reward model returns its scores as `values`, and has no entropy. MoE layers read `output.device`. `others` are divergence
    and agreement with teachers [N], or a teacher's distribution [N, ...].
    """

    values: Tensor
    entropy: Tensor
    others: tuple[Tensor, ...] = ()

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.entropy, *self.others))

    @property
    def device(self) -> torch.device:
        return self.values.device


class LogprobModel(GPTModel):
    """GPTModel whose last stage returns a `HeadOutput` instead of logits.

    Only hidden states with a target reach the output head: prompt tokens need no product with the vocabulary.
    """

    real_vocab_size: int
    has_fused_head: bool
    is_exact: bool  # `model.exact`
    features: Features | None = None  # of `visual`, the vision tower, on the first stage of a model that has one

    def _preprocess(self, *, position_ids: Tensor, packed_seq_params: Any, **inputs: Any) -> Any:
        """Puts images in their places. Takes a token's angle from its position id in a pack of trees, where Megatron-Core
        would take it from its place; with M-RoPE it takes all angles from position ids."""
        if self.features is not None:
            embeddings = self.embedding(input_ids=inputs["input_ids"], position_ids=None)
            is_cut, placed = self.config.sequence_parallel, packed_seq_params.images
            inputs["decoder_input"], levels = with_images(embeddings, placed, self.visual, self.features, is_cut=is_cut)
            packed_seq_params.levels = levels
        outputs = super()._preprocess(position_ids=position_ids, packed_seq_params=packed_seq_params, **inputs)
        if not isinstance(packed_seq_params, TreeParams) or position_ids.dim() == 3:
            return outputs
        hidden, angles, *rest = outputs  # angles [longest sequence, 1, 1, d]
        assert angles is not None, "trees need rotary embeddings outside the attention"
        return (hidden, angles[position_ids[0]], *rest)

    def _postprocess(self, hidden_states: Tensor, labels: Targets, **unused: Any) -> Any:
        """Computes the output from hidden_states [t (/tp under sequence parallelism), 1, h]."""
        if self.features is not None and not torch.is_grad_enabled():
            unused["packed_seq_params"].levels = []  # frees them: no layer is recomputed
        if not self.post_process:
            return hidden_states
        # With `overlap_param_gather`, hooks before a module's forward wait for its weights. The output layer is not called.
        for hook in self.output_layer._forward_pre_hooks.values():
            hook(self.output_layer, ())
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        sizes: dict[str, Any] = {"vocab_size": self.real_vocab_size, "temperature": labels.temperature}
        sizes |= {"chunk": labels.chunk, "group": parallel_state.get_tensor_model_parallel_group()}
        sizes["tp_rank"] = parallel_state.get_tensor_model_parallel_rank()
        if self.is_exact:
            assert labels.soft is None and labels.top_k is None, "checks refuse it"
            hidden = exact.whole_sequence(hidden_states, self.config.sequence_parallel)
            states = hidden.squeeze(1)[labels.state_indices]
            return HeadOutput(*exact.exact_logprobs(states, weight, labels.tokens, labels.kept, **sizes))
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden_states)  # backward: reduce-scatter
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)  # backward: all-reduce
        states = hidden.squeeze(1)[labels.state_indices]
        if labels.soft is not None:
            logprobs, entropy, *others = vocab_parallel_divergence(states, weight, labels.tokens, labels.soft, **sizes)
            return HeadOutput(logprobs, entropy, tuple(others))
        if labels.top_k:
            logprobs, entropy, top = vocab_parallel_top(
                states, weight, labels.tokens, labels.top_k, labels.num_ids, **sizes
            )
            return HeadOutput(logprobs, entropy, (top,))
        sizes["kept"] = labels.kept
        numbers = vocab_parallel_logprobs(states, weight, labels.tokens, is_fused=self.has_fused_head, **sizes)
        if labels.has_squares:
            return HeadOutput(*numbers, (vocab_parallel_squares(states, weight, **sizes),))
        return HeadOutput(*numbers, (states,) if labels.top_k == 0 else ())


def _mark_parameters(model: torch.nn.Module, arch: Architecture) -> None:
    """Mark which parameters are cut over tensor-parallel ranks, and which belong to experts.

    Megatron marks cut parameters while it samples initial weights, which this project skips. Without the marks, the gradient
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
    """Makes Megatron-Core's routers select experts as `routing` says, with float32 biases in a bfloat16 model too."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()
            if routing.groups > 1:
                module.router_replay = GroupLimitedChoice(routing.best_of_group)


def _positions(arch: Architecture) -> str:
    if arch.vision is not None:
        return "mrope"
    return "rope" if arch.rope_yarn is None or arch.latent else "yarn"


def _add_local_angles(model: LogprobModel, arch: Architecture, theta: float) -> None:
    """Gives layers with a window angles of the base `theta`: the angles of both bases, behind each other, go to all layers."""
    config = model.config
    rotary = RotaryEmbedding(
        config.kv_channels, 1.0, rotary_base=theta, use_cpu_initialization=config.use_cpu_initialization
    )  # type: ignore[arg-type]

    def with_local(module: Any, arguments: Any, options: Any, angles: Tensor) -> Tensor:
        return torch.cat([angles, rotary(*arguments, **options)], -1)

    def select(part: int, module: Any, arguments: Any, options: Any) -> Any:
        return arguments, {**options, "rotary_pos_emb": options["rotary_pos_emb"].chunk(2, -1)[part]}

    model.rotary_pos_emb.register_forward_hook(with_local, with_kwargs=True)
    for layer in model.decoder.layers:
        hook = functools.partial(select, int(arch.window_of(layer.layer_number - 1) is not None))
        layer.self_attention.register_forward_pre_hook(hook, with_kwargs=True)


def build_model(
    arch: Architecture,
    megatron: MegatronConfig,
    dtype: str,
    device: Device,
    model_class: type[LogprobModel] = LogprobModel,
    *,
    has_gradients: bool = True,
    is_exact: bool = False,
) -> torch.nn.Module:
    """Builds this rank's shard of its stage, without weights. Collective over the model-parallel ranks.

    `has_gradients` False: the model is frozen, and is never wrapped in DDP. `is_exact`: see layers/exact.py.
    """
    if arch.local_reason:
        megatron = megatron.model_copy(update={"transformer_impl": "local"})
    kernels = choose_kernels(megatron, device, dtype, has_gradients=has_gradients)
    config = transformer_config(arch, megatron, dtype, device.is_cuda, kernels)
    ep = parallel_state.get_expert_model_parallel_world_size()
    assert ep == megatron.expert_model_parallel_size, f"the mesh was built with ep={ep}"
    cp = parallel_state.get_context_parallel_world_size()
    assert cp == megatron.context_parallel_size, f"the mesh was built with cp={cp}"
    # torch samples the initial weights of a convolution.
    with device.megatron(), fused_without_apex(kernels), device.preserve_rng() if arch.delta else nullcontext():
        model = model_class(
            config=config,
            transformer_layer_spec=block_spec(config, kernels, arch),
            vocab_size=arch.padded_vocab_size(megatron.tensor_model_parallel_size),
            max_sequence_length=arch.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type=_positions(arch),
            scatter_embedding_sequence_parallel=arch.vision is None,  # images come before
            rotary_percent=arch.rotary_share,
            rotary_base=arch.rope_theta,  # type: ignore[arg-type]  # a float works, and some models need a float
            rope_scaling=arch.rope_factor is not None,
            rope_scaling_factor=arch.rope_factor or 1.0,
            seq_len_interpolation_factor=arch.rope_linear_factor,
        )
        model.real_vocab_size, model.has_fused_head, model.is_exact = arch.vocab_size, kernels.fused_head, is_exact
        if arch.scaled_embedding and model.pre_process:
            scale = torch.tensor(arch.hidden_size**0.5, dtype=config.params_dtype).item()
            model.embedding.register_forward_hook(lambda module, inputs, output: output * scale)
        if arch.local_rope_theta is not None:
            _add_local_angles(model, arch, arch.local_rope_theta)
        if is_exact:
            exact.make_exact(model.decoder, RMSNorm, PackedAttention)
        if arch.vision is not None and model.pre_process:
            recomputes = config.recompute_granularity == "full"
            with device.preserve_rng():  # torch samples initial weights
                parts = arch.vision, arch.hidden_size, config.params_dtype, device.torch_device
                model.visual = build_tower(*parts, recomputes=recomputes)
            model.features = Features(arch.vision, config.params_dtype)
            layers = model.decoder.layers
            assert arch.vision.levels <= len(layers), "checks refuse it: DeepStack reaches beyond the first stage"
            for index in range(arch.vision.levels):
                layers[index].register_forward_hook(functools.partial(add_level, index), with_kwargs=True)
        _mark_parameters(model, arch)
        model.to(device.torch_device)
        built = Float16Module(config, model) if config.bf16 else model
        if arch.routing is not None:
            _set_routers(built, arch.routing)
        return built
