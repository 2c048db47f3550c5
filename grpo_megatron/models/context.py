"""Context parallelism: which tokens of a pack each of the cp ranks computes, and the all-gather of their results.

A causal token attends to all tokens before it, so the end of a sequence costs more than its beginning. Each sequence is
therefore cut into 2 cp chunks, and rank r takes chunk r from the front and chunk r from the back. (Ring Attention with
balanced load, arXiv:2310.01889; Transformer Engine's attention over packed sequences expects this cut.)

    cp 2, a sequence of 8:   rank 0: 0 1 . . . . 6 7    rank 1: . . 2 3 4 5 . .

The index arithmetic is plain torch and tested. The attention itself was not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def local_tokens(lengths: Sequence[int], cp: int, cp_rank: int) -> Tensor:
    """Indices into the whole pack, int64 [T / cp]: the tokens of rank `cp_rank`, in the order in which it computes them.

    The pack is sequences of `lengths`, end to end. Each length is a multiple of 2 cp.
    """
    parts, start = [], 0
    for length in lengths:
        chunk, rest = divmod(length, 2 * cp)
        assert rest == 0, f"a sequence of {length} cannot be cut in 2 x cp {cp} chunks"
        firsts = [start + index * chunk for index in (cp_rank, 2 * cp - 1 - cp_rank)]
        parts += [torch.arange(first, first + chunk) for first in firsts]
        start += length
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class TargetShare:
    """The n of a pack's N targets that one rank computes.

    `target_indices` [n]: which of the N. `state_indices` [n]: which of the rank's own T / cp hidden states predict them.
    """

    target_indices: Tensor
    state_indices: Tensor
    num_targets: int  # N


def target_share(state_indices: Tensor, tokens: Tensor) -> TargetShare:
    """The targets whose hidden states, `state_indices` [N] in the whole pack, are among a rank's `tokens` [T / cp]."""
    sizes = [int(indices.max()) + 1 for indices in (state_indices, tokens) if len(indices)]
    local_index = torch.full((max(sizes, default=0),), -1, dtype=torch.int64)  # index in the pack -> among `tokens`
    local_index[tokens] = torch.arange(len(tokens))
    target_indices = (local_index[state_indices] >= 0).nonzero().squeeze(1)
    return TargetShare(target_indices, local_index[state_indices[target_indices]], len(state_indices))


class _GatherTargets(torch.autograd.Function):
    """Forward: every rank gets all N values. Backward: each rank keeps the gradients of its own values.

    All ranks compute the same loss from the same N values. The gradient on one rank is then that of its own tokens' part of
    the loss. DDP sums over ranks, and the sum is the gradient of the loss, counted once.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, target_indices: Tensor, num_targets: int, group: Any) -> Tensor:
        ctx.save_for_backward(target_indices)
        whole = values.new_zeros(num_targets)
        whole[target_indices] = values
        dist.all_reduce(whole, group=group)  # one rank's value plus zeros: the same bits on every rank
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (target_indices,) = ctx.saved_tensors
        return grads[0][target_indices], None, None, None


def gather_targets(values: Tensor, share: TargetShare, group: Any) -> Tensor:
    """This rank's values [n] -> all ranks' [N], the same on each. Collective over the context-parallel `group`."""
    return _GatherTargets.apply(values, share.target_indices, share.num_targets, group)  # type: ignore[no-any-return]
