"""Attention over a pack of prefix trees (prefix_tree.py), by torch's fused kernels."""

from __future__ import annotations

import itertools
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
    """Causal attention of every branch over its prefix and itself: query [t, H, d], key [t, G, d], value [t, G, v].

    Neighbours of equal length with one prefix share their kernel calls.
    """
    out = []
    shared = query.shape[1] != key.shape[1]
    for (size, prefix_start, prefix_end), neighbours in itertools.groupby(branches, _shape):
        run = list(neighbours)
        start, count = run[0].start, len(run)
        own, prefix = slice(start, start + count * size), slice(prefix_start, prefix_end)
        length = prefix_end - prefix_start
        if not length:
            q, k, v = (_heads_first(x[own], count) for x in (query, key, value))
            out.append(_flat(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)))
            continue
        k, v = (
            torch.cat([_heads_first(x[prefix], 1).expand(count, -1, -1, -1), _heads_first(x[own], count)], dim=2)
            for x in (key, value)
        )
        q = _heads_first(query[own], count)
        blocks = []
        for first in range(0, size, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, size)
            seen = length + last
            mask = torch.ones(last - first, seen, dtype=torch.bool, device=q.device).tril(length + first)
            block = q[:, :, first:last]
            blocks.append(
                F.scaled_dot_product_attention(block, k[:, :, :seen], v[:, :, :seen], attn_mask=mask, enable_gqa=shared)
            )
        out.append(_flat(torch.cat(blocks, dim=2)))
    return torch.cat(out)  # [t, H, v]


def _shape(branch: Branch) -> tuple[int, int, int]:
    return branch.end - branch.start, branch.prefix_start, branch.prefix_end


def _heads_first(x: Tensor, count: int) -> Tensor:
    return x.view(count, -1, *x.shape[1:]).transpose(1, 2)  # [n * s, H, d] -> [n, H, s, d]


def _flat(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)  # [n, H, s, d] -> [n * s, H, d]
