"""From an Architecture and a layout to a Megatron-Core model that returns log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from grpo_megatron.exact import layers as exact
from grpo_megatron.models.architecture import Architecture, Routing
from grpo_megatron.models.layers.modules import PackedAttention, RMSNorm, TreeParams
from grpo_megatron.models.layers.spec import (
    GroupLimitedChoice,
    block_spec,
    choose_kernels,
    fused_without_apex,
    transformer_config,
)
from grpo_megatron.models.vision import Features, build_tower, with_images
from grpo_megatron.models.weights.stream import global_parameters, model_rows
from grpo_megatron.shapes import Float, Int

# -- Log-probabilities and entropy from hidden states and this rank's rows of the output head --------------------------
#
#     logits = h W^T / T,   logprob = logits[y] - lse,   entropy = lse - sum_v p_v logits_v,   lse = logsumexp_v logits_v
#
# W is cut over tensor-parallel ranks by vocabulary rows. The vocabulary is never gathered: ranks exchange a maximum and
# three sums per token. Logits exist for `chunk` tokens at a time. The backward pass computes them again, so memory does not
# grow with tokens x vocabulary. Padded vocabulary rows are left out. The passes for old, reference and training
# log-probabilities all use this function. On the CPU torch computes the sums and the gradient of the logits, in about 11
# and 16 passes over float32 logits; on CUDA the kernels of layers/head_kernel.py do, in one pass each.
#
# Gradients: d logprob / d logits_v = [v = y] - p_v,   d entropy / d logits_v = -p_v (log p_v + entropy).
#
# Chunks of the weight's gradient are summed in float32. Of a bfloat16 weight under Megatron's DDP the sum is its `main_grad`,
# over all micro-batches; elsewhere it is rounded once per micro-batch. A float32 weight's needs no rounding.


class _ChunkResults(NamedTuple):
    """The inputs of the gradient of a chunk's logits, each [n]: targets' columns, results, gradients of the results."""

    columns: Tensor
    entropy: Tensor
    lse: Tensor
    grad_logprobs: Tensor | None
    grad_entropy: Tensor | None


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        columns: Tensor,
        temperature: float,
        chunk: int,
        group: Any,
        is_fused: bool,
        num_rows: int,
    ) -> tuple[Tensor, Tensor]:
        rows = weight[:num_rows]  # without the padding
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        sums_of = _fused_sums if is_fused else _sums
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            top, sums = sums_of(hidden[part], rows, columns[part], temperature, group)
            _all_reduce(sums, dist.ReduceOp.SUM, group)
            log_z = sums[0].log()
            logprobs[part] = sums[2] - log_z
            entropy[part] = log_z - sums[1] / sums[0]
            lse[part] = top + log_z
        ctx.save_for_backward(hidden, weight, columns, entropy, lse)
        ctx.temperature, ctx.chunk, ctx.is_fused, ctx.num_rows = temperature, chunk, is_fused, num_rows
        is_added = ctx.needs_input_grad[1] and weight.dtype != torch.float32 and hasattr(weight, "main_grad")
        ctx.parameter = weight if is_added else None
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, *saved = ctx.saved_tensors
        rows, parameter = weight[: ctx.num_rows], ctx.parameter
        grad_hidden, grad_weight = torch.zeros_like(hidden), None
        if ctx.needs_input_grad[1]:
            grad_weight = (
                parameter.main_grad if parameter is not None else torch.zeros_like(weight, dtype=torch.float32)
            )
        gradient = _fused_gradient if ctx.is_fused else _gradient
        for start in range(0, len(hidden) if any(grad is not None for grad in grads) else 0, ctx.chunk):
            part = slice(start, start + ctx.chunk)
            given: list[Any] = [None if tensor is None else tensor[part] for tensor in (*saved, *grads)]
            grad = gradient(hidden[part], rows, ctx.temperature, _ChunkResults(*given))  # [n, v]
            grad_hidden[part] = grad @ rows
            if grad_weight is not None:
                _add_weight_gradient(grad_weight[: ctx.num_rows], grad, hidden[part])
            del grad  # else it would be in memory beside the next chunk's logits
        if parameter is not None:
            grad_weight = _mark_as_added(parameter)
        elif grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _add_weight_gradient(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """Adds grad^T hidden to `total` [v, h] in float32. The product is not rounded to the type of `grad` first."""
    if grad.is_cuda and grad.dtype != torch.float32:
        torch.addmm(total, grad.T, hidden, out_dtype=torch.float32, out=total)  # the CPU has no such product
    else:
        total += grad.T.float() @ hidden.float()


def _mark_as_added(parameter: Any) -> Tensor:
    """Returns the gradient that the hook of Megatron's DDP expects of a weight whose `main_grad` has it already.

    As Megatron-Core's LinearWithGradAccumulationAndAsyncCommunication. The hook drops the tensor, but `overlap_grad_reduce`
    requires one. The zeros of an embedding that is also the head are added with the embedding's gradient.
    """
    parameter.grad_added_to_main_grad = True
    create = torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like
    return create(parameter)


def _all_reduce(tensor: Tensor, operation: Any, group: Any) -> None:
    if dist.get_world_size(group) > 1:  # gloo takes 0.1 ms for nothing
        dist.all_reduce(tensor, operation, group=group)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits if temperature == 1.0 else logits / temperature


def _local_targets(logits: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows whose target is in this rank's part of the vocabulary, and the target's column there."""
    rows = ((columns >= 0) & (columns < logits.shape[1])).nonzero().squeeze(1)
    return rows, columns[rows]


