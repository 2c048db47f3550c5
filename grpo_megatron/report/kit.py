"""The kit of all HTML pages, the panels in which metrics are drawn, and the report of one run, or of two beside each other.

A page is one template (page/base.html), one stylesheet and one set of charts (page/kit.js) in one file that needs no network; a
content security policy forbids every request. A model may write anything, and none of it can become markup: jinja2 escapes the
texts of the template, and all other texts are JSON in a script element, with <, > and & escaped, which the page adds as text
nodes. TeX is shown as TeX.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_megatron.report.run_folder import RunFolder, rounded
from grpo_megatron.types import PromptImage
from grpo_megatron.untrusted import parse_yaml, visible

if TYPE_CHECKING:
    from jinja2 import Environment

PAGE_PARTS = Path(__file__).parent / "page"


def html_page(kind: str, title: str, data: Any, **parts: Any) -> str:
    """Fills the template page/KIND.html; the script page/KIND.js reads `data`. `parts` is for the template.

    The page ends with a script element, without closing tags, so that further ones can be appended to the file.
    """
    texts = {"title": visible(title), "kind": kind, "data": embedded_json(data)}
    return _environment(is_html=True).get_template(f"{kind}.html").render(**texts, **parts) + "\n"


def text_page(kind: str, **parts: Any) -> str:
    """Fills the template page/KIND.txt, for the terminal. Nothing is escaped; texts are made visible."""
    return _environment(is_html=False).get_template(f"{kind}.txt").render(**parts)


def embedded_json(value: Any) -> str:
    """Writes JSON that can stand in a script element, whatever strings `value` has. The strings are made visible."""
    text = json.dumps(_all_visible(value), ensure_ascii=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _all_visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {_all_visible(key): _all_visible(one) for key, one in value.items()}
    return [_all_visible(one) for one in value] if isinstance(value, list | tuple) else value


@functools.cache
def _environment(*, is_html: bool) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def printed(value: Any) -> Any:
        return visible(value) if type(value) is str else value  # markup of our own stays

    options: dict[str, Any] = {"autoescape": is_html, "undefined": StrictUndefined, "trim_blocks": is_html}
    environment = Environment(loader=FileSystemLoader(PAGE_PARTS), finalize=printed, **options)
    environment.globals["source"] = lambda name: (PAGE_PARTS / name).read_text(encoding="utf-8")
    return environment


THUMBNAIL_EDGE, MAX_THUMBNAILS = 96, 4  # pixels of the longer edge; different images of a prompt that are shown


def thumbnails(images: Iterable[PromptImage]) -> list[str]:
    """Shrinks the first different images of a prompt to data: URIs of some kilobytes at most."""
    from PIL import Image

    made = []
    for image in list({image.digest: image for image in images}.values())[:MAX_THUMBNAILS]:
        cell = math.isqrt(len(image.pixels) // (3 * image.num_tokens))
        shown = Image.frombytes("RGB", (image.size[1] * cell, image.size[0] * cell), image.pixels)
        shown.thumbnail((THUMBNAIL_EDGE, THUMBNAIL_EDGE))
        shown.save(file := io.BytesIO(), "WEBP", quality=60)
        made.append(f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}")
    return made


# -- panels: which metrics are drawn together, with a sentence on how to read them, and reference lines ----------------
# page/panels.yaml lists the known ones. Other metrics get panels of their own, by the part of their name before the last slash.
# So rewards and tasks that the user adds appear without a change here.

MAX_CURVES = 8  # in one panel
OTHER, VALIDATION = "Other metrics", "Validation in detail"  # groups of the panels that are not listed


@dataclass(frozen=True)
class PagePanel:
    """A panel. `curves`: pairs of a metric and its label. `rules`: pairs of a regular expression of metrics, and the label."""

    group: str
    title: str
    unit: str = ""
    text: str = ""
    log: bool = False
    references: Sequence[tuple[float, str]] = ()
    curves: Sequence[tuple[str, str]] = ()
    always: bool = False
    guard: str = ""
    rules: Sequence[tuple[re.Pattern[str], str]] = ()

    def curves_of(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Selects the curves of the metrics that the rules name, in the order of the rules."""
        return [
            (name, match.expand(label).replace("_", " "))
            for rule, label in self.rules
            for name in names
            if (match := rule.fullmatch(name))
        ]


@functools.cache
def _phases() -> dict[str, tuple[str, str]]:
    """Metrics that are drawn in a stack, not as curves: the role that works in each phase, and what it does."""
    roles = parse_yaml((PAGE_PARTS / "phases.yaml").read_text(encoding="utf-8"))
    return {f"timing_s/{name}": (role, text) for role, known in roles.items() for name, text in known.items()}


@functools.cache
def _known_panels() -> list[PagePanel]:
    groups = parse_yaml((PAGE_PARTS / "panels.yaml").read_text(encoding="utf-8"))
    return [
        PagePanel(group, rules=[(re.compile(rule), label) for rule, label in entry.pop("curves").items()], **entry)
        for group, entries in groups.items()
        for entry in entries
    ]


def page_panels(names: Iterable[str], guards: Mapping[str, Any]) -> list[PagePanel]:
    """Selects the panels of these metrics; each metric has at least one. `guards`: the section of the run's config."""
    left = [name for name in names if name not in _phases()]
    panels: list[PagePanel] = []
    for known in _known_panels():
        curves = known.curves_of(left)
        left = [name for name in left if name not in dict(curves)]
        references = [*known.references, *_band(guards.get(known.guard))]
        parts = [curves[first : first + MAX_CURVES] for first in range(0, len(curves), MAX_CURVES)]
        panels += [replace(known, references=references, curves=part) for part in parts]
    return [*panels, *_other_panels(left)]


