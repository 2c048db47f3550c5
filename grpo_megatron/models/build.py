"""From an Architecture and a layout to a Megatron-Core model that returns log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
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
from grpo_megatron.models.layers.spec import (
    GroupLimitedChoice,
    block_spec,
    choose_kernels,
    fused_without_apex,
    transformer_config,
)
from grpo_megatron.models.weights.stream import global_parameters, model_rows

# -- Log-probabilities and entropy from hidden states and this rank's rows of the output head --------------------------
#
#     logits = h W^T / T,   logprob = logits[y] - lse,   entropy = lse - sum_v p_v logits_v,   lse = logsumexp_v logits_v
#
# W is cut over tensor-parallel ranks by vocabulary rows. The vocabulary is never gathered: ranks exchange a maximum and
# three sums per token. Logits exist for `chunk` tokens at a time. The backward pass computes them again, so memory does not
# grow with tokens x vocabulary. Padded vocabulary rows are left out. The passes for old, reference and training
# log-probabilities all use this function.
#
# Gradients: d logprob / d logits_v = [v = y] - p_v,   d entropy / d logits_v = -p_v (log p_v + entropy).


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first: int,
        temperature: float,
        chunk: int,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        is_cut = dist.get_world_size(group) > 1  # gloo takes 0.1 ms for nothing
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, temperature)  # [n, v]
            top = logits.amax(dim=1) if weight.shape[0] else logits.new_full((len(logits),), -torch.inf)
            if is_cut:
                dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            logits -= top[:, None]
            at_target, _ = _local_target_logits(logits, targets[part], first)
            exp = logits.exp()
            sums = torch.stack([exp.sum(1), (exp * logits).sum(1), at_target])  # [3, n]
            if is_cut:
                dist.all_reduce(sums, group=group)
            log_z = sums[0].log()
            logprobs[part] = sums[2] - log_z
            entropy[part] = log_z - sums[1] / sums[0]
            lse[part] = top + log_z
        ctx.save_for_backward(hidden, weight, targets, entropy, lse)
        ctx.first, ctx.temperature, ctx.chunk = first, temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, entropy, lse = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if grad_logprobs is None and grad_entropy is None:
            return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logp = _logits(hidden[part], weight, ctx.temperature) - lse[part, None]  # [n, v]
            p = logp.exp()
            grad = torch.zeros_like(p)
            if grad_logprobs is not None:
                g = grad_logprobs[part]
                grad -= p * g[:, None]
                _, (rows, columns) = _local_target_logits(p, targets[part], ctx.first)
                grad[rows, columns] += g[rows]
            if grad_entropy is not None:
                grad -= grad_entropy[part, None] * p * (logp + entropy[part, None])
            grad = (grad / ctx.temperature).to(weight.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += (grad.T @ hidden[part]).float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits if temperature == 1.0 else logits / temperature


def _local_target_logits(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """[n] logits of the targets in this rank's part of the vocabulary, 0 for the others; and their (row, column) indices."""
    column = targets - first
    rows = ((column >= 0) & (column < logits.shape[1])).nonzero().squeeze(1)
    columns = column[rows]
    out = logits.new_zeros(len(logits))
    out[rows] = logits[rows, columns]
    return out, (rows, columns)


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    tp_rank: int,
    group: Any,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of `targets` and entropies [N], float32, identical on every rank of `group`.

    hidden [N, h] is whole on every rank. weight [padded vocabulary / tp, h] is this rank's part, rows in vocabulary order.
    targets [N] are in [0, vocab_size). The gradient of `hidden` is this rank's part of a sum over `group`: the caller
    reduces it (Megatron's copy or gather region does this).
    """
    first = tp_rank * weight.shape[0]
    num_real = max(0, min(weight.shape[0], vocab_size - first))
    weight = weight if num_real == len(weight) else weight[:num_real]
    return _VocabParallelLogprobs.apply(hidden, weight, targets, first, temperature, chunk, group)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Targets:
    """The work of the last stage: the log-probability of `tokens` [N] from the hidden states `state_indices` [N]."""

    state_indices: Tensor  # into this rank's tokens of the pack
    tokens: Tensor
    temperature: float
    chunk: int  # rows of logits in memory at a time


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
