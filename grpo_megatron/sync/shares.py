"""Shares by arithmetic: which rank is the witness of which part, without a plan of transfers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from grpo_megatron.parallel.grid import Grid
from grpo_megatron.sync.tensors import EngineSpans, Share, Span, SyncParameter


def shares_of(parameters: Sequence[SyncParameter], spans: EngineSpans, grid: Grid, rank: int) -> list[Share]:
    """The shares of one rank. The witness of a part is the first tensor-parallel rank that has it, in its first replica."""
    return [
        share
        for parameter in parameters
        for tp_rank in range(grid.tp)
        if grid.ranks(tp_rank, parameter.stage, parameter.ep_rank)[0] == rank
        for share in _shares(parameter, spans, tp_rank)
    ]


def _shares(parameter: SyncParameter, spans: EngineSpans, tp_rank: int) -> Iterator[Share]:
    for piece in parameter.pieces[tp_rank]:
        tensor = parameter.tensors[piece.tensor]
        taken = [(p.start, p.stop) for pieces in parameter.pieces[:tp_rank] for p in pieces if p.tensor == piece.tensor]
        borders = {border for span in (*spans[tensor.name], *taken) for border in span}
        inner = sorted(border for border in borders if piece.start < border < piece.stop)
        for start, stop in zip((piece.start, *inner), (*inner, piece.stop), strict=True):
            if not any(_contains(other, (start, stop)) for other in taken):
                readers = tuple(r for r, span in enumerate(spans[tensor.name]) if _contains(span, (start, stop)))
                local_start = piece.local_start + start - piece.start
                yield Share(parameter.name, tensor, start, stop, local_start, readers)


def _contains(outer: Span, inner: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