def _sums(hidden: Tensor, weight: Tensor, columns: Tensor, temperature: float, group: Any) -> tuple[Tensor, Tensor]:
    """Returns the rows' largest logits of all ranks [n], and three numbers of this rank's logits less these [3, n].

    The numbers are the sum of exp, the sum of exp * logit, and the target's logit, or 0.
    """
    logits = _logits(hidden, weight, temperature)  # [n, v]
    top = logits.amax(dim=1) if weight.shape[0] else logits.new_full((len(logits),), -torch.inf)
    _all_reduce(top, dist.ReduceOp.MAX, group)
    logits -= top[:, None]
    rows, local_columns = _local_targets(logits, columns)
    at_target = logits.new_zeros(len(logits))
    at_target[rows] = logits[rows, local_columns]
    exp = logits.exp()
    return top, torch.stack([exp.sum(1), (exp * logits).sum(1), at_target])


def _fused_sums(
    hidden: Tensor, weight: Tensor, columns: Tensor, temperature: float, group: Any
) -> tuple[Tensor, Tensor]:
    """Computes `_sums` by a kernel that reads the logits once. exp(z - top) = exp(z - local top) exp(shift)."""
    from grpo_megatron.models.layers.head_kernel import row_statistics

    local_top, total, weighted, at_target = row_statistics(hidden @ weight.T, columns, temperature)
    top = local_top.clone()
    _all_reduce(top, dist.ReduceOp.MAX, group)
    shift = local_top - top
    at_target = torch.where((columns >= 0) & (columns < len(weight)), at_target - top, 0.0)
    return top, torch.stack([shift.exp() * total, shift.exp() * (weighted + shift * total), at_target])


def _gradient(hidden: Tensor, weight: Tensor, temperature: float, results: _ChunkResults) -> Tensor:
    """Returns the gradient of this rank's logits before the temperature [n, v], in the weight's type."""
    columns, entropy, lse, grad_logprobs, grad_entropy = results
    logp = _logits(hidden, weight, temperature) - lse[:, None]
    p = logp.exp()
    grad = torch.zeros_like(p)
    if grad_logprobs is not None:
        grad -= p * grad_logprobs[:, None]
        rows, local_columns = _local_targets(p, columns)
        grad[rows, local_columns] += grad_logprobs[rows]
    if grad_entropy is not None:
        grad -= grad_entropy[:, None] * p * (logp + entropy[:, None])
    return (grad / temperature).to(weight.dtype)


def _fused_gradient(hidden: Tensor, weight: Tensor, temperature: float, results: _ChunkResults) -> Tensor:
    """Computes `_gradient` by a kernel that writes it over the logits."""
    from grpo_megatron.models.layers.head_kernel import write_gradient

    logits, (columns, entropy, lse, *grads) = hidden @ weight.T, results
    logprob_grads, entropy_grads = (torch.zeros_like(lse) if grad is None else grad.contiguous() for grad in grads)
    write_gradient(logits, columns, lse, entropy, logprob_grads, entropy_grads, temperature)
    return logits


