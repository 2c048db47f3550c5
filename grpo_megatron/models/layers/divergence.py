"""The output head with a teacher: the divergence between its distribution and the policy's, and its best tokens.

    z = h W^T / T,   log p = z - lse,   D = sum_b f(p_b, q_b),   dD / dz_v = p_v (u_b(v) - m),   m = sum_b p_b u_b

f and u = df / dp are those of algo/distillation.py. The buckets b are all tokens of the vocabulary, or the teacher's k best and
one tail of all others, whose p is the sum over them. Teacher's logits are h' W'^T / T of its final hidden states h' and the
rows of its head for this rank's part of the policy's vocabulary. Ids beyond the teacher's rows have its LEAST_LOGPROB, and the
policy's probability. As in head.py, no logits exist beyond a chunk.

The tail is summed over its own tokens: 1 - (sum of k) has no digits left where the best tokens have nearly all of the mass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.algo.distillation import LEAST_LOGPROB, Divergence
from grpo_megatron.models.layers.head import (
    ChunkResults,
    all_reduce,
    gradient_of,
    head_gradients,
    logits_of,
    prepare_backward,
    shifted_logits,
    sums_of,
)
from grpo_megatron.shapes import Float, Int

TINY = torch.finfo(torch.float32).tiny


class TeacherStates(NamedTuple):
    """The final hidden states of a teacher [end - start, h'] that predict the targets [start, end), and its head [v, h']."""

    start: int
    end: int
    states: Tensor
    head: Tensor


@dataclass(frozen=True)
class SoftTargets:
    """The teachers' distributions of N targets: `top` [N, 2 k + 1] (see `vocab_parallel_top`), or `states` where it is None.

    Targets without a teacher have ids of -1 in `top`, or are in none of `states`: their divergence has no meaning, or is 0.
    """

    divergence: Divergence
    top: Tensor | None = None
    states: list[TeacherStates] = field(default_factory=list)


def vocab_parallel_divergence(
    hidden: Float[Tensor, "N h"],
    weight: Float[Tensor, "V_local h"],
    targets: Int[Tensor, " N"],
    soft: SoftTargets,
    *,
    vocab_size: int,
    tp_rank: int,
    group: Any,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Returns `head.vocab_parallel_logprobs`, and the divergence [N] and agreement [N] with the teacher, in float32.

    The agreement is 1 where the teacher's best token is the policy's, else 0. It has no gradient.
    """
    first = tp_rank * weight.shape[0]
    num_real = max(0, min(weight.shape[0], vocab_size - first))
    return _VocabParallelDivergence.apply(
        hidden, weight, targets - first, first, soft, temperature, chunk, group, num_real
    )  # type: ignore[no-any-return]


