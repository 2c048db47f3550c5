"""Latent: the sizes of multi-head latent attention (MLA), arXiv 2405.04434, section 2.1. Plain numbers.

    c_q = norm(W_qa x)                  [q_rank]       without q_rank, queries are W_q x
    q = W_qb c_q                        [H, nope_dim + rope_dim]
    c_kv, k_rope = W_kva x              [kv_rank], [rope_dim]: one rotated key for all heads
    k_nope, v = W_kvb norm(c_kv)        [H, nope_dim], [H, value_dim]

Only c_kv and k_rope would be cached. The rotated parts are interleaved: dimension 2 i turns with dimension 2 i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Latent:
    """`logit_scale`: the m that YaRN multiplies the logits with, as (0.1 m ln(factor) + 1) ** 2. 0: it does not."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None = None
    logit_scale: float = 0.0

    @property
    def key_dim(self) -> int:
        """Size of a query head and of a key head."""
        return self.nope_dim + self.rope_dim

    @property
    def down_rows(self) -> int:
        """Rows of W_kva."""
        return self.kv_rank + self.rope_dim

    @property
    def up_rows(self) -> int:
        """Rows of W_kvb, per head."""
        return self.nope_dim + self.value_dim

    def num_parameters(self, hidden_size: int, heads: int) -> int:
        """Of one layer's attention, norms of the latents included."""
        queries = heads * self.key_dim
        query = queries * hidden_size
        if self.q_rank is not None:
            query = self.q_rank * (hidden_size + 1 + queries)
        key_value = self.down_rows * hidden_size + self.kv_rank * (1 + heads * self.up_rows)
        return query + key_value + heads * self.value_dim * hidden_size
