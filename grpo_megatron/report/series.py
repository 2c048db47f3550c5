"""Curves: the metrics of a run in at most MAX_BUCKETS places, however many steps it has.

A bucket covers `width` steps, a power of two: it keeps the mean, the smallest and the largest value of a metric. So a single
spike of a long run stays visible. The memory does not grow with the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

MAX_BUCKETS = 400
DIGITS = 6  # significant ones


@dataclass(slots=True)
class Bucket:
    """`lost`: values that were not finite."""

    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    lost: int = 0

    def add(self, other: Bucket) -> None:
        self.count += other.count
        self.total += other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.lost += other.lost


def bucket_of(value: object) -> Bucket | None:
    """Of one line's value; null is a lost number. None: it is no number at all."""
    if value is None:
        return Bucket(lost=1)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    number = float(value)
    return Bucket(1, number, number, number) if math.isfinite(number) else Bucket(lost=1)


class Curves:
    """Add the lines of metrics.jsonl in order of their steps."""

    def __init__(self) -> None:
        self.width, self.last_step, self.num_rows = 1, -1, 0
        self.last_row: dict[str, Any] = {}
        self._metrics: dict[str, dict[int, Bucket]] = {}
        self._places: set[int] = set()

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            step = row["step"]
            self.last_step, self.num_rows, self.last_row = max(self.last_step, step), self.num_rows + 1, row
            self._places.add(step // self.width)
            for name, value in row.items():
                bucket = bucket_of(value) if name != "step" else None
                if bucket is not None:
                    self._metrics.setdefault(name, {}).setdefault(step // self.width, Bucket()).add(bucket)
            while len(self._places) > MAX_BUCKETS:
                self._merge()

    def _merge(self) -> None:
        self.width *= 2
        self._places = {place // 2 for place in self._places}
        for name, buckets in self._metrics.items():
            merged: dict[int, Bucket] = {}
            for place, bucket in buckets.items():
                merged.setdefault(place // 2, Bucket()).add(bucket)
            self._metrics[name] = merged

    def names(self) -> list[str]:
        return sorted(self._metrics)

    def steps(self) -> list[int]:
        """The first step of each bucket."""
        return [place * self.width for place in sorted(self._places)]

    def constant(self, name: str) -> float | None:
        """The value of a metric that has always been the same, to DIGITS digits; None: it changed, or was not finite once."""
        buckets = self._metrics[name].values()
        low, high = min(bucket.low for bucket in buckets), max(bucket.high for bucket in buckets)
        if any(bucket.lost for bucket in buckets) or low > high:
            return None
        return low if rounded(low) == rounded(high) else None

    def means(self, name: str) -> list[float | None]:
        """Per bucket; None where the metric was not recorded."""
        return [bucket.total / bucket.count if bucket and bucket.count else None for bucket in self._buckets(name)]

    def data(self, name: str) -> dict[str, Any]:
        """For the page: means `y` per bucket; `low`, `high` where a bucket has several steps; `lost`: numbers of buckets.

        `count`: how many values the last bucket has.
        """
        buckets = list(self._buckets(name))
        last = buckets[-1]
        result: dict[str, Any] = {
            "y": [rounded(value) for value in self.means(name)],
            "count": last.count if last else 0,
        }
        if self.width > 1:
            result["low"] = [rounded(bucket.low) if bucket else None for bucket in buckets]
            result["high"] = [rounded(bucket.high) if bucket else None for bucket in buckets]
        if lost := [number for number, bucket in enumerate(buckets) if bucket and bucket.lost]:
            result["lost"] = lost
        return result

    def _buckets(self, name: str) -> Iterator[Bucket | None]:
        buckets = self._metrics.get(name, {})
        for place in sorted(self._places):
            yield buckets.get(place)


def rounded(value: float | None) -> float | None:
    """To DIGITS significant digits; None for what is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")
