"""QKV: the row of a fused attention input.

There are H query heads in G groups (n = H / G heads per group), head size d, hidden size h. Megatron fuses attention
group by group: for each group n*d query rows, then d key rows, then d value rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.mapping import Read, WeightRow, read_part


@dataclass(frozen=True)
class QKV(WeightRow):
    """Fused attention input, group by group: weight [(H+2G)d, h] or bias [(H+2G)d]. There may be more ranks than groups."""

    bias: bool = False

    def _tail(self, arch: Architecture) -> tuple[int, ...]:
        return () if self.bias else (arch.hidden_size,)

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        q, kv = arch.num_attention_heads * arch.head_dim, arch.num_query_groups * arch.head_dim
        return tuple((rows, *self._tail(arch)) for rows in (q, kv, kv))

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        rows = (arch.num_attention_heads + 2 * arch.num_query_groups) * arch.head_dim
        return (rows // tp, *self._tail(arch))

    def segments(self, arch: Architecture) -> Iterator[tuple[int, int]]:
        d = arch.head_dim
        for _ in range(arch.num_query_groups):
            yield 0, arch.num_attention_heads // arch.num_query_groups * d
            yield 1, d
            yield 2, d

    def shard(self, read: Read, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
        if arch.num_query_groups % tp == 0:  # every rank has whole groups: read only this rank's
            return self._fuse(
                [read_part(read, name, tp_rank, tp) for name in self.hf], arch, arch.num_query_groups // tp
            )
        fused = self._fuse([read(name)[:] for name in self.hf], arch, arch.num_query_groups)
        return fused.chunk(tp)[tp_rank]

    def _fuse(self, qkv: list[Tensor], arch: Architecture, groups: int) -> Tensor:
        tail = self._tail(arch)
        parts = [part.reshape(groups, -1, *tail) for part in qkv]  # [G, n*d, h], [G, d, h], [G, d, h]
        return torch.cat(parts, dim=1).reshape(-1, *tail)

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        d, tail = arch.head_dim, self._tail(arch)
        n = arch.num_attention_heads // arch.num_query_groups
        fused = torch.cat(list(shards)).reshape(arch.num_query_groups, (n + 2) * d, *tail)
        parts = fused.split([n * d, d, d], dim=1)
        return [part.reshape(-1, *tail).clone() for part in parts]
