"""Reduction: the records of all ranks to one number per metric, in time and memory linear in ranks x metrics.

A rank sends its numbers as one array, and the names once beside it. Ranks that record the same metrics (most do) send the same
layout, so their arrays are stacked and a metric is a few columns. Sums run in rank order, whatever the layouts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
WIDTHS = {
    "mean": 2,
    "std": 3,
    "population_std": 3,
    "effective_sample_size": 3,
}  # numbers per metric; the others have one
PERCENTILE = "percentile"


@dataclass(frozen=True)
class RankRecords:
    """What one rank has recorded. `layout`: (name, kind) of each metric in `numbers`, sorted."""

    layout: tuple[tuple[str, str], ...]
    numbers: Array  # float64
    percentiles: dict[str, tuple[float, int, Array]] = field(
        default_factory=dict
    )  # name -> q, number of values, some of them


def rank_records(states: Mapping[str, tuple[str, Any]]) -> RankRecords:
    """From name -> (kind, state): a number, or (sum, count), (count, mean, squared deviations), (q, count, values)."""
    plain = sorted((name, kind) for name, (kind, _) in states.items() if kind != PERCENTILE)
    numbers = [np.atleast_1d(np.asarray(states[name][1], dtype=np.float64)) for name, _ in plain]
    percentiles = {name: state for name, (kind, state) in states.items() if kind == PERCENTILE}
    return RankRecords(tuple(plain), np.concatenate([np.empty(0), *numbers]), percentiles)


def reduce_records(ranks: Sequence[RankRecords]) -> dict[str, float]:
    """Name -> its value over all ranks, which are in rank order. A metric without a record is omitted."""
    columns: dict[
        str, list[tuple[str, list[int], Array]]
    ] = {}  # name -> kind, ranks and their numbers, for each layout
    of_layout: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, records in enumerate(ranks):
        of_layout.setdefault(records.layout, []).append(rank)
    for layout, own in of_layout.items():
        matrix, start = np.stack([ranks[rank].numbers for rank in own]), 0
        for name, kind in layout:
            end = start + WIDTHS.get(kind, 1)
            columns.setdefault(name, []).append((kind, own, matrix[:, start:end]))
            start = end
    values: dict[str, float | None] = {}
    for name, parts in columns.items():
        kinds = sorted({kind for kind, _, _ in parts} | ({PERCENTILE} if name in ranks[0].percentiles else set()))
        assert len(kinds) == 1, f"metric {name!r} is recorded as {kinds} on different ranks"
        values[name] = _REDUCTIONS[kinds[0]](*_in_rank_order(parts))
    for name in {name for records in ranks for name in records.percentiles}:
        assert name not in columns, f"metric {name!r} is recorded as percentile and as {columns[name][0][0]}"
        values[name] = _quantile([records.percentiles[name] for records in ranks if name in records.percentiles])
    return {name: value for name, value in values.items() if value is not None}


def _in_rank_order(parts: Sequence[tuple[str, list[int], Array]]) -> list[list[float]]:
    """The columns of one metric."""
    if len(parts) == 1:
        return [column.tolist() for column in parts[0][2].T]
    order = np.argsort(np.concatenate([own for _, own, _ in parts]))
    return [column.tolist() for column in np.concatenate([numbers for _, _, numbers in parts])[order].T]


def largest_of(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def smallest_of(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values)


def _mean(sums: Sequence[float], counts: Sequence[float]) -> float | None:
    count = sum(counts)
    return sum(sums) / count if count else None


def merge_moments(
    counts: Sequence[float], means: Sequence[float], squares: Sequence[float]
) -> tuple[float, float, float]:
    """(count, mean, sum of squared deviations) of the union. Sums of squares would cancel when std << mean."""
    count = sum(counts)
    mean = sum(n * m for n, m in zip(counts, means, strict=True)) / count
    return count, mean, sum(s + n * (m - mean) ** 2 for n, m, s in zip(counts, means, squares, strict=True))


def _std(counts: Sequence[float], means: Sequence[float], squares: Sequence[float], ddof: int = 1) -> float | None:
    count, _, m2 = merge_moments(counts, means, squares)
    return math.sqrt(m2 / (count - ddof)) if count > ddof else None


def _effective_sample_size(counts: Sequence[float], means: Sequence[float], squares: Sequence[float]) -> float | None:
    count, mean, m2 = merge_moments(counts, means, squares)
    return mean**2 / (mean**2 + m2 / count) if mean else None


def _quantile(states: Sequence[tuple[float, int, Array]]) -> float | None:
    """Inverse of the weighted distribution: where a rank sent one value of every k, each counts k times."""
    states = [state for state in states if state[1]]
    if not states:
        return None
    values = np.concatenate([kept for _, _, kept in states])
    order = np.argsort(values, kind="stable")
    weights = np.concatenate([np.full(len(kept), n / len(kept)) for _, n, kept in states])
    cumulative = weights[order].cumsum()
    threshold = (states[0][0] / 100 - 1e-9) * cumulative[-1]  # 1e-9: 7 % of 100 is 7.000000000000001 in binary
    return float(values[order[min(int(np.searchsorted(cumulative, threshold)), len(values) - 1)]])


_REDUCTIONS: dict[str, Callable[..., float | None]] = {
    "mean": _mean,
    "std": _std,
    "population_std": functools.partial(_std, ddof=0),
    "effective_sample_size": _effective_sample_size,
    "sum": sum,
    "max": largest_of,
    "min": smallest_of,
    "seconds": largest_of,
}
