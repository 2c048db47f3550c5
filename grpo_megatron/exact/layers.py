"""Megatron-Core's linear layers and attention with the expressions of exact/rowwise.py, in any tensor-parallel layout."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from grpo_megatron.exact import rowwise
from grpo_megatron.exact.self_test import ExactShapes, self_test


def tree_all_reduce(own: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of `group`, 1, 2, 4 or 8 of them, by `rowwise.tree_sum`'s tree: neighbours exchange, then pairs."""
    distance = 1
    while distance < group.size():
        peer = dist.get_global_rank(group, group.rank() ^ distance)
        own, other = own.contiguous(), torch.empty_like(own)
        operations = [dist.P2POp(dist.isend, own, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        own, distance = own + other, 2 * distance
    return own


def _gathered(own: Tensor, group: Any, dim: int) -> Tensor:
    """Every rank's part, in rank order."""
    if group.size() == 1:
        return own
    out = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(out, own.contiguous(), group=group)
    return torch.cat(out, dim)


# -- Linear layers. Their gradients: that of the weight sums over tokens, in one call for a sequence; that of the input sums over
#    outputs, which tensor parallelism cuts where the inputs are whole.


class ExactColumn(ColumnParallelLinear):  # type: ignore[misc]
    """The bias is added before the product is rounded. `parts`: 2 where each rank has a part of a gate, and of what it gates."""

    parts = 1

    def forward(self, x: Tensor, *unused: Any, **unused_too: Any) -> tuple[Tensor, None]:
        """[s (/ tp under sequence parallelism), b, inputs] -> [s, b, outputs / tp]."""
        x = whole_sequence(x, self.sequence_parallel)
        return _ColumnProduct.apply(x, self.weight, self.bias, self.parts, self.tp_group), None


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.parts, ctx.group = bias is not None, parts, group
        return rowwise.product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad, (x, weight) = grads[0], ctx.saved_tensors
        bias = rowwise.column_sums(grad).to(grad.dtype) if ctx.has_bias else None
        return whole_product(grad, weight, ctx.group, ctx.parts), rowwise.weight_gradient(grad, x), bias, None, None


def whole_product(grad: Tensor, weight: Tensor, group: Any, parts: int = 1) -> Tensor:
    """grad [..., n / tp] times weight [n / tp, h]: the sum over n of all ranks, in canonical blocks of each of `parts`."""
    blocks = rowwise.NUM_BLOCKS // group.size()
    pairs = zip(grad.chunk(parts, -1), weight.chunk(parts), strict=True)
    own = torch.stack([rowwise.partial_product(part, of_weight.t(), blocks) for part, of_weight in pairs])
    return rowwise.tree_sum(list(tree_all_reduce(own, group))).to(grad.dtype)


class ExactRow(RowParallelLinear):  # type: ignore[misc]
    """The ranks' subtrees are exchanged, and every rank finishes the tree."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[s, b, inputs / tp] -> [s (/ tp under sequence parallelism), b, outputs]."""
        return _RowProduct.apply(x, self.weight, self.tp_group, self.sequence_parallel), None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any, is_cut: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.is_cut = group, is_cut
        own = rowwise.partial_product(x, weight, rowwise.NUM_BLOCKS // group.size())
        whole = tree_all_reduce(own, group).to(x.dtype)
        return whole.chunk(group.size())[group.rank()] if is_cut else whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad, (x, weight) = grads[0], ctx.saved_tensors
        if ctx.is_cut:
            grad = _gathered(grad, ctx.group, 0)
        return rowwise.product(grad, weight.t().contiguous()), rowwise.weight_gradient(grad, x), None, None


class ExactNorm(torch.nn.Module):
    """Its weight's gradient sums over all tokens (and heads), also those of the other tensor-parallel ranks."""

    eps: float
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, h], cut along s under sequence parallelism; or of heads, [s, b, heads / tp, d]."""
        normed = F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype)
        cut = 2 if x.dim() == 4 else 0 if getattr(self.weight, "sequence_parallel", False) else None
        return _Scaled.apply(normed, self.weight, parallel_state.get_tensor_model_parallel_group(), cut)  # type: ignore[no-any-return]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, normed: Tensor, weight: Tensor, group: Any, cut: int | None) -> Tensor:
        ctx.save_for_backward(normed, weight)
        ctx.group, ctx.cut = group, cut
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad, (normed, weight) = grads[0], ctx.saved_tensors
        terms = grad * normed
        if ctx.cut is not None:
            terms = _gathered(terms, ctx.group, ctx.cut)
        return grad * weight, rowwise.column_sums(terms).to(grad.dtype), None, None


# -- The output head: `head.vocab_parallel_logprobs`, with sums over blocks of the vocabulary ----------------------------


def whole_sequence(hidden: Tensor, is_cut: bool) -> Tensor:
    """The hidden states of all tokens, whose gradient will be whole on every rank."""
    return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False) if is_cut else hidden


def exact_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept: Any = None,
    *,
    vocab_size: int,
    tp_rank: int,
    group: Any,
    temperature: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of `targets` and entropies [N], as `head.vocab_parallel_logprobs`, whole gradients of `hidden`."""
    first, size = tp_rank * weight.shape[0], rowwise.block_size(vocab_size)
    cut = None if kept is None else functools.partial(kept.cut, first=first)
    weight = weight[: max(0, vocab_size - first)]
    return _Logprobs.apply(hidden, weight, targets - first, size, temperature, chunk, group, cut)  # type: ignore[no-any-return]


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        columns: Tensor,
        size: int,
        temperature: float,
        chunk: int,
        group: Any,
        cut: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.size, ctx.temperature, ctx.chunk, ctx.group, ctx.cut = size, temperature, chunk, group, cut
        outputs = []  # of each chunk: log-probabilities, entropies, largest logits, logarithms of sums
        for number, (states, own) in enumerate(zip(hidden.split(chunk), columns.split(chunk), strict=True)):
            logits = _logits(states, weight, ctx, number)
            top = logits.amax(1)
            dist.all_reduce(top, dist.ReduceOp.MAX, group)
            logits -= top.unsqueeze(1)
            sums = tree_all_reduce(rowwise.exponential_sums(logits, size, rowwise.NUM_BLOCKS // group.size()), group)
            is_own = (own >= 0) & (own < len(weight))
            targets = logits.gather(1, torch.where(is_own, own, 0).unsqueeze(1)).squeeze(1).where(is_own, 0)
            dist.all_reduce(targets, group=group)  # one rank's logit, and zeros
            log_z = sums[0].log()
            outputs.append((targets - log_z, log_z - sums[1] / sums[0], top, log_z))
        logprobs, entropy, top, log_z = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        ctx.save_for_backward(hidden, weight, columns, entropy, top, log_z)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, weight, *of_tokens = ctx.saved_tensors
        grad_hidden, grad_weight = [], torch.zeros_like(weight, dtype=torch.float32)
        padding = rowwise.NUM_BLOCKS // ctx.group.size() * ctx.size - len(weight)  # whole blocks
        padded = F.pad(weight, (0, 0, 0, padding))
        parts = zip(*(x.split(ctx.chunk) for x in (hidden, *of_tokens, *grads)), strict=True)
        for number, (states, *given) in enumerate(parts):
            columns, entropy, top, log_z, of_logprobs, of_entropy = (x.unsqueeze(1) for x in given)
            logp = _logits(states, weight, ctx, number) - top - log_z
            p = logp.exp()
            grad = -p * of_logprobs - of_entropy * p * (logp + entropy)
            grad += of_logprobs * (columns == torch.arange(len(weight)))
            grad = (grad / ctx.temperature).to(weight.dtype)
            grad_weight += rowwise.weight_gradient(grad, states)
            grad_hidden.append(whole_product(F.pad(grad, (0, padding)), padded, ctx.group))
        return torch.cat(grad_hidden), grad_weight.to(weight.dtype), *[None] * 6


def _logits(hidden: Tensor, weight: Tensor, ctx: Any, number: int) -> Tensor:
    logits = rowwise.product(hidden, weight).float() / ctx.temperature
    return logits if ctx.cut is None else ctx.cut(logits, slice(number * ctx.chunk, (number + 1) * ctx.chunk))


class ExactAttention(torch.nn.Module):
    """Attention over packed sequences and prefix trees in blocks of queries, which begin where their sequence says."""

    softmax_scale: float

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
        """query [t, H, d], key [t, G, d] and value [t, G, v], all sequences end to end -> [t, H, v]."""
        branches = getattr(packed_seq_params, "branches", None)  # of a pack of prefix trees
        if branches is None:
            cuts = packed_seq_params.cu_seqlens_q.tolist()
            ends = [(start, end, start, start) for start, end in zip(cuts, cuts[1:], strict=False)]
        else:
            ends = [(branch.start, branch.end, branch.prefix_start, branch.prefix_end) for branch in branches]
        out = []
        for start, end, prefix_start, prefix_end in ends:
            own, prefix = slice(start, end), slice(prefix_start, prefix_end)
            q = query[own].transpose(0, 1).unsqueeze(0)  # [1, H, s, d]
            k, v = (torch.cat([x[prefix], x[own]]).transpose(0, 1).unsqueeze(0) for x in (key, value))
            out.append(rowwise.attention(q, k, v, prefix_end - prefix_start, self.softmax_scale)[0].transpose(0, 1))
        return torch.cat(out)


def exact_problem(arch: Any, tp: int, dtype: str) -> str | None:
    """Why this machine cannot compute a model of `models.architecture.Architecture` exactly, or None (exact/self_test.py)."""
    h, d, groups = arch.hidden_size, arch.head_dim, arch.num_query_groups
    qkv = (arch.num_attention_heads + 2 * groups) * d
    padded = rowwise.block_size(arch.vocab_size) * rowwise.NUM_BLOCKS  # as vLLM pads it
    shapes = ExactShapes(
        columns=[
            (h, qkv, [arch.attention_size, arch.key_size, qkv // tp]),
            (h, 2 * arch.ffn_hidden_size, [arch.ffn_hidden_size, 2 * arch.ffn_hidden_size // tp]),
            (h, padded, [arch.vocab_size, padded // tp]),
        ],
        partials=[(arch.attention_size, h), (arch.ffn_hidden_size, h)],
        heads=arch.num_attention_heads,
        groups=groups,
        head_dim=d,
        vocab_size=arch.vocab_size,
        tp=tp,
    )
    return self_test(shapes, getattr(torch, dtype))


def make_exact(model: torch.nn.Module, norm: type[torch.nn.Module], attention: type[torch.nn.Module]) -> None:
    """Replace the forward passes of the built layers, the local spec's `norm` and `attention` too. Parameters stay."""
    for module in model.modules():
        if type(module) is ColumnParallelLinear:
            module.__class__ = ExactColumn
        elif type(module) is RowParallelLinear:
            module.__class__ = ExactRow
        elif type(module) is attention:
            module.__class__ = ExactAttention
        elif type(module) is norm:
            module.__class__ = ExactNorm
        elif isinstance(module, MLP):
            module.config.activation_func = rowwise.silu  # the gated form reads it there
            module.linear_fc1.parts = 2
