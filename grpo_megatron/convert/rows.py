"""Which rows of which Hugging Face tensor a run of Megatron rows is, and the reverse.

Over one rank every Megatron tensor is the rows of its Hugging Face tensors in another order (`WeightRow.runs`), so conversion
moves rows: it computes nothing, and never needs a whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.mapping import WeightRow


def hf_runs(row: WeightRow, arch: Architecture, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Megatron rows first to last-1, in order, as (which of row.hf, first, last of its rows)."""
    for part, there, here, count in _runs(row, arch):
        low, high = max(first, here), min(last, here + count)
        if low < high:
            yield part, there + low - here, there + high - here


def megatron_runs(row: WeightRow, arch: Architecture, part: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Rows first to last-1 of row.hf[part], in order, as (first, last) rows of the Megatron tensor."""
    for which, there, here, count in _runs(row, arch):
        low, high = max(first, there), min(last, there + count)
        if which == part and low < high:
            yield here + low - there, here + high - there


def _runs(row: WeightRow, arch: Architecture) -> Iterator[tuple[int, int, int, int]]:
    """(which of row.hf, its row, the Megatron row, how many)."""
    done = [0] * len(row.hf)
    here = 0
    for part, count in row.segments(arch):
        yield part, done[part], here, count
        done[part] += count
        here += count
