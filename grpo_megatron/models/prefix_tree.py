"""Prefix trees: the responses of one prompt share the prompt's tokens, which are computed once.

    plain   p p p a a | p p p b b b | p p p c          tree   p p p a a | b b b | c

A tree is one prompt and its responses, end to end. The first response continues the prompt. Every other one is a branch: its
positions start after the prompt, and its tokens attend to the prompt's keys and to their own. A hidden state depends on the
tokens before it alone, so log-probabilities and gradients are those of the plain packing, up to the order of sums. The
prompt's last hidden state predicts the first token of every response, so its gradient is a sum over them.

Tokens per tree: P + sum(R) instead of sum(P + R). Consecutive rows of a micro-batch with equal prompts make a tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_megatron.device import Device
from grpo_megatron.models.build import Targets
from grpo_megatron.models.forward import Pack
from grpo_megatron.models.tree_attention import Branch, TreeParams
from grpo_megatron.types import Batch


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
    """As `forward.pack`, with one copy of the prompt for each run of rows that share it. `rows` is not empty."""
    tokens, positions, states, targets = [], [], [], []
    branches: list[Branch] = []
    size = 0
    for tree in trees_of(batch, rows):
        prompt, prefix = batch.prompt_lengths[tree[0]], size
        for i, row in enumerate(tree):
            part = batch.tokens[row] if i == 0 else batch.tokens[row][prompt:]
            first = size + (prompt if i == 0 else 0)  # the response's first token
            end = size + len(part)
            tokens.append(part)
            positions.append(torch.arange(len(part)) + (0 if i == 0 else prompt))
            # The prompt's last token predicts the first token of the response, and each token the next one.
            states.append(torch.cat([torch.tensor([prefix + prompt - 1]), torch.arange(first, end - 1)]))
            targets.append(batch.tokens[row][prompt:])
            branches.append(Branch(size, end, prefix, prefix + (0 if i == 0 else prompt)))
            size = end
    padding = -size % multiple
    if padding:
        tokens.append(torch.zeros(padding, dtype=torch.int64))
        positions.append(torch.arange(padding))
        branches.append(Branch(size, size + padding, size, size))
    position_ids = torch.cat(positions)
    to = device.torch_device
    cuts = torch.tensor([0, size + padding], dtype=torch.int32, device=to)
    longest = int(position_ids.max()) + 1
    return Pack(
        rows=rows,
        lengths=[len(batch.tokens[row]) - batch.prompt_lengths[row] for row in rows],
        tokens=torch.cat(tokens).unsqueeze(0).to(to),
        position_ids=position_ids.unsqueeze(0).to(to),
        packed=TreeParams(
            qkv_format="thd",
            cu_seqlens_q=cuts,
            cu_seqlens_kv=cuts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            branches=branches,
        ),
        targets=Targets(torch.cat(states).to(to), torch.cat(targets).to(to), temperature, chunk),
    )