class _VocabParallelDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        columns: Tensor,
        first: int,
        soft: SoftTargets,
        temperature: float,
        chunk: int,
        group: Any,
        num_rows: int,
    ) -> tuple[Tensor, ...]:
        rows, num_tokens = weight[:num_rows], len(hidden)
        logprobs, entropy, lse, divergence, agreement = (
            torch.zeros(num_tokens, device=hidden.device) for _ in range(5)
        )
        ctx.of_parts = {}  # start of a chunk -> what its gradient needs of the teacher
        for start in range(0, num_tokens, chunk):
            part = slice(start, min(start + chunk, num_tokens))
            logits, top = shifted_logits(hidden[part], rows, temperature, group)
            exp = logits.exp()
            sums = sums_of(logits, exp, columns[part])
            all_reduce(
                sums, dist.ReduceOp.SUM, group
            )  # alone, as in head.py: another shape may be added in another order
            log_z = sums[0].log()
            logprobs[part] = sums[2] - log_z
            entropy[part] = log_z - sums[1] / sums[0]
            lse[part] = top + log_z
            if soft.top is not None:
                ids = soft.top[part, : soft.top.shape[1] // 2].long()
                buckets = _of_buckets(logits, exp, ids - first, group)
                agreement[part] = (buckets[1] == 0).float()  # the largest shifted logit
                divergence[part], ctx.of_parts[start] = _top_divergence(buckets, log_z, soft, part)
            else:
                del exp
                logits -= log_z[:, None]
                values = divergence[part], agreement[part]
                ctx.of_parts[start] = _full_divergence(logits, values, soft, part, temperature, group)
        ctx.save_for_backward(hidden, weight, columns, entropy, lse)
        ctx.soft, ctx.first = soft, first
        prepare_backward(ctx, weight, temperature, chunk, num_rows)
        ctx.mark_non_differentiable(agreement)
        return logprobs, entropy, divergence, agreement

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, *saved = ctx.saved_tensors
        rows, soft = weight[: ctx.num_rows], ctx.soft
        grad_logprobs, grad_entropy, grad_divergence, _ = grads

        def gradient(part: slice) -> Tensor:
            given: list[Any] = [
                None if tensor is None else tensor[part] for tensor in (*saved, grad_logprobs, grad_entropy)
            ]
            results = ChunkResults(*given)
            logp = logits_of(hidden[part], rows, ctx.temperature) - results.lse[:, None]
            p = logp.exp()
            grad = gradient_of(logp, p, results)
            if grad_divergence is not None:
                upstream = grad_divergence[part]
                if soft.top is not None:
                    ids = soft.top[part, : soft.top.shape[1] // 2].long() - ctx.first
                    _add_top_gradient(grad, p, upstream, ids, *ctx.of_parts[part.start])
                else:
                    part = slice(part.start, min(part.stop, len(hidden)))
                    _add_full_gradient(grad, logp, p, upstream, ctx.of_parts[part.start], soft, part, ctx.temperature)
            return (grad / ctx.temperature).to(weight.dtype)

        has_gradient = any(grad is not None for grad in grads[:3])
        return *head_gradients(ctx, hidden, weight, gradient if has_gradient else None), *[None] * 7


# -- The teacher's best tokens and a tail ------------------------------------------------------------------------------


def _entries(columns: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (row, number among the k, column) of the ids [n, k] in this rank's part of the vocabulary."""
    rows, numbers = ((columns >= 0) & (columns < num_rows)).nonzero(as_tuple=True)
    return rows, numbers, columns[rows, numbers]


def _of_buckets(logits: Tensor, exp: Tensor, columns: Tensor, group: Any) -> Tensor:
    """Returns the sums of exp over the tail, and the logits of the k ids: [1 + k, n] of all ranks. Writes to `exp`."""
    rows, numbers, local = _entries(columns, logits.shape[1])
    at_ids = torch.zeros(columns.shape, device=logits.device)
    at_ids[rows, numbers] = logits[rows, local]
    exp[rows, local] = 0.0
    sums = torch.cat([exp.sum(1)[None], at_ids.T])
    all_reduce(sums, dist.ReduceOp.SUM, group)
    return sums


def _top_divergence(
    sums: Tensor, log_z: Tensor, soft: SoftTargets, part: slice
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Returns the divergences [n], and of their gradient the k ids' p (u - m) [n, k] and the tail's u - m [n]."""
    assert soft.top is not None
    k = soft.top.shape[1] // 2
    logq = soft.top[part, k:]
    logp = torch.cat([sums[1:], sums[:1].clamp(min=TINY).log()]).T - log_z[:, None]  # [n, k + 1]
    unknown = soft.top[part, :k] < 0  # fewer than k ids
    logp[:, :k].masked_fill_(unknown, LEAST_LOGPROB)
    logp.clamp_(min=LEAST_LOGPROB)
    values, slopes = soft.divergence.terms(logp, logq)
    mean, p = soft.divergence.mean_slope(slopes), logp.exp()
    slopes = slopes - p * mean[:, None]
    return values.sum(1), (slopes[:, :k].masked_fill(unknown, 0.0), slopes[:, k] / p[:, k])


def _add_top_gradient(
    grad: Tensor, p: Tensor, upstream: Tensor, columns: Tensor, of_ids: Tensor, of_tail: Tensor
) -> None:
    rows, numbers, local = _entries(columns, p.shape[1])
    at_ids = grad[rows, local] + upstream[rows] * of_ids[rows, numbers]
    grad += (upstream * of_tail)[:, None] * p
    grad[rows, local] = at_ids  # set, not corrected: a tail's slope may be huge


def vocab_parallel_top(
    hidden: Float[Tensor, "N h"],
    weight: Float[Tensor, "V_local h"],
    targets: Int[Tensor, " N"],
    k: int,
    num_ids: int,
    *,
    vocab_size: int,
    tp_rank: int,
    group: Any,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, "N buckets"]]:
    """Returns a teacher's log-probabilities and entropies, and [N, 2 k + 1]: k best ids, their log-probabilities, the tail's.

    The ids are below `num_ids`, best first; -1 where there are fewer than k. Without gradients. An id is exact in float32.
    """
    assert vocab_size <= 2**24
    first = tp_rank * weight.shape[0]
    rows = weight[: max(0, min(weight.shape[0], vocab_size - first))]
    logprobs, entropy = torch.empty(2, len(hidden), device=hidden.device)
    out = torch.empty(len(hidden), 2 * k + 1, device=hidden.device)
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        logits, _ = shifted_logits(hidden[part], rows, temperature, group)
        values, ids = _best(logits[:, : max(0, num_ids - first)], k, first, group)
        exp = logits.exp()
        sums = sums_of(logits, exp, targets[part] - first)
        all_reduce(sums, dist.ReduceOp.SUM, group)
        log_z = sums[0].log()
        logprobs[part], entropy[part] = sums[2] - log_z, log_z - sums[1] / sums[0]
        tail = _of_buckets(logits, exp, ids - first, group)[0].clamp(min=TINY).log()
        logq = torch.cat([values, tail[:, None]], dim=1) - log_z[:, None]
        out[part] = torch.cat([ids.float(), logq.clamp(min=LEAST_LOGPROB)], dim=1)
    return logprobs, entropy, out


def _best(logits: Tensor, k: int, first: int, group: Any) -> tuple[Tensor, Tensor]:
    """Returns the k largest logits of all ranks and their ids, each [n, k]; -inf and -1 where there are fewer."""
    values, ids = logits.topk(min(k, logits.shape[1]), dim=1)
    missing = (0, k - values.shape[1])
    values = torch.nn.functional.pad(values, missing, value=-torch.inf)
    ids = torch.nn.functional.pad(ids + first, missing, value=-1)
    size = dist.get_world_size(group)
    if size == 1:
        return values, ids
    of_ranks: list[list[Tensor]] = []
    for tensor in (values, ids):
        of_ranks.append([torch.empty_like(tensor) for _ in range(size)])
        dist.all_gather(of_ranks[-1], tensor, group=group)
    all_values, all_ids = (torch.cat(parts, dim=1) for parts in of_ranks)
    values, places = all_values.topk(k, dim=1)
    return values, all_ids.gather(1, places)


# -- The teacher's full distribution -----------------------------------------------------------------------------------


def _runs(soft: SoftTargets, part: slice) -> list[tuple[slice, Tensor, Tensor]]:
    """Returns (targets of a chunk, a teacher's states of them, its head) for each teacher's targets in the chunk."""
    runs = []
    for run in soft.states:
        start, end = max(run.start, part.start), min(run.end, part.stop)
        if start < end:
            local = slice(start - part.start, end - part.start)
            runs.append((local, run.states[start - run.start : end - run.start], run.head))
    return runs


def _full_divergence(
    logp: Tensor, out: tuple[Tensor, Tensor], soft: SoftTargets, part: slice, temperature: float, group: Any
) -> tuple[Tensor, Tensor]:
    """Sets the divergences and agreements of a chunk. Returns its teachers' logarithms of sums and m, [n] each."""
    divergence, agreement = out
    lse, means = torch.zeros(2, len(logp), device=logp.device)
    for rows, states, head in _runs(soft, part):
        logits, top = shifted_logits(states, head, temperature, group)
        total = logits.exp().sum(1)
        all_reduce(total, dist.ReduceOp.SUM, group)
        log_z = total.log()
        is_best = (logits == 0) & (logp[rows, : logits.shape[1]] == _largest(logp[rows], group)[:, None])
        logits -= log_z[:, None]
        values, slopes = soft.divergence.terms(logp[rows], _with_width(logits, logp.shape[1]))
        sums = torch.stack([values.sum(1), slopes.sum(1), is_best.any(1).float()])
        all_reduce(sums, dist.ReduceOp.SUM, group)
        divergence[rows], agreement[rows] = sums[0], (sums[2] > 0).float()
        lse[rows], means[rows] = top + log_z, soft.divergence.mean_slope(sums[1:2].T)
    return lse, means


def _with_width(logq: Tensor, width: int) -> Tensor:
    """Appends columns for the policy's ids that the teacher lacks."""
    missing = width - logq.shape[1]
    return torch.nn.functional.pad(logq, (0, missing), value=LEAST_LOGPROB) if missing else logq


def _largest(logp: Tensor, group: Any) -> Tensor:
    top = logp.amax(dim=1) if logp.shape[1] else logp.new_full((len(logp),), -torch.inf)
    all_reduce(top, dist.ReduceOp.MAX, group)
    return top


def _add_full_gradient(
    grad: Tensor,
    logp: Tensor,
    p: Tensor,
    upstream: Tensor,
    of_teacher: tuple[Tensor, Tensor],
    soft: SoftTargets,
    part: slice,
    temperature: float,
) -> None:
    lse, means = of_teacher
    for rows, states, head in _runs(soft, part):
        logq = logits_of(states, head, temperature) - lse[rows, None]
        _, slopes = soft.divergence.terms(logp[rows], _with_width(logq, logp.shape[1]))
        grad[rows] += upstream[rows, None] * (slopes - p[rows] * means[rows, None])
