"""Sink: one destination of a step's metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

ShownGroups = list[dict[str, Any]]  # samples of a step, as report/samples.py describes them


class Sink:
    """By default it ignores everything but metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise NotImplementedError

    def show(self, step: int, groups: Callable[[], ShownGroups]) -> None:
        """Samples of the step whose metrics are logged next. Calling `groups` takes some milliseconds."""

    def note(self, text: str) -> None:
        """Text for people, of one line or several."""

    def enter(self, step: int | None, phases: Sequence[str]) -> None:
        """The run is now in these nested phases of a step."""

    def close(self) -> None:
        """After the last step, or a failure."""
