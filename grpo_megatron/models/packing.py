"""Packs: micro-batches of whole sequences as Megatron-Core computes them, with the targets to read. Callers never see padding.

A micro-batch is packed end to end ("thd"): T tokens, no padding between sequences. T is rounded up once, at the end of the
last sequence. Attention is causal, so the padding cannot change a real token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from grpo_megatron.device import Device
from grpo_megatron.models.layers.modules import Branch, TreeParams
from grpo_megatron.types import Batch


@dataclass(frozen=True)
class Targets:
    """The work of the last stage: the log-probability of `tokens` [N] from the hidden states `state_indices` [N]."""

    state_indices: Tensor  # into this rank's tokens of the pack
    tokens: Tensor
    temperature: float
    chunk: int  # rows of logits in memory at a time


@dataclass(frozen=True)
class TargetShare:
    """The n of a pack's N targets that one rank computes.

    `target_indices` [n]: which of the N. `state_indices` [n]: which of the rank's own T / cp hidden states predict them.
    """

    target_indices: Tensor
    state_indices: Tensor
    num_targets: int  # N


@dataclass(frozen=True)
class Pack:
    """One micro-batch on the device. `rows` are rows of the Batch; `lengths` are their response lengths."""

    rows: list[int]
    lengths: list[int]
    tokens: Tensor  # [1, T / cp]
    position_ids: Tensor  # [1, T / cp]
    packed: PackedSeqParams
    targets: Targets
    share: TargetShare | None = None  # context parallelism: the part of the targets that this rank computes


def pack(
    batch: Batch,
    rows: list[int],
    *,
    multiple: int,
    temperature: float,
    chunk: int,
    device: Device,
    cp: int = 1,
    cp_rank: int = 0,
) -> Pack:
    """Put sequences `rows` of `batch` end to end and take rank `cp_rank`'s part. No rows: padding without targets.

    `multiple` is `precision.token_multiple`, a multiple of 2 cp if cp > 1.
    """
    sequences = [batch.tokens[row] for row in rows] or [torch.zeros(1, dtype=torch.int64)]
    if cp > 1:
        sequences = [torch.nn.functional.pad(s, (0, -len(s) % (2 * cp))) for s in sequences]
    padding = -sum(len(s) for s in sequences) % multiple
    sequences[-1] = torch.nn.functional.pad(sequences[-1], (0, padding))
    lengths = [len(s) for s in sequences]
    cuts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    before_targets, response_lengths = [], []
    for row, start in zip(rows, cuts.tolist(), strict=False):
        prompt_length, end = batch.prompt_lengths[row], len(batch.tokens[row])
        # The hidden state at a token predicts the next token.
        before_targets.append(torch.arange(start + prompt_length - 1, start + end - 1))
        response_lengths.append(end - prompt_length)
    state_indices = torch.cat(before_targets) if before_targets else torch.empty(0, dtype=torch.int64)
    tokens = torch.cat(sequences)
    target_tokens = tokens[state_indices + 1]
    position_ids = torch.cat([torch.arange(n) for n in lengths])
    to = device.torch_device
    share = None
    if cp > 1:
        local = local_tokens(lengths, cp, cp_rank)
        share = target_share(state_indices, local)
        tokens, position_ids = tokens[local], position_ids[local]
        target_tokens, state_indices = target_tokens[share.target_indices], share.state_indices
        share = replace(share, target_indices=share.target_indices.to(to))
    cuts = cuts.to(to)
    # The padding of a sequence counts as part of it. Attention kernels are fastest without gaps; some allow none.
    padded = cuts if cp > 1 else None
    return Pack(
        rows=rows,
        lengths=response_lengths,
        tokens=tokens.unsqueeze(0).to(to),
        position_ids=position_ids.unsqueeze(0).to(to),
        packed=PackedSeqParams(
            **_packed(cuts, max(lengths)),
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
        ),
        targets=Targets(state_indices.to(to), target_tokens.to(to), temperature, chunk),
        share=share,
    )


def _packed(cuts: Tensor, longest: int) -> dict[str, Any]:
    """The fields of PackedSeqParams for sequences between `cuts`, in whose attention queries and keys are the same tokens."""
    lengths = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    return {"qkv_format": "thd", "cu_seqlens_q": cuts, "cu_seqlens_kv": cuts, **lengths}


def unpack(flat: Tensor, lengths: list[int], width: int) -> Tensor:
    """[N] in pack order -> [len(lengths), width], zeros after each row's end. Differentiable."""
    columns = torch.arange(width, device=flat.device)
    mask = columns < torch.tensor(lengths, device=flat.device).unsqueeze(1)
    return flat.new_zeros(len(lengths), width).masked_scatter(mask, flat)


