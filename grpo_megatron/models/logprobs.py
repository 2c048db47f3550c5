"""Log-probabilities and entropy from hidden states and this rank's rows of the output head.

    logits = h W^T / T,   logprob = logits[y] - lse,   entropy = lse - sum_v p_v logits_v,   lse = logsumexp_v logits_v

W is cut over tensor-parallel ranks by vocabulary rows. The vocabulary is never gathered: ranks exchange a maximum and
three sums per token. Logits exist for `chunk` tokens at a time. The backward pass computes them again, so memory does not
grow with tokens x vocabulary. Padded vocabulary rows are left out. The passes for old, reference and training
log-probabilities all use this function.

Gradients: d logprob / d logits_v = [v = y] - p_v,   d entropy / d logits_v = -p_v (log p_v + entropy).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
