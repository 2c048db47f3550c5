"""Log-probabilities and entropy from hidden states and this rank's rows of the output head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.shapes import Float, Int

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


MASKED_LOGIT = -1e30  # stands for minus infinity: finite, so that 0 times it is 0; a bfloat16 number


class KeptTargets(NamedTuple):
    """The ids that N targets were sampled from, M in all. The other logits of a target are minus infinity (rollout.top_k).

    log-probabilities, entropies and gradients then are those of the distribution over these ids.
    """

    ids: Tensor  # int64 [M], those of target 0 first
    targets: Tensor  # int64 [M], the target of each id
    is_cut: Tensor  # bool [N, 1]; false: a target of the full vocabulary, without ids
    ends: list[int]  # [N + 1], on the host: the ids of target i are [ends[i], ends[i + 1])

    @classmethod
    def of(cls, counts: Tensor, ids: Tensor, device: torch.device) -> KeptTargets:
        """Makes them from the number of ids of each target [N] and the ids [M], on the host."""
        targets, ends = torch.arange(len(counts)).repeat_interleave(counts), [0, *counts.cumsum(0).tolist()]
        return cls(ids.long().to(device), targets.to(device), (counts > 0)[:, None].to(device), ends)

    def outside(self, part: slice, first: int, width: int) -> Tensor:
        """Marks the columns without an id [n, width], for the targets `part` and a shard that begins with id `first`."""
        is_cut = self.is_cut[part]
        own = slice(self.ends[part.start], self.ends[part.start + len(is_cut)])
        columns = self.ids[own] - first
        columns = torch.where((columns >= 0) & (columns < width), columns, width)  # one column more: no synchronisation
        outside = is_cut.repeat(1, width + 1)
        outside[self.targets[own] - part.start, columns] = False
        return outside[:, :width]

    def cut(self, logits: Tensor, part: slice, first: int) -> Tensor:
        """Masks the logits [n, width] that `outside` marks, in place."""
        return logits.masked_fill_(self.outside(part, first, logits.shape[1]), MASKED_LOGIT)


def local_logits(hidden: Tensor, weight: Tensor, outside: Tensor | None) -> Tensor:
    """Computes this rank's logits [n, v] in the weight's type, MASKED_LOGIT where `outside`."""
    logits = hidden @ weight.T
    return logits if outside is None else logits.masked_fill_(outside, MASKED_LOGIT)


class ChunkResults(NamedTuple):
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
        kept: KeptTargets | None,
        first: int,
    ) -> tuple[Tensor, Tensor]:
        rows = weight[:num_rows]  # without the padding
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        compute = _fused_sums if is_fused else _sums
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            outside = None if kept is None else kept.outside(part, first, num_rows)
            top, sums = compute(hidden[part], rows, columns[part], temperature, group, outside)
            all_reduce(sums, dist.ReduceOp.SUM, group)
            log_z = sums[0].log()
            logprobs[part] = sums[2] - log_z
            entropy[part] = log_z - sums[1] / sums[0]
            lse[part] = top + log_z
        ctx.save_for_backward(hidden, weight, columns, entropy, lse)
        ctx.is_fused, ctx.kept, ctx.first = is_fused, kept, first
        prepare_backward(ctx, weight, temperature, chunk, num_rows)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, *saved = ctx.saved_tensors
        rows, compute = weight[: ctx.num_rows], _fused_gradient if ctx.is_fused else _gradient

        def gradient(part: slice) -> Tensor:
            given: list[Any] = [None if tensor is None else tensor[part] for tensor in (*saved, *grads)]
            outside = None if ctx.kept is None else ctx.kept.outside(part, ctx.first, ctx.num_rows)
            return compute(hidden[part], rows, ctx.temperature, ChunkResults(*given), outside)

        has_gradient = any(grad is not None for grad in grads)
        return *head_gradients(ctx, hidden, weight, gradient if has_gradient else None), *[None] * 8


def prepare_backward(ctx: Any, weight: Tensor, temperature: float, chunk: int, num_rows: int) -> None:
    """Sets what `head_gradients` reads."""
    ctx.temperature, ctx.chunk, ctx.num_rows = temperature, chunk, num_rows
    is_added = ctx.needs_input_grad[1] and weight.dtype != torch.float32 and hasattr(weight, "main_grad")
    ctx.parameter = weight if is_added else None
    ctx.set_materialize_grads(False)


def head_gradients(
    ctx: Any, hidden: Tensor, weight: Tensor, gradient: Callable[[slice], Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """Computes the gradients of `hidden` and `weight`, or of DDP's buffer, chunk by chunk.

    `gradient(part)` returns that of the logits of some tokens before the temperature [n, v]; None: it is 0.
    """
    rows, parameter = weight[: ctx.num_rows], ctx.parameter
    grad_hidden, grad_weight = torch.zeros_like(hidden), None
    if ctx.needs_input_grad[1]:
        grad_weight = parameter.main_grad if parameter is not None else torch.zeros_like(weight, dtype=torch.float32)
    for start in range(0, len(hidden) if gradient is not None else 0, ctx.chunk):
        part = slice(start, start + ctx.chunk)
        assert gradient is not None
        grad = gradient(part)
        grad_hidden[part] = grad @ rows
        if grad_weight is not None:
            _add_weight_gradient(grad_weight[: ctx.num_rows], grad, hidden[part])
        del grad  # else it would be in memory beside the next chunk's logits
    if parameter is not None:
        grad_weight = _mark_as_added(parameter)
    elif grad_weight is not None:
        grad_weight = grad_weight.to(weight.dtype)
    return grad_hidden, grad_weight


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


def all_reduce(tensor: Tensor, operation: Any, group: Any) -> None:
    """Reduces `tensor` in place over the ranks of `group`."""
    if dist.get_world_size(group) > 1:  # gloo takes 0.1 ms for nothing
        dist.all_reduce(tensor, operation, group=group)


def logits_of(hidden: Tensor, weight: Tensor, temperature: float, outside: Tensor | None = None) -> Tensor:
    """Computes this rank's logits [n, v] in float32, divided by the temperature."""
    logits = local_logits(hidden, weight, outside).float()
    return logits if temperature == 1.0 else logits / temperature