def num_padding_tokens(lengths: list[int], multiple: int, cp: int = 1) -> int:
    """The number of tokens that `pack` adds to sequences of these lengths. Without sequences it is a whole pack."""
    aligned = sum(n + (-n % (2 * cp) if cp > 1 else 0) for n in lengths)
    return max(aligned + (-aligned % multiple), multiple) - sum(lengths)


# -- context parallelism: which tokens of a pack each of the cp ranks computes -------------------------------------------
#
# A causal token attends to all tokens before it, so the end of a sequence costs more than its beginning. Each sequence is
# therefore rounded up to a multiple of 2 cp and cut into 2 cp chunks, and rank r takes chunk r from the front and chunk r
# from the back. (Ring Attention with balanced load, arXiv:2310.01889; Transformer Engine's attention over packed sequences
# expects this cut.)
#
#     cp 2, a sequence of 8:   rank 0: 0 1 . . . . 6 7    rank 1: . . 2 3 4 5 . .
#
# The index arithmetic is plain torch and tested. The attention itself was not run on a GPU yet.


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


# -- prefix trees: the responses of one prompt share the prompt's tokens, which are computed once ------------------------
#
#     plain   p p p a a | p p p b b b | p p p c          tree   p p p a a | b b b | c
#
# A tree is one prompt and its responses, end to end. The first response continues the prompt. Every other one is a branch: its
# positions start after the prompt, and its tokens attend to the prompt's keys and to their own. A hidden state depends on the
# tokens before it alone, so log-probabilities and gradients are those of the plain packing, up to the order of sums. The
# prompt's last hidden state predicts the first token of every response, so its gradient is a sum over them.
#
# Tokens per tree: P + sum(R) instead of sum(P + R). Consecutive rows of a micro-batch with equal prompts make a tree.


def trees_of(batch: Batch, rows: list[int]) -> list[list[int]]:
    """`rows` cut into runs of equal prompts."""
    trees: list[list[int]] = []
    for row in rows:
        if trees and torch.equal(_prompt(batch, trees[-1][0]), _prompt(batch, row)):
            trees[-1].append(row)
        else:
            trees.append([row])
    return trees


def packed_lengths(batch: Batch, rows: list[int]) -> list[int]:
    """The tokens that each of `rows` has in their pack."""
    if not batch.shares_prompts:
        return [len(batch.tokens[row]) for row in rows]
    starts = {tree[0] for tree in trees_of(batch, rows)}
    return [len(batch.tokens[row]) - (0 if row in starts else batch.prompt_lengths[row]) for row in rows]


def _prompt(batch: Batch, row: int) -> Tensor:
    return batch.tokens[row][: batch.prompt_lengths[row]]


def pack_trees(batch: Batch, rows: list[int], *, multiple: int, temperature: float, chunk: int, device: Device) -> Pack:
    """Does what `pack` does, with one copy of the prompt for each run of rows that share it. `rows` is not empty."""
    tokens, positions, states, targets = [], [], [], []
    branches: list[Branch] = []
    size = 0
    for tree in trees_of(batch, rows):
        prompt, prefix = batch.prompt_lengths[tree[0]], size
        for i, row in enumerate(tree):
            shared = prompt if i else 0  # tokens of the prompt that the tree has already
            part = batch.tokens[row][shared:]
            first, end = size + prompt - shared, size + len(part)  # the response's tokens
            tokens.append(part)
            positions.append(torch.arange(len(part)) + shared)
            # The prompt's last token predicts the first token of the response, and each token the next one.
            states.append(torch.cat([torch.tensor([prefix + prompt - 1]), torch.arange(first, end - 1)]))
            targets.append(batch.tokens[row][prompt:])
            branches.append(Branch(size, end, prefix, prefix + shared))
            size = end
    padding = -size % multiple
    if padding:
        tokens.append(torch.zeros(padding, dtype=torch.int64))
        positions.append(torch.arange(padding))
        branches.append(Branch(size, size + padding, size, size))
    position_ids = torch.cat(positions)
    to = device.torch_device
    cuts = torch.tensor([0, size + padding], dtype=torch.int32, device=to)
    return Pack(
        rows=rows,
        lengths=[len(batch.tokens[row]) - batch.prompt_lengths[row] for row in rows],
        tokens=torch.cat(tokens).unsqueeze(0).to(to),
        position_ids=position_ids.unsqueeze(0).to(to),
        packed=TreeParams(**_packed(cuts, int(position_ids.max()) + 1), branches=branches),
        targets=Targets(torch.cat(states).to(to), torch.cat(targets).to(to), temperature, chunk),
    )
