"""RunFolder: the state of a run from its files, while it runs and afterwards, on any machine. No process is asked.

The files are metrics.jsonl, config.yaml and config_attempts/, events.jsonl, report_samples.jsonl, and heartbeats/ of rank 0. A
file may be absent, cut off or damaged.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import msgspec

from grpo_megatron.processes.process import start_ticks
from grpo_megatron.storage.files import write_file
from grpo_megatron.storage.run_files import read_events
from grpo_megatron.untrusted import MAX_YAML, ReadError, check_regular, parse_yaml, read_json, read_text

# -- metrics.jsonl: one JSON object per step, {"step": 3, "critic/score/mean": 0.25, ...}; null: a number that is not finite

METRICS_FILE = "metrics.jsonl"
StepMetrics = dict[str, Any]  # one line: "step", and a number or null per metric
READ_AT_ONCE = 1 << 24  # bytes
MAX_BUCKETS = 400
LONG_INTEGER = 16  # digits
DIGITS = 6  # significant ones
LONGEST_S = 1e6  # of a phase or a step; what is longer was not measured


def metric_rows(lines: Iterable[bytes]) -> Iterator[StepMetrics]:
    """Reads the JSON objects of lines that have a step. Lines that are cut off or damaged are left out, whatever their bytes."""
    for line in lines:
        try:
            row = json.loads(line, parse_int=_number)
        except (ValueError, RecursionError):  # no JSON, no UTF-8
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            yield row


def _number(digits: str) -> float:
    """Reads a step as an integer; one of thousands of digits would not fit into a float."""
    return int(digits) if len(digits) < LONG_INTEGER else float(digits)


def read_metrics(path: Path) -> list[StepMetrics]:
    """Reads the objects of a metrics.jsonl in file order, without damaged lines. Raises OSError, ReadError."""
    check_regular(path)
    return list(metric_rows(path.read_bytes().splitlines()))


@dataclass(slots=True)
class Bucket:
    """The count, sum, smallest and largest of some values. `lost` counts values that were not finite."""

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


class Curves:
    """The metrics of a run in at most MAX_BUCKETS places, however many steps it has. Rows are added in order of their steps.

    A bucket covers `width` steps, a power of two: it keeps the mean, the smallest and the largest value of a metric. So a
    single spike of a long run stays visible, and the memory does not grow with the number of steps.
    """

    def __init__(self) -> None:
        self.width, self.last_step, self.num_rows = 1, -1, 0
        self._metrics: dict[str, dict[int, Bucket]] = {}
        self._places: set[int] = set()

    def add(self, rows: Iterable[StepMetrics]) -> None:
        for row in rows:
            step = row["step"]
            self.last_step, self.num_rows = max(self.last_step, step), self.num_rows + 1
            self._places.add(step // self.width)
            for name, value in row.items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if name == "step" or not (is_number or value is None):
                    continue
                is_known = value is not None and math.isfinite(value)
                bucket = Bucket(1, float(value), float(value), float(value)) if is_known else Bucket(lost=1)
                self._metrics.setdefault(name, {}).setdefault(step // self.width, Bucket()).add(bucket)
            while len(self._places) > MAX_BUCKETS:
                self._halve()

    def _halve(self) -> None:
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
        """Lists the first step of each bucket."""
        return [place * self.width for place in sorted(self._places)]

    def constant(self, name: str) -> float | None:
        """Finds the value of a metric that was always the same, to DIGITS digits; None: it changed, or was not finite once."""
        buckets = self._metrics[name].values()
        low, high = min(bucket.low for bucket in buckets), max(bucket.high for bucket in buckets)
        if any(bucket.lost for bucket in buckets) or low > high:
            return None
        return low if rounded(low) == rounded(high) else None

    def means(self, name: str) -> list[float | None]:
        """Computes the mean of each bucket; None where the metric was not recorded."""
        return [bucket.total / bucket.count if bucket and bucket.count else None for bucket in self._buckets(name)]

    def total(self, name: str, steps: range) -> float:
        """Sums a metric over steps; in a bucket of several steps each has the mean."""
        buckets = [self._metrics.get(name, {}).get(step // self.width) for step in steps]
        return sum(bucket.total / bucket.count for bucket in buckets if bucket and bucket.count)

    def data(self, name: str) -> dict[str, Any]:
        """Makes the page's data: means `y` per bucket; `low`, `high` where one has several steps; `lost`: numbers of buckets.

        `count`: how many values the last bucket has.
        """
        buckets = self._buckets(name)
        result: dict[str, Any] = {
            "y": [rounded(value) for value in self.means(name)],
            "count": buckets[-1].count if buckets[-1] else 0,
        }
        if self.width > 1:
            result["low"] = [rounded(bucket.low) if bucket else None for bucket in buckets]
            result["high"] = [rounded(bucket.high) if bucket else None for bucket in buckets]
        if lost := [number for number, bucket in enumerate(buckets) if bucket and bucket.lost]:
            result["lost"] = lost
        return result

    def _buckets(self, name: str) -> list[Bucket | None]:
        buckets = self._metrics.get(name, {})
        return [buckets.get(place) for place in sorted(self._places)]


def rounded(value: float | None) -> float | None:
    """Rounds to DIGITS significant digits; None for what is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


