"""The expressions of `model.exact`, each written once: what policy and engine both compute, row by row, to the same bits.

Floating-point sums depend on their order, and a kernel chooses its order by the shapes that it is called with. So every sum
here has an order of its own, which no shape of a call decides:

- A sum over inputs that tensor parallelism cuts (attention's output projection, the MLP's second layer, the vocabulary's
  exponentials) is made of NUM_BLOCKS partial sums in float32, added by one binary tree and rounded once. Rank t of T has the
  blocks [8 t / T, 8 (t + 1) / T): a whole subtree, so the ranks finish the same tree.
- Attention takes QUERIES queries at a time over all keys up to the end of their block, masked. A decoded token is a block of
  its own with the same keys.
- Other products are one call each: a row's bits depend neither on the number of rows, from FEWEST_ROWS on, nor on the columns
  beside it. `self_test.py` measures this on the machine of the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_BLOCKS = 8
QUERIES = 32
VOCABULARY_MULTIPLE = 8 * NUM_BLOCKS  # 8: Megatron's padding on each rank
FEWEST_ROWS, FEWEST_QUERIES = 16, 4


def aligned(length: int) -> int:
    """`length` rounded up to whole blocks of queries."""
    return -(-length // QUERIES) * QUERIES


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of 1, 2, 4 or 8 tensors by neighbours, then by neighbours of these."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] with weight [N, K], and bias [N] added before the result is rounded -> [..., N]."""
    rows = x.flatten(0, -2)
    padding = max(0, FEWEST_ROWS - len(rows))
    return F.linear(F.pad(rows, (0, 0, 0, padding)), weight, bias)[: len(rows)].view(*x.shape[:-1], len(weight))


def partial_product(x: Tensor, weight: Tensor, blocks: int = NUM_BLOCKS) -> Tensor:
    """The subtree of `blocks` blocks of inputs: x [..., K] with weight [N, K] -> float32 [..., N]."""
    parts = zip(x.float().chunk(blocks, -1), weight.float().chunk(blocks, -1), strict=True)
    # Copied: a kernel may compute a part of a wider tensor in another order.
    return tree_sum([product(part.contiguous(), of_weight.contiguous()) for part, of_weight in parts])


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient [n, h] of a weight: grad [..., n] and x [..., h], summed over all rows in one call."""
    return product(grad.flatten(0, -2).t().contiguous(), x.flatten(0, -2).t().contiguous())


def column_sums(x: Tensor) -> Tensor:
    """x [..., n] -> float32 [n]. Each column is summed as a row of its own: beside others, its order would depend on them."""
    return x.float().flatten(0, -2).t().contiguous().sum(1)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)). torch's own function has another exponential for the last elements of a row than for the others."""
    values = x.float()
    return (values / (1 + values.neg().exp())).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., h], normalised over h in float32 (arXiv:1910.07467)."""
    return F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype) * weight


def attention(query: Tensor, key: Tensor, value: Tensor, start: int = 0, scale: float | None = None) -> Tensor:
    """Causal attention of queries [n, H, s, d] at the positions from `start` on; key and value [n, G, >= start + s, d]."""
    stop, out = start + query.shape[2], []
    if (missing := aligned(stop) - key.shape[2]) > 0:
        key, value = F.pad(key, (0, 0, 0, missing)), F.pad(value, (0, 0, 0, missing))
    for first in [start, *range(start // QUERIES * QUERIES + QUERIES, stop, QUERIES)]:
        last = min(aligned(first + 1), stop)
        positions = torch.arange(first, last).expand(len(query), -1)
        out.append(_block(query[:, :, first - start : last - start], key, value, positions, scale))
    return torch.cat(out, 2)


def decoding_attention(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float | None) -> Tensor:
    """Attention of one query per row [n, H, 1, d] at `positions` [n]; key and value [n, G, >= the longest aligned, d]."""
    lengths = (positions // QUERIES + 1) * QUERIES
    out = torch.empty_like(query)
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero().squeeze(1)
        of_rows = (slice(None) if len(rows) == len(query) else rows, slice(None), slice(length))
        out[rows] = _block(query[rows], key[of_rows], value[of_rows], positions[rows].unsqueeze(1), scale)
    return out


def _block(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float | None) -> Tensor:
    """Queries [n, H, s, d] at `positions` [n, s] of one block, over the keys up to the block's end."""
    length, count = aligned(int(positions[0, 0]) + 1), query.shape[2]
    if (missing := FEWEST_QUERIES - count) > 0:
        query, positions = F.pad(query, (0, 0, 0, missing)), F.pad(positions, (0, missing))
    seen = torch.arange(length) <= positions.unsqueeze(-1)  # [n, s, keys]
    keys, values = key[:, :, :length], value[:, :, :length]
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=seen.unsqueeze(1), scale=scale, enable_gqa=is_grouped
    )[:, :, :count]


def block_size(vocab_size: int) -> int:
    """Tokens of the vocabulary in each of the NUM_BLOCKS blocks; the last ones may have fewer, or none."""
    return -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // NUM_BLOCKS


def exponential_sums(shifted: Tensor, size: int, blocks: int) -> Tensor:
    """Sum exp and exp * logit over `blocks` of `size`: [2, n] from logits [n, v] minus their row's largest one."""
    exp = shifted.exp()
    terms = F.pad(torch.stack([exp, exp * shifted]), (0, blocks * size - shifted.shape[1]))  # [2, n, blocks * size]
    return tree_sum([block.contiguous().sum(-1) for block in terms.split(size, -1)])


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities [n, V] from float32 logits [n, V]."""
    shifted = logits - logits.amax(1, keepdim=True)
    return shifted - exponential_sums(shifted, block_size(logits.shape[1]), NUM_BLOCKS)[0].log().unsqueeze(1)
