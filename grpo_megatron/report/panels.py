"""Panels: which metrics are drawn together, with title, unit, a sentence on how to read them, and reference lines.

Metrics that no entry of PANELS names get panels of their own, by the part of their name before the last slash. So rewards
and tasks that the user adds appear without a change here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.report.panel_rules import PANELS, VALIDATION, PanelRule

PHASE = re.compile(r"timing_s/(?!step$).+")  # drawn in a stack, not as curves
MAX_CURVES = 8  # in one panel
OTHER = "Other metrics"


@dataclass
class PagePanel:
    """`curves`: (metric, label)."""

    group: str
    title: str
    unit: str = ""
    text: str = ""
    log: bool = False
    references: list[tuple[float, str]] = field(default_factory=list)
    curves: list[tuple[str, str]] = field(default_factory=list)
    always: bool = False


def page_panels(names: Iterable[str], guards: Mapping[str, Any]) -> list[PagePanel]:
    """The panels of these metrics, each of which has at least one. `guards`: the section of the run's config."""
    left = [name for name in names if not PHASE.fullmatch(name)]
    panels: list[PagePanel] = []
    for rule in PANELS:
        curves = [(name, label) for name in left if (label := _label(rule, name)) is not None]
        curves.sort(key=lambda curve: _place(rule, curve[0]))
        found = {name for name, _ in curves}
        left = [name for name in left if name not in found]
        for first in range(0, len(curves), MAX_CURVES):
            panel = PagePanel(rule.group, rule.title, rule.unit, rule.text, rule.log, always=rule.always)
            panel.references = [*rule.references, *_band(guards.get(rule.guard))]
            panel.curves = curves[first : first + MAX_CURVES]
            panels.append(panel)
    return [*panels, *_other_panels(left)]


def _label(rule: PanelRule, name: str) -> str | None:
    for pattern, label in rule.patterns:
        if match := re.fullmatch(pattern, name):
            return match.expand(label)
    return None


def _place(rule: PanelRule, name: str) -> int:
    """Curves of a panel are in the order of its patterns."""
    return next(place for place, (pattern, _) in enumerate(rule.patterns) if re.fullmatch(pattern, name))


def _band(band: object) -> Iterator[tuple[float, str]]:
    if isinstance(band, Mapping):
        for bound in ("low", "high"):
            if isinstance(band.get(bound), int | float):
                yield float(band[bound]), f"guard, {bound}"


def _other_panels(names: Sequence[str]) -> Iterator[PagePanel]:
    """A panel per prefix: `a/b/mean` and `a/b/max` together; of `a/b` and `a/c` each has its own, since units may differ."""
    prefixes: dict[str, list[str]] = {}
    for name in sorted(names):
        head, _, last = name.rpartition("/")
        is_statistic = bool(re.fullmatch(r"mean|max|min|std|p\d+", last))
        prefixes.setdefault(head if is_statistic else name, []).append(name)
    for prefix, members in prefixes.items():
        group = VALIDATION if prefix.startswith(("val-aux/", "val/", "val-core/")) else OTHER
        curves = [(name, name.removeprefix(prefix).strip("/") or name.rpartition("/")[2]) for name in members]
        yield PagePanel(group, prefix, curves=curves)