def local_targets(logits: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows whose target is in this rank's part of the vocabulary, and the target's column there."""
    rows = ((columns >= 0) & (columns < logits.shape[1])).nonzero().squeeze(1)
    return rows, columns[rows]


def shifted_logits(
    hidden: Tensor, weight: Tensor, temperature: float, group: Any, outside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns this rank's logits [n, v] less the largest ones of all ranks, and these [n]."""
    logits = logits_of(hidden, weight, temperature, outside)
    top = logits.amax(dim=1) if weight.shape[0] else logits.new_full((len(logits),), -torch.inf)
    all_reduce(top, dist.ReduceOp.MAX, group)
    logits -= top[:, None]
    return logits, top


def sums_of(logits: Tensor, exp: Tensor, columns: Tensor) -> Tensor:
    """Returns the three numbers of `_sums` [3, n]. `exp` are the exponentials of the shifted `logits`."""
    rows, local_columns = local_targets(logits, columns)
    at_target = logits.new_zeros(len(logits))
    at_target[rows] = logits[rows, local_columns]
    return torch.stack([exp.sum(1), (exp * logits).sum(1), at_target])


def _sums(
    hidden: Tensor, weight: Tensor, columns: Tensor, temperature: float, group: Any, outside: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the rows' largest logits of all ranks [n], and three numbers of this rank's logits less these [3, n].

    The numbers are the sum of exp, the sum of exp * logit, and the target's logit, or 0.
    """
    logits, top = shifted_logits(hidden, weight, temperature, group, outside)
    return top, sums_of(logits, logits.exp(), columns)


def _fused_sums(
    hidden: Tensor, weight: Tensor, columns: Tensor, temperature: float, group: Any, outside: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes `_sums` by a kernel that reads the logits once. exp(z - top) = exp(z - local top) exp(shift)."""
    from grpo_megatron.models.layers.head_kernel import row_statistics

    logits = local_logits(hidden, weight, outside)
    local_top, total, weighted, at_target = row_statistics(logits, columns, temperature)
    top = local_top.clone()
    all_reduce(top, dist.ReduceOp.MAX, group)
    shift = local_top - top
    at_target = torch.where((columns >= 0) & (columns < len(weight)), at_target - top, 0.0)
    return top, torch.stack([shift.exp() * total, shift.exp() * (weighted + shift * total), at_target])


def _gradient(
    hidden: Tensor, weight: Tensor, temperature: float, results: ChunkResults, outside: Tensor | None
) -> Tensor:
    """Returns the gradient of this rank's logits before the temperature [n, v], in the weight's type."""
    logp = logits_of(hidden, weight, temperature, outside) - results.lse[:, None]
    return (gradient_of(logp, logp.exp(), results) / temperature).to(weight.dtype)


def gradient_of(logp: Tensor, p: Tensor, results: ChunkResults) -> Tensor:
    """Returns the gradient of the logits [n, v], from their log-probabilities and probabilities."""
    columns, entropy, _, grad_logprobs, grad_entropy = results
    grad = torch.zeros_like(p)
    if grad_logprobs is not None:
        grad -= p * grad_logprobs[:, None]
        rows, local_columns = local_targets(p, columns)
        grad[rows, local_columns] += grad_logprobs[rows]
    if grad_entropy is not None:
        grad -= grad_entropy[:, None] * p * (logp + entropy[:, None])
    return grad


def _fused_gradient(
    hidden: Tensor, weight: Tensor, temperature: float, results: ChunkResults, outside: Tensor | None
) -> Tensor:
    """Computes `_gradient` by a kernel that writes it over the logits."""
    from grpo_megatron.models.layers.head_kernel import write_gradient

    logits, (columns, entropy, lse, *grads) = local_logits(hidden, weight, outside), results
    logprob_grads, entropy_grads = (torch.zeros_like(lse) if grad is None else grad.contiguous() for grad in grads)
    write_gradient(logits, columns, lse, entropy, logprob_grads, entropy_grads, temperature)
    return logits


@torch.no_grad()
def vocab_parallel_squares(
    hidden: Float[Tensor, "N h"],
    weight: Float[Tensor, "V_local h"],
    *,
    vocab_size: int,
    tp_rank: int,
    group: Any,
    temperature: float = 1.0,
    chunk: int = 1024,
    kept: KeptTargets | None = None,
) -> Float[Tensor, " N"]:
    """Returns sum_v p_v^2 of each target's distribution [N], float32. Arguments as of `vocab_parallel_logprobs`."""
    first = tp_rank * weight.shape[0]
    rows, parts = weight[: max(0, min(weight.shape[0], vocab_size - first))], [hidden.new_zeros(0).float()]
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        outside = None if kept is None else kept.outside(part, first, len(rows))
        exp = shifted_logits(hidden[part], rows, temperature, group, outside)[0].exp()
        sums = torch.stack([exp.sum(1), exp.square().sum(1)])
        all_reduce(sums, dist.ReduceOp.SUM, group)
        parts.append(sums[1] / sums[0].square())
    return torch.cat(parts)


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
    kept: KeptTargets | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Returns log-probabilities [N] of `targets` and entropies [N], float32, identical on every rank of `group`.

    hidden [N, h] is whole on every rank. weight [padded vocabulary / tp, h] is this rank's part, rows in vocabulary order.
    targets [N] are in [0, vocab_size). The gradient of `hidden` is this rank's part of a sum over `group`: the caller
    reduces it (Megatron's copy or gather region does this). `is_fused`: by Triton's kernels, on CUDA. `kept`: the ids that
    the distribution of each target is over; None: all.
    """
    first = tp_rank * weight.shape[0]
    num_real = max(0, min(weight.shape[0], vocab_size - first))
    columns = targets - first  # in this rank's part; outside it for a target of another rank
    options = (temperature, chunk, group, is_fused, num_real, kept, first)
    return _VocabParallelLogprobs.apply(hidden, weight, columns, *options)  # type: ignore[no-any-return]
