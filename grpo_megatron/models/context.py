"""Context parallelism: which tokens of a pack each of cp ranks computes, and its results brought together again.

A causal token attends to all before it, so that the end of a sequence costs more than its beginning. Each sequence is
therefore cut in 2 cp chunks, and rank r takes chunk r from the front and chunk r from the back (Ring Attention with
the load balanced, arXiv:2310.01889; the cut that Transformer Engine's attention over packed sequences expects):

    cp 2, a sequence of 8:   rank 0: 0 1 . . . . 6 7    rank 1: . . 2 3 4 5 . .

The index arithmetic is plain torch and tested; the attention itself was not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def own_tokens(lengths: Sequence[int], cp: int, cp_rank: int) -> Tensor:
    """Positions in the whole pack, int64 [T / cp], of the tokens of rank `cp_rank`, in the order it computes them.

    `lengths` of the sequences, end to end, are multiples of 2 cp.
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
class Share:
    """The part of N scored positions of a pack that one rank has: `slots` [n] of the N, at `positions` [n] of its own
    tokens."""

    slots: Tensor
    positions: Tensor
    count: int


def own_scores(scored: Tensor, own: Tensor) -> Share:
    """Which of the positions `scored` [N] of the whole pack are among a rank's tokens `own` [T / cp]."""
    place = torch.full((max([0, *(int(x.max()) + 1 for x in (scored, own) if len(x))]),), -1, dtype=torch.int64)
    place[own] = torch.arange(len(own))
    slots = (place[scored] >= 0).nonzero().squeeze(1)
    return Share(slots, place[scored[slots]], len(scored))


class _Together(torch.autograd.Function):
    """Forward: every rank gets all N values. Backward: each keeps the gradients of its own.

    All ranks compute the same loss from the same N values; a rank's gradient is then of its own tokens' part of it, and
    the sum over ranks, which DDP takes, is the gradient of the loss, once.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, slots: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(slots)
        whole = values.new_zeros(count)
        whole[slots] = values
        dist.all_reduce(whole, group=group)  # one rank's value and zeros: the same bits everywhere
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (slots,) = ctx.saved_tensors
        return grads[0][slots], None, None, None


def bring_together(values: Tensor, share: Share, group: Any) -> Tensor:
    """This rank's values [n] -> all ranks' [N], the same on each. Collective over the context-parallel `group`."""
    return _Together.apply(values, share.slots, share.count, group)  # type: ignore[no-any-return]