def vocab_parallel_logprobs(
    hidden: Float[Tensor, "N h"],
    weight: Float[Tensor, "V_local h"],
    targets: Int[Tensor, " N"],
    *,
    vocab_size: int,
    tp_rank: int,
    group: Any,
    temperature: float = 1.0,
    chunk: int = 1024,
    is_fused: bool = False,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Returns log-probabilities [N] of `targets` and entropies [N], float32, identical on every rank of `group`.

    hidden [N, h] is whole on every rank. weight [padded vocabulary / tp, h] is this rank's part, rows in vocabulary order.
    targets [N] are in [0, vocab_size). The gradient of `hidden` is this rank's part of a sum over `group`: the caller
    reduces it (Megatron's copy or gather region does this). `is_fused`: by Triton's kernels, on CUDA.
    """
    first = tp_rank * weight.shape[0]
    num_real = max(0, min(weight.shape[0], vocab_size - first))
    columns = targets - first  # in this rank's part; outside it for a target of another rank
    return _VocabParallelLogprobs.apply(hidden, weight, columns, temperature, chunk, group, is_fused, num_real)  # type: ignore[no-any-return]


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
    has_fused_head: bool
    is_exact: bool  # `model.exact`
    features: Features | None = None  # of `visual`, the vision tower, on the first stage of a model that has one

    def _preprocess(self, *, position_ids: Tensor, packed_seq_params: Any, **inputs: Any) -> Any:
        """Puts images in their places. Takes a token's angle from its position id in a pack of trees, where Megatron-Core
        would take it from its place; with M-RoPE it takes all angles from position ids."""
        if self.features is not None:
            embeddings = self.embedding(input_ids=inputs["input_ids"], position_ids=None)
            is_cut, placed = self.config.sequence_parallel, packed_seq_params.images
            inputs["decoder_input"] = with_images(embeddings, placed, self.visual, self.features, is_cut=is_cut)
        outputs = super()._preprocess(position_ids=position_ids, packed_seq_params=packed_seq_params, **inputs)
        if not isinstance(packed_seq_params, TreeParams) or position_ids.dim() == 3:
            return outputs
        hidden, angles, *rest = outputs  # angles [longest sequence, 1, 1, d]
        assert angles is not None, "trees need rotary embeddings outside the attention"
        return (hidden, angles[position_ids[0]], *rest)

    def _postprocess(self, hidden_states: Tensor, labels: Targets, **unused: Any) -> Any:
        """Computes the output from hidden_states [t (/tp under sequence parallelism), 1, h]."""
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
            hidden = exact.whole_sequence(hidden_states, self.config.sequence_parallel)
            states = hidden.squeeze(1)[labels.state_indices]
            return HeadOutput(*exact.exact_logprobs(states, weight, labels.tokens, **sizes))
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden_states)  # backward: reduce-scatter
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)  # backward: all-reduce
        states = hidden.squeeze(1)[labels.state_indices]
        return HeadOutput(
            *vocab_parallel_logprobs(states, weight, labels.tokens, is_fused=self.has_fused_head, **sizes)
        )


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
            position_embedding_type=_positions(arch),
            scatter_embedding_sequence_parallel=arch.vision is None,  # images come before
            rotary_percent=arch.rotary_share,
            rotary_base=arch.rope_theta,  # type: ignore[arg-type]  # a float works, and some models need a float
            rope_scaling=arch.rope_factor is not None,
            rope_scaling_factor=arch.rope_factor or 1.0,
            seq_len_interpolation_factor=arch.rope_linear_factor,
        )
        model.real_vocab_size, model.has_fused_head, model.is_exact = arch.vocab_size, kernels.fused_head, is_exact
        if is_exact:
            exact.make_exact(model.decoder, RMSNorm, PackedAttention)
        if arch.vision is not None and model.pre_process:
            recomputes = config.recompute_granularity == "full"
            with device.preserve_rng():  # torch samples initial weights
                parts = arch.vision, arch.hidden_size, config.params_dtype, device.torch_device
                model.visual = build_tower(*parts, recomputes=recomputes)
            model.features = Features(arch.vision, config.params_dtype)
        _mark_parameters(model, arch)
        model.to(device.torch_device)
        built = Float16Module(config, model) if config.bf16 else model
        if arch.routing is not None:
            _set_routers(built, arch.routing)
        return built
