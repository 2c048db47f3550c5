"""Attention over a pack of prefix trees (prefix_tree.py), by torch's fused kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

QUERY_BLOCK = 128  # queries of a branch per kernel call: masked scores are computed for half a block per query


@dataclass(frozen=True)
class Branch:
    """Tokens [start, end) of a pack, which follow its tokens [prefix_start, prefix_end)."""

    start: int
    end: int
    prefix_start: int
    prefix_end: int


@dataclass
class TreeParams(PackedSeqParams):
    """`PackedSeqParams` of a pack of trees, for the local attention. The pack is one sequence with positions of its own."""

    branches: list[Branch] = field(default_factory=list)


def tree_attention(query: Tensor, key: Tensor, value: Tensor, branches: list[Branch]) -> Tensor:
    """Causal attention of every branch over its prefix and itself: query [t, H, d], key [t, G, d], value [t, G, v]."""
    out = []
    shared = query.shape[1] != key.shape[1]
    for branch in branches:
        prefix = slice(branch.prefix_start, branch.prefix_end)
        size, length = branch.end - branch.start, branch.prefix_end - branch.prefix_start
        own = slice(branch.start, branch.end)
        if not length:
            q, k, v = (_heads_first(x[own]) for x in (query, key, value))
            out.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared))
            continue
        k, v = (_heads_first(torch.cat([x[prefix], x[own]])) for x in (key, value))
        q = _heads_first(query[own])
        for start in range(0, size, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, size)
            seen = length + end
            mask = torch.ones(end - start, seen, dtype=torch.bool, device=q.device).tril(length + start)
            block = q[:, :, start:end]
            out.append(
                F.scaled_dot_product_attention(block, k[:, :, :seen], v[:, :, :seen], attn_mask=mask, enable_gqa=shared)
            )
    return torch.cat(out, dim=2).squeeze(0).transpose(0, 1)  # [t, H, v]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)  # [1, H or G, s, d]
