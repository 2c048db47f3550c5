"""RunFolder: what the files of a run say about it, while it runs and afterwards. Nothing else is needed: no process, no network.

metrics.jsonl, config.yaml and config_attempts/, events.jsonl, outcome.json, report_samples.jsonl, and heartbeats/ of rank 0.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.reading import ReadError, parse_yaml
from grpo_megatron.report.metrics_file import METRICS_FILE, MetricsTail
from grpo_megatron.report.samples import KeptSamples
from grpo_megatron.report.series import Curves
from grpo_megatron.storage.run_files import read_events

SILENT_S = 60.0  # a running rank writes its heartbeat every few seconds
RECENT = 20  # steps, whose median predicts the next ones
ENDED = ("stopped", "stalled", "failed", "done")  # kinds of events
FlatSettings = dict[str, Any]  # "section.key" -> value


@dataclass(frozen=True)
class Attempt:
    """One start of the run. `changes`: the keys that differ from the first attempt's config, as (key, first, now)."""

    number: int
    changes: list[tuple[str, Any, Any]]


@dataclass(frozen=True)
class Now:
    """What rank 0 was doing at its last heartbeat, `age_s` seconds ago. Seconds in the phase and in the whole step."""

    phase: str
    phase_s: float
    step: int | None
    step_s: float
    age_s: float


class RunFolder:
    """`update` reads what is new. Every file may be absent, cut off or damaged: then it says nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.curves = Curves()
        self.settings: FlatSettings = {}
        self.attempts: list[Attempt] = []
        self.events: list[dict[str, Any]] = []
        self._tail = MetricsTail(folder / METRICS_FILE)
        self._step_seconds: deque[float] = deque(maxlen=RECENT)
        self._configs: dict[Path, tuple[int, FlatSettings]] = {}  # time of the last change, content

    @property
    def name(self) -> str:
        return self.settings.get("trainer.experiment_name") or self.folder.resolve().name

    def update(self) -> None:
        is_new, rows = self._tail.read()
        if is_new:
            self.curves = Curves()
            self._step_seconds.clear()
        self.curves.add(rows)
        seconds = [row.get("timing_s/step") for row in rows[-RECENT:]]
        self._step_seconds.extend(value for value in seconds if isinstance(value, int | float))
        self.events = read_events(self.folder)
        self._read_config()

    def _read_config(self) -> None:
        self.settings = self._config(self.folder / "config.yaml")
        self.attempts = []
        for path in sorted((self.folder / "config_attempts").glob("*.yaml")):
            if path.stem.isdecimal():
                changes = [(key, self.settings.get(key), value) for key, value in self._config(path).items()]
                self.attempts.append(Attempt(int(path.stem), changes))

    def _config(self, path: Path) -> FlatSettings:
        """Reading YAML takes some 20 ms, so an unchanged file is read once."""
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            return {}
        if path not in self._configs or self._configs[path][0] != changed:
            self._configs[path] = changed, flat_config(_yaml(path))
        return self._configs[path][1]

    def samples(self) -> list[dict[str, Any]]:
        """The kept steps of report_samples.jsonl, oldest first."""
        return KeptSamples(self.folder).steps

    def total_steps(self) -> int | None:
        """Of the newest config."""
        settings = self.settings | {key: now for attempt in self.attempts for key, _, now in attempt.changes}
        total = settings.get("trainer.total_training_steps")
        return total if isinstance(total, int) else None

    def steps_done(self) -> int:
        total = self.total_steps()
        done = self.curves.last_step + 1
        return done if total is None else min(done, total)  # the last validation is logged as a step of its own

    def step_seconds(self) -> float | None:
        """The median of the last steps."""
        return statistics.median(self._step_seconds) if self._step_seconds else None

    def seconds_left(self) -> float | None:
        """For the steps that are left, without checkpoints; None: unknown, or the run has ended."""
        total, each = self.total_steps(), self.step_seconds()
        return (
            None if total is None or each is None or self.state() != "running" else each * (total - self.steps_done())
        )

    def state(self) -> str:
        """running, or one of ENDED: what the last event says. A run that was killed leaves no event: see `silent_since`."""
        kinds = [event["kind"] for event in self.events if event["kind"] != "guard"]
        if not kinds:  # of a version without events
            return "done" if (self.folder / "outcome.json").exists() else "running"
        return kinds[-1] if kinds[-1] in ENDED else "running"

    def silent_since(self) -> float | None:
        """Unix time of the last heartbeat, if the run seems to go on and that is longer ago than SILENT_S."""
        now = self.now() if self.state() == "running" else None
        return time.time() - now.age_s if now is not None and now.age_s > SILENT_S else None

    def now(self) -> Now | None:
        """None without a readable heartbeat."""
        path = self.folder / "heartbeats" / "rank_00000.json"
        try:
            beat, age_s = json.loads(path.read_text(encoding="utf-8")), time.time() - path.stat().st_mtime
            phase = str(beat["phase"]).rpartition("/")[2]
            return Now(phase, float(beat["phase_s"]), beat["step"], float(beat.get("step_s", 0.0)), max(0.0, age_s))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def flat_config(settings: Mapping[str, Any], prefix: str = "") -> FlatSettings:
    """{"section": {"key": value}} -> {"section.key": value}."""
    result: FlatSettings = {}
    for key, value in settings.items():
        is_section = isinstance(value, Mapping) and bool(value)
        result |= flat_config(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return result


def _yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, ReadError):
        return {}
    return content if isinstance(content, dict) else {}