# -- report_samples.jsonl: two groups of some steps, with the log-probabilities of engine and policy at each token -----
# One line per step that is kept:
#
# {"step": 12, "groups": [{"uid", "source", "prompt", "answer", "images", "samples": [SAMPLE, ...]}, ...]}
#
# `images`: thumbnails of the prompt's images as data: URIs; absent: it has none.
#
# SAMPLE: index, reward, score, advantage (null: none), finish_reason, status, tokens (their number), failure, metrics, and
# `pieces`: [text, log-probability, policy's minus engine's] of each token; null: there is none. The log-probability is the
# engine's if the sample is `drawn`, and the policy's if it is from a file. `cut` tokens are left out after piece `cut_at`.
# `turns` of a trajectory: {kind, end (of its pieces), tokens, trained (of them), reward, clock (engine steps), seconds}. One of
# several token sequences has a SAMPLE for each, in their order, with `row`, `rows` (their number) and `prompt`.

SAMPLES_FILE = "report_samples.jsonl"
MAX_STEPS, NEWEST = 12, 5  # steps that are kept; the first one, the newest ones, and others between them


class _StoredSample(TypedDict):
    """The parts of a sample that are read here; the page reads more."""

    reward: float | None
    advantage: float | None
    tokens: int
    pieces: list[tuple[str, float | None, float | None]]


class _StoredGroup(TypedDict):
    prompt: str
    answer: str
    images: NotRequired[list[str]]
    samples: Annotated[list[_StoredSample], msgspec.Meta(min_length=1)]


