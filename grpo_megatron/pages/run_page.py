"""The report of one run, or of two beside each other. The browser makes everything from data (page/run.js)."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.pages.kit import embedded_json, html_page
from grpo_megatron.pages.panels import PHASE, PagePanel, page_panels
from grpo_megatron.pages.run_folder import RunFolder, rounded

MAX_EVENTS = 200
LONGEST_SETTING = 400  # characters of a config's value


def render_report(runs: Sequence[RunFolder], *, is_live: bool = False) -> str:
    """Make the page of one or two runs as `update` has read them. `is_live`: the run will write or append to it again."""
    panels, constants = drawn_panels(runs)
    drawn = {name for panel in panels for name, _ in panel.curves}
    data = {
        "runs": [_run_data(run, drawn, is_live) for run in runs],
        "panels": [vars(panel) for panel in panels],
        "constants": constants,
        "live": is_live,
    }
    return html_page("run", " and ".join(run.name for run in runs), data)


def appended_step(step: int, metrics: Mapping[str, float]) -> str:
    """Make what is appended to the page of one run for a further step: about one kilobyte per thirty metrics."""
    values = {name: rounded(value) for name, value in metrics.items()}
    row = embedded_json({"step": step, "time": round(time.time(), 1), "metrics": values})
    return f'<script type="application/json" class="step">{row}</script>\n'


def drawn_panels(runs: Sequence[RunFolder]) -> tuple[list[PagePanel], dict[str, list[float | None]]]:
    """Choose the panels with something to see, and the metrics that never change: name -> value in each run."""
    names = sorted({name for run in runs for name in run.curves.names()})
    constants = {name: values for name in names if (values := _constants(runs, name)) is not None}
    guards: dict[str, dict[str, Any]] = {}
    for run in runs:
        for key, value in run.settings.items():
            if match := re.fullmatch(r"guards\.(\w+)\.(low|high)", key):
                guards.setdefault(match[1], {})[match[2]] = value
    panels = []
    for panel in page_panels(names, guards):
        # A reward that stays at 0 is shown, but not that of a run which draws nothing: it means nothing there.
        is_kept = panel.always and "timing_s/gen" in names
        if not is_kept and all(name in constants for name, _ in panel.curves):
            continue
        varying = [curve for curve in panel.curves if any(constants.get(curve[0], [1.0]))]
        panel.curves = _merged(runs, varying or panel.curves[:1])
        panels.append(panel)
    drawn = {name for panel in panels for name, _ in panel.curves}
    is_left = (name for name in constants if name not in drawn and not PHASE.fullmatch(name))
    return panels, {name: constants[name] for name in is_left}


def _merged(runs: Sequence[RunFolder], curves: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """One curve for several that are equal everywhere, with all their labels: drawn over each other, they would be one."""
    merged: list[tuple[str, str, list[list[float | None]]]] = []
    for name, label in curves:
        values = [run.curves.means(name) for run in runs]
        same = next((place for place, (_, _, other) in enumerate(merged) if other == values), None)
        if same is None:
            merged.append((name, label, values))
        else:
            merged[same] = (merged[same][0], f"{merged[same][1]}; {label}", values)
    return [(name, label) for name, label, _ in merged]


def _constants(runs: Sequence[RunFolder], name: str) -> list[float | None] | None:
    """The value in each run, None where it is absent; None: it changes somewhere. A single step's value may still change."""
    values = [run.curves.constant(name) if name in run.curves.names() else None for run in runs]
    for run, value in zip(runs, values, strict=True):
        if name in run.curves.names() and (value is None or (value and len(run.curves.steps()) == 1)):
            return None
    return values


def _run_data(run: RunFolder, drawn: set[str], is_live: bool) -> dict[str, Any]:
    curves = run.curves
    phases = [name for name in curves.names() if PHASE.fullmatch(name)]
    shown = [name for name in curves.names() if name in drawn or PHASE.fullmatch(name) or name == "timing_s/step"]
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state(),
        "updated": time.time(),
        "silentSince": None if is_live else run.silent_since(),  # the page of a live run knows its own age
        "done": run.steps_done(),
        "total": run.total_steps(),
        "stepSeconds": run.step_seconds(),
        "secondsLeft": run.seconds_left(),
        "width": curves.width,
        "steps": curves.steps(),
        "metrics": {name: curves.data(name) for name in shown},
        "phases": phases,
        "settings": {key: _shown(value) for key, value in run.settings.items()},
        "attempts": [
            {
                "number": attempt.number,
                "changes": [[key, _shown(old), _shown(new)] for key, old, new in attempt.changes],
            }
            for attempt in run.attempts
        ],
        "events": run.events[-MAX_EVENTS:],
        "numEvents": len(run.events),
        "samples": run.samples(),
    }


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SETTING else f"{text[:LONGEST_SETTING]}... ({len(text):,} characters)"
