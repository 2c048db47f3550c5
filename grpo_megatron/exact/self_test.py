"""The facts that `model.exact` rests on, measured on this machine with the shapes of a run: some seconds for 1B parameters.

They are properties of the processor, of torch's kernels and of the number of threads. None is documented anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_megatron.exact import rowwise

Random = Callable[..., Tensor]  # random values of a shape
NUM_ROWS, LONGEST = 3 * rowwise.FEWEST_ROWS + 1, 9 * rowwise.QUERIES + 5


@dataclass(frozen=True)
class ExactShapes:
    """`columns`: (inputs, outputs, the widths that they are cut into) of layers whose outputs are cut, in policy or engine.
    `partials`: (inputs, outputs) of the others. `heads`, `groups`: of queries and keys, of `head_dim`, over `tp` ranks."""

    columns: Sequence[tuple[int, int, Sequence[int]]]
    partials: Sequence[tuple[int, int]]
    heads: int
    groups: int
    head_dim: int
    vocab_size: int
    tp: int


@torch.inference_mode()
def self_test(shapes: ExactShapes, dtype: torch.dtype) -> str | None:
    """Return which equality this machine breaks, or None."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if (threads := torch.get_num_threads()) > 1:
        return f"model.exact: torch has {threads} threads on this rank, and sums would depend on them; set OMP_NUM_THREADS=1"
    for problem in (*_products(shapes, draw), *_attention(shapes, draw), *_exponentials(shapes, draw)):
        return f"model.exact: on this machine {problem}; leave model.exact out"
    return None


def _products(shapes: ExactShapes, draw: Random) -> Iterator[str]:
    few = (1, rowwise.FEWEST_ROWS - 1, rowwise.FEWEST_ROWS + 1)
    for inputs, outputs, widths in shapes.columns:
        x, weight, bias = draw(NUM_ROWS, inputs), draw(outputs, inputs), draw(outputs)
        whole = rowwise.product(x, weight, bias)
        for count in few:
            if not torch.equal(rowwise.product(x[:count], weight, bias), whole[:count]):
                yield f"{count} rows times [{inputs}, {outputs}] have other bits than the same among {NUM_ROWS}"
        for width in widths:
            for first in range(0, outputs - width + 1, width):
                cut = slice(first, first + width)
                if not torch.equal(rowwise.product(x, weight[cut], bias[cut]), whole[:, cut]):
                    yield f"{width} columns of a product with [{inputs}, {outputs}] have other bits than in the whole"
                    break
    for inputs, outputs in shapes.partials:
        x, weight = draw(NUM_ROWS, inputs), draw(outputs, inputs)
        whole = rowwise.partial_product(x, weight)
        parts = zip(x.chunk(shapes.tp, 1), weight.chunk(shapes.tp, 1), strict=True)
        of_ranks = [rowwise.partial_product(*part, rowwise.NUM_BLOCKS // shapes.tp) for part in parts]
        if not torch.equal(rowwise.tree_sum(of_ranks), whole):
            yield f"partial sums of [{inputs}, {outputs}] over tp {shapes.tp} have other bits than over tp 1"
        if not torch.equal(rowwise.partial_product(x[:1], weight), whole[:1]):
            yield f"the partial sums of one row times [{inputs}, {outputs}] have other bits than among {NUM_ROWS}"


def _attention(shapes: ExactShapes, draw: Random) -> Iterator[str]:
    query = draw(2, shapes.heads, LONGEST, shapes.head_dim)
    key, value = (draw(2, shapes.groups, LONGEST, shapes.head_dim) for _ in range(2))
    whole = rowwise.attention(query, key, value)
    padded = torch.nn.functional.pad(torch.stack([key, value]), (0, 0, 0, rowwise.aligned(LONGEST) - LONGEST))
    for position in (0, 1, rowwise.QUERIES - 1, rowwise.QUERIES, LONGEST // 2, LONGEST - 1):
        end, places = position + 1, torch.tensor([position, 0])  # beside a row of another length
        last = query[range(2), :, places].unsqueeze(2)
        decoded = rowwise.decoding_attention(last, padded[0], padded[1], places, None)
        if not torch.equal(decoded[:, :, 0], whole[range(2), :, places]):
            yield f"attention of the token at {position} has other bits when it is decoded"
        if not torch.equal(
            rowwise.attention(query[:1, :, :end], key[:1, :, :end], value[:1, :, :end]), whole[:1, :, :end]
        ):
            yield f"attention of {end} tokens has other bits than at the beginning of {LONGEST}"
        rest = rowwise.attention(query[:, :, position:], key, value, position)
        if not torch.equal(rest, whole[:, :, position:]):
            yield f"attention from the token at {position} on has other bits than in the whole sequence"
    own_heads, own_groups = shapes.heads // shapes.tp, max(1, shapes.groups // shapes.tp)
    of_rank = rowwise.attention(query[:, :own_heads], key[:, :own_groups], value[:, :own_groups])
    if not torch.equal(of_rank, whole[:, :own_heads]):
        yield f"attention of the heads of one of {shapes.tp} ranks has other bits than among all"


def _exponentials(shapes: ExactShapes, draw: Random) -> Iterator[str]:
    logits = draw(NUM_ROWS, shapes.vocab_size).float()
    if not torch.equal(rowwise.log_softmax(logits[:1]), rowwise.log_softmax(logits)[:1]):
        yield f"the log-softmax of one row of {shapes.vocab_size} has other bits than among {NUM_ROWS}"