def _band(band: object) -> Iterator[tuple[float, str]]:
    if isinstance(band, Mapping):
        for bound in ("low", "high"):
            if isinstance(band.get(bound), int | float):
                yield float(band[bound]), f"guard, {bound}"


def _other_panels(names: Sequence[str]) -> Iterator[PagePanel]:
    """Makes a panel per prefix: `a/b/mean` and `a/b/max` share one; `a/b` and `a/c` do not, since units may differ."""
    prefixes: dict[str, list[str]] = {}
    for name in sorted(names):
        head, _, last = name.rpartition("/")
        is_statistic = bool(re.fullmatch(r"mean|max|min|std|p\d+", last))
        prefixes.setdefault(head if is_statistic else name, []).append(name)
    for prefix, members in prefixes.items():
        group = VALIDATION if prefix.startswith(("val-aux/", "val/", "val-core/")) else OTHER
        curves = [(name, name.removeprefix(prefix).strip("/") or name.rpartition("/")[2]) for name in members]
        yield PagePanel(group, prefix, curves=curves)


# -- the report of a run: the browser makes everything from data (page/run.js) -----------------------------------------

MAX_EVENTS = 200
LONGEST_SETTING = 400  # characters of a config's value


def render_report(runs: Sequence[RunFolder], *, is_live: bool = False) -> str:
    """Makes the page of one or two runs as `update` has read them. `is_live`: the run will write or append to it again."""
    panels, constants = _drawn_panels(runs)
    drawn = {name for panel in panels for name, _ in panel.curves}
    data = {
        "runs": [_run_data(run, drawn, is_live) for run in runs],
        "panels": [{name: value for name, value in vars(panel).items() if name != "rules"} for panel in panels],
        "constants": constants,
        "live": is_live,
    }
    return html_page("run", " and ".join(run.name for run in runs), data)


def appended_step(step: int, metrics: Mapping[str, float]) -> str:
    """Makes what is appended to the page of one run for a further step: about one kilobyte per thirty metrics."""
    values = {name: rounded(value) for name, value in metrics.items()}
    row = embedded_json({"step": step, "time": round(time.time(), 1), "metrics": values})
    return f'<script type="application/json" class="step">{row}</script>\n'


def _drawn_panels(runs: Sequence[RunFolder]) -> tuple[list[PagePanel], dict[str, list[float | None]]]:
    """Chooses the panels with something to see, and the metrics that never change: name -> value in each run."""
    names = sorted({name for run in runs for name in run.curves.names()})
    constants = {name: values for name in names if (values := _constants(runs, name)) is not None}
    guards: dict[str, dict[str, Any]] = {}
    for run in runs:
        for key, value in run.settings.items():
            if match := re.fullmatch(r"guards\.(\w+)\.(low|high)", key):
                guards.setdefault(match[1], {})[match[2]] = value
    panels = []
    for panel in page_panels(names, guards):
        # A reward that stays at 0 is shown, but not that of a run which generates nothing: it means nothing there.
        is_kept = panel.always and "timing_s/gen" in names
        if is_kept or not all(name in constants for name, _ in panel.curves):
            varying = [curve for curve in panel.curves if any(constants.get(curve[0], [1.0]))]
            panels.append(replace(panel, curves=_merged(runs, varying or panel.curves[:1])))
    drawn = {name for panel in panels for name, _ in panel.curves}
    is_left = (name for name in constants if name not in drawn and name not in _phases())
    return panels, {name: constants[name] for name in is_left}


def _merged(runs: Sequence[RunFolder], curves: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merges curves that are equal everywhere into one with all their labels: the last would hide the others."""
    merged: dict[str, tuple[str, str]] = {}  # the values as text -> the first metric, the labels
    for name, label in curves:
        values = repr([run.curves.means(name) for run in runs])
        first, labels = merged.get(values, (name, ""))
        merged[values] = first, f"{labels}; {label}" if labels else label
    return list(merged.values())


def _constants(runs: Sequence[RunFolder], name: str) -> list[float | None] | None:
    """Looks up the value in each run, None where it is absent; None: it changes somewhere, or after a single step it may."""
    values = [run.curves.constant(name) if name in run.curves.names() else None for run in runs]
    for run, value in zip(runs, values, strict=True):
        if name in run.curves.names() and (value is None or (value and len(run.curves.steps()) == 1)):
            return None
    return values


def _run_data(run: RunFolder, drawn: set[str], is_live: bool) -> dict[str, Any]:
    curves = run.curves
    phases = [name for name in curves.names() if name in _phases()]
    shown = [name for name in curves.names() if name in drawn or name in phases or name == "timing_s/step"]
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state(),
        "updated": time.time(),
        "silentSince": None if is_live else run.silent_since(),  # the page of a live run shows its age
        "done": run.steps_done(),
        "total": run.total_steps(),
        "stepSeconds": run.step_seconds(),
        "secondsLeft": run.seconds_left(),
        "width": curves.width,
        "steps": curves.steps(),
        "metrics": {name: curves.data(name) for name in shown},
        "phases": {name.removeprefix("timing_s/"): _phases()[name] for name in phases},
        "hasRoles": run.settings.get("rollout.placement") == "separate",  # which work at the same time
        "settings": {key: _shown(value) for key, value in run.settings.items()},
        "attempts": [
            {"number": number, "changes": [[key, _shown(old), _shown(new)] for key, old, new in changes]}
            for number, changes in run.attempts
        ],
        "events": run.events[-MAX_EVENTS:],
        "numEvents": len(run.events),
        "recoveries": [one._asdict() for one in run.recoveries()[-MAX_EVENTS:]],
        "samples": run.samples(),
    }


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SETTING else f"{text[:LONGEST_SETTING]}... ({len(text):,} characters)"
