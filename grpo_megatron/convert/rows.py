"""Maps a range of Megatron rows to rows of Hugging Face tensors, and the reverse.

On one rank (tp 1) a Megatron tensor has the rows of its Hugging Face tensors in another order (`WeightRow.runs`). So a
conversion copies rows: it computes nothing, and never needs a whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.weights.table import WeightRow


def hf_runs(row: WeightRow, arch: Architecture, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Megatron rows first to last-1, in order, as (index into row.hf, first, last of its rows)."""
    for part, hf_row, megatron_row, count in _runs(row, arch):
        low, high = max(first, megatron_row), min(last, megatron_row + count)
        if low < high:
            yield part, hf_row + low - megatron_row, hf_row + high - megatron_row


def megatron_runs(row: WeightRow, arch: Architecture, part: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Rows first to last-1 of row.hf[part], in order, as (first, last) rows of the Megatron tensor."""
    for run_part, hf_row, megatron_row, count in _runs(row, arch):
        low, high = max(first, hf_row), min(last, hf_row + count)
        if run_part == part and low < high:
            yield megatron_row + low - hf_row, megatron_row + high - hf_row


def _runs(row: WeightRow, arch: Architecture) -> Iterator[tuple[int, int, int, int]]:
    """(index into row.hf, first row there, first row of the Megatron tensor, number of rows) of every run."""
    hf_rows = [0 for _ in row.hf]
    megatron_row = 0
    for part, count in row.segments(arch):
        yield part, hf_rows[part], megatron_row, count
        hf_rows[part] += count
        megatron_row += count