class KeptSamples:
    """The steps whose samples are kept in the file, with those of earlier attempts."""

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        """Reads the file. `first_step`: later steps of an earlier attempt are dropped; None keeps all."""
        self.path = folder / SAMPLES_FILE
        rows = read_metrics(self.path) if self.path.is_file() else []
        self.steps = [row for row in rows if _is_sample_step(row) and (first_step is None or row["step"] < first_step)]

    def add(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """Keeps the step, and writes the file. Raises OSError."""
        self.steps = [
            *(stored for stored in self.steps if stored["step"] < step),
            {"step": step, "groups": list(groups)},
        ]
        if len(self.steps) > MAX_STEPS:  # the one whose neighbours are closest goes
            steps = [stored["step"] for stored in self.steps]
            del self.steps[min(range(1, len(steps) - NEWEST), key=lambda n: (steps[n + 1] - steps[n - 1], n))]
        write_file(self.path, (json.dumps(stored) + "\n" for stored in self.steps))


def _is_sample_step(row: StepMetrics) -> bool:
    try:
        msgspec.convert(row.get("groups"), list[_StoredGroup])
    except msgspec.ValidationError:
        return False
    return True


# -- all files of a run ------------------------------------------------------------------------------------------------

SILENT_S = 60.0  # a running rank writes its heartbeat every few seconds
GONE_S = 10.0
RECENT = 20  # steps, whose median predicts the next ones
ENDED = ("stopped", "stalled", "failed", "done")  # kinds of events
FlatSettings = dict[str, Any]  # "section.key" -> value
MAX_AGAIN = 10_000  # steps that are made again


class Recovered(NamedTuple):
    """A loss of ranks, and what it cost. The step that was under way is among those that are made again."""

    time: float  # Unix time, when all ranks had ended
    steps_done: int
    who: str
    layout: str  # before and after
    seconds: tuple[float, ...] = ()  # of `healed` in events.jsonl; (): another loss came before
    steps_again: int = 0
    tokens_again: int = 0


class Now(NamedTuple):
    """The phase of rank 0 at its last heartbeat, `age_s` seconds ago, and its seconds in the phase and the step."""

    phase: str
    phase_s: float
    step: int | None
    step_s: float
    age_s: float


class RunFolder:
    """The state of a run from its files; `update` reads what is new.

    `attempts` has the number of each further start, and the keys that differ from the first one's config as (key, first, now).
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.curves = folder, Curves()
        self.settings: FlatSettings = {}
        self.attempts: list[tuple[int, list[tuple[str, Any, Any]]]] = []
        self.events: list[dict[str, Any]] = []
        self._inode, self._offset, self._rest = 0, 0, b""  # of metrics.jsonl; the rest: a line that is not whole yet
        self._step_seconds: deque[float] = deque(maxlen=RECENT)
        self._configs: dict[Path, tuple[int, FlatSettings]] = {}  # time of the last change, content

    @property
    def name(self) -> str:
        return str(self.settings.get("trainer.experiment_name") or self.folder.resolve().name)

    def update(self) -> None:
        self._read_metrics()
        self.events = read_events(self.folder)
        self.settings = self._config(self.folder / "config.yaml")
        self.attempts = []
        for path in sorted((self.folder / "config_attempts").glob("*.yaml")):
            if path.stem.isdecimal():
                changes = [(key, self.settings.get(key), value) for key, value in self._config(path).items()]
                self.attempts.append((int(path.stem), changes))

    def _read_metrics(self) -> None:
        """Adds the new complete lines to the curves. A file that was replaced is read from its beginning."""
        try:
            check_regular(self.folder / METRICS_FILE)
            file = (self.folder / METRICS_FILE).open("rb")
        except (OSError, ReadError):
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset, self._rest = status.st_ino, 0, b""
                self.curves = Curves()
                self._step_seconds.clear()
            file.seek(self._offset)
            while part := file.read(READ_AT_ONCE):
                self._offset += len(part)
                *lines, self._rest = (self._rest + part).split(b"\n")
                rows = list(metric_rows(lines))
                self.curves.add(rows)
                seconds = [row.get("timing_s/step") for row in rows[-RECENT:]]
                self._step_seconds.extend(s for s in seconds if isinstance(s, int | float) and 0 <= s < LONGEST_S)

    def _config(self, path: Path) -> FlatSettings:
        """Reads a config; one that has not changed once only, since YAML takes some 20 ms."""
        try:
            changed = path.stat().st_mtime_ns
            if path not in self._configs or self._configs[path][0] != changed:
                content = parse_yaml(read_text(path, MAX_YAML))
                self._configs[path] = changed, flat_config(content if isinstance(content, dict) else {})
        except (OSError, ValueError):
            return {}
        return self._configs[path][1]

    def samples(self) -> list[dict[str, Any]]:
        """Lists the steps of report_samples.jsonl, oldest first."""
        return KeptSamples(self.folder).steps

    def total_steps(self) -> int | None:
        """Reads the number of steps from the newest config; None if it is not readable."""
        settings = self.settings | {key: now for _, changes in self.attempts for key, _, now in changes}
        total = settings.get("trainer.total_training_steps")
        return total if type(total) is int and 0 <= total < 10**LONG_INTEGER else None

    def steps_done(self) -> int:
        total = self.total_steps()
        done = self.curves.last_step + 1
        return done if total is None else min(done, total)  # the last validation is logged as a step of its own

    def warm_up_steps(self) -> int | None:
        """Returns the steps of the supervised warm-up until its model is written; None: it is over, or there is none."""
        steps = self.settings.get("sft.steps")
        return steps if isinstance(steps, int) and not (self.folder / "warmup").exists() else None

    def step_seconds(self) -> float | None:
        """Computes the median seconds of the last steps."""
        return statistics.median(self._step_seconds) if self._step_seconds else None

    def seconds_left(self) -> float | None:
        """Predicts the seconds of the steps that are left, without checkpoints; None: unknown, or the run has ended."""
        total, each = self.total_steps(), self.step_seconds()
        if total is None or each is None or self.state() != "running":
            return None
        return each * (total - self.steps_done())

    def state(self) -> str:
        """Returns "running", or one of ENDED by the last event. A run that was killed leaves no event: see `silent_since`."""
        kinds = [event["kind"] for event in self.events if event["kind"] != "guard"]
        if not kinds:  # of a version without events
            return "done" if (self.folder / "outcome.json").exists() else "running"
        return kinds[-1] if kinds[-1] in ENDED else "running"

    def recoveries(self) -> list[Recovered]:
        """Lists the losses of ranks after which the run went on (trainer.healing), oldest first."""
        found: list[Recovered] = []
        for event in self.events:
            step, seconds = event["step"], event.get("seconds")
            if event["kind"] == "lost" and step is not None:
                found.append(Recovered(event["time"], step, str(event.get("who", "")), str(event.get("layout", ""))))
            elif event["kind"] == "healed" and found and isinstance(seconds, list) and step is not None:
                again = range(max(step, 0), min(found[-1].steps_done, step + MAX_AGAIN) + 1)
                tokens = round(self.curves.total("perf/total_num_tokens", again))
                known = tuple(s for s in seconds if isinstance(s, int | float) and 0 <= s < LONGEST_S)
                found[-1] = found[-1]._replace(seconds=known, steps_again=len(again), tokens_again=tokens)
        return found

    def silent_since(self) -> float | None:
        """Returns the Unix time of the last heartbeat, if a run that goes on has had none for SILENT_S or GONE_S."""
        now = self.now() if self.state() == "running" else None
        least = GONE_S if self._is_gone() else SILENT_S
        return time.time() - now.age_s if now is not None and now.age_s > least else None

    def _is_gone(self) -> bool:
        """Tells whether rank 0 and all launchers were processes of this machine, and none is there any more."""
        folder = self.folder / "heartbeats"
        launchers = list(folder.glob("launcher_*.json"))
        try:
            beats = [read_json(path) for path in (folder / "rank_00000.json", *launchers)]
            gone = [b["node"] == socket.gethostname() and start_ticks(int(b["pid"])) != b["started"] for b in beats]
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return False
        return bool(launchers) and all(gone)

    def now(self) -> Now | None:
        """Reads the phase of rank 0 at its last heartbeat; None without a readable one."""
        path = self.folder / "heartbeats" / "rank_00000.json"
        try:
            beat, age_s = read_json(path), time.time() - path.stat().st_mtime
            phase = str(beat["phase"]).rpartition("/")[2]
            phase_s, step_s, step = float(beat["phase_s"]), float(beat.get("step_s", 0.0)), beat["step"]
            if not (0 <= phase_s < LONGEST_S and 0 <= step_s < LONGEST_S and isinstance(step, int | None)):
                return None
            return Now(phase, phase_s, step, step_s, max(0.0, age_s))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None


def flat_config(settings: Mapping[str, Any], prefix: str = "") -> FlatSettings:
    """Flattens {"section": {"key": value}} to {"section.key": value}."""
    result: FlatSettings = {}
    for key, value in settings.items():
        is_section = isinstance(value, Mapping) and bool(value)
        result |= flat_config(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return result
