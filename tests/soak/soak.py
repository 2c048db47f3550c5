"""A run under faults: attempts that end badly, one after the other, until the run is done. Each is compared with an
undisturbed run of the same config: all metrics but times after every attempt, the exported weights at the end."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_megatron.observability.summary import format_table
from grpo_megatron.pages.run_folder import read_metrics
from grpo_megatron.storage.run_files import on_disk, steps_of
from tests.soak.matrix import DAMAGES, SAVE_POINTS, Fault

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900  # ends an attempt that hangs
TIMES = ("timing", "perf/")  # metrics that differ from run to run
SAVE_FREQ = 3
ADDRESS = re.compile(r"/\S*/")  # folders in messages


@dataclass(frozen=True)
class Attempt:
    """One row of the fault matrix. `problems`: what must not be; empty if all is well."""

    fault: Fault | None
    count: int
    steps_done: int
    exit_code: int
    sees: str
    problems: list[str]


def rows_of(output: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without times."""
    path = output / "metrics.jsonl"
    found = read_metrics(path) if path.exists() else []
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in found]


def run_command(raw: dict[str, Any], folder: Path, **environment: str) -> tuple[int, str, str, list[int]]:
    """Run the real command in `folder`. Returns the exit code, both outputs, and processes that have outlived it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(raw))
    mark = uuid.uuid4().hex
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "GRPO_DEBUG")}
    out, err = folder / "out.txt", folder / "err.txt"
    with out.open("w") as out_file, err.open("w") as err_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.command", "train", str(folder / "run.yaml")],
            cwd=folder,
            env={
                **kept,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "SOAK_MARK": mark,
                "SOAK_OUTPUT": raw["trainer"]["output_dir"],
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=out_file,  # files: a process that outlives the launcher would keep a pipe open
            stderr=err_file,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
    return code, out.read_text(), err.read_text(errors="replace"), _survivors(mark)


def _survivors(mark: str) -> list[int]:
    """Processes of the attempt that are still there ten seconds after its end."""
    deadline = time.monotonic() + 10
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _marked(mark: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"SOAK_MARK={mark}".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def _sees(code: int, out: str, err: str) -> str:
    if code < 0:
        return "nothing: this process is killed"
    return shown(out, err) if code else "the results"


def shown(out: str, err: str) -> str:
    """The line by which the user knows what happened: the first error or warning, else the last line. Without folders."""
    lines = [line for line in err.splitlines() if line.startswith(("error:", "WARNING:"))] or [
        line for line in (out + err).splitlines() if line.strip()
    ][-1:]
    text = ADDRESS.sub("", lines[0]) if lines else ""
    return text if len(text) <= 110 else f"{text[:107]}..."


class Soak:
    """Attempts of the run `raw` in `folder`. `expected`: the rows of metrics.jsonl of the undisturbed run, without times."""

    def __init__(
        self,
        raw: dict[str, Any],
        folder: Path,
        expected: list[dict[str, Any]],
        rng: random.Random,
        note: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.raw, self.folder, self.rng, self.note = raw, folder, rng, note
        self.expected = {row["step"]: row for row in expected}
        self.output = Path(raw["trainer"]["output_dir"])
        self.attempts: list[Attempt] = []

    @property
    def steps_done(self) -> int:
        return max((steps_of(path) for path in on_disk(self.output)), default=0)

    def attempt(self, fault: Fault | None, count: int = 1) -> Attempt:
        """Start the run, and let `fault` happen the `count`-th time that its rank reaches its point. None: no fault."""
        if fault is not None and fault.damage:
            DAMAGES[fault.damage](self.output, self.rng)
        spec = {} if fault is None else {**asdict(fault), "count": count}
        self.raw["trainer"]["async_save"] = fault is not None and fault.background
        code, out, err, survivors = run_command(self.raw, self.folder, SOAK_FAULT=json.dumps(spec))
        problems = []
        if code != (0 if fault is None else fault.exit_code):
            problems.append(f"exit code {code}: {err[-2000:]}")
        if survivors:
            problems.append(f"processes {survivors} have outlived it")
        rows = rows_of(self.output)
        if [row["step"] for row in rows] != list(range(len(rows))):
            problems.append(f"metrics.jsonl has steps {[row['step'] for row in rows]}")
        problems += [f"step {row['step']} differs" for row in rows if row != self.expected.get(row["step"])]
        done = Attempt(fault, count, self.steps_done, code, _sees(code, out, err), problems)
        self.attempts.append(done)
        what = "no fault" if fault is None else f"{fault.name} ({fault.point} #{count})"
        self.note(f"attempt {len(self.attempts)}: {what}: exit {code}, {done.steps_done} steps saved {problems or ''}")
        return done

    def run(self, faults: Sequence[Fault]) -> None:
        """One attempt per fault, at random steps; then one without. Needs more than 3 steps per fault."""
        waiting = list(faults)
        while waiting:
            # Damage needs an older checkpoint, with which the run goes on.
            fault = next(f for f in waiting if not f.damage or len(on_disk(self.output)) > 1)
            waiting.remove(fault)
            left = self.raw["trainer"]["total_training_steps"] - self.steps_done
            most = min(2 * left // (len(waiting) + 1) - 1, left - SAVE_FREQ * (len(waiting) + 1))
            count = self.rng.randint(1, max(1, most))
            if fault.point in SAVE_POINTS:
                count = -(-count // SAVE_FREQ)
            done = self.attempt(fault, 1 if fault.point in ("start", "export") else count)
            if done.exit_code == 0:
                return  # the fault has not happened; the attempt's problems say so
        self.attempt(None)

    def table(self) -> str:
        """The fault matrix."""
        rows = [
            [
                "none" if attempt.fault is None else attempt.fault.name,
                "" if attempt.fault is None else f"{attempt.fault.point} #{attempt.count}",
                attempt.sees,
                str(attempt.exit_code),
                str(attempt.steps_done),
                "NO" if attempt.problems else "yes",
            ]
            for attempt in self.attempts
        ]
        return format_table(rows, ["fault", "phase", "the user sees", "exit", "steps saved", "identical"])
