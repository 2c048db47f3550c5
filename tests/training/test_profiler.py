"""The Profiler in a world of one rank without process groups: which steps it records, and that it leaves nothing behind."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_megatron.cli.main import TrainOptions
from grpo_megatron.config import ConfigError
from grpo_megatron.config.options import parse
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.training.profiler import Profiler


def profiler(folder: Path, profiled: range, metrics: Metrics, notes: list[str]) -> Profiler:
    mesh: Any = SimpleNamespace(world_size=1, rank=0, barrier=lambda: None)
    return Profiler(profiled, metrics, mesh, folder, notes.append)


def run(folder: Path, profiled: range, steps: range) -> tuple[list[int], list[str], Metrics]:
    """Do the steps, each with a phase. Returns the steps done, what was printed, and the metrics."""
    metrics, notes = Metrics(), list[str]()
    within = metrics.within
    done = []
    for step in profiler(folder, profiled, metrics, notes).over(steps):
        with metrics.phase("gen"):
            done.append(step)
    assert metrics.within is within
    return done, notes, metrics


@pytest.mark.parametrize(("first", "recorded"), [(0, [1, 2]), (2, [2])])
def test_it_records_the_wanted_steps(tmp_path: Path, first: int, recorded: list[int]) -> None:
    done, notes, metrics = run(tmp_path, range(1, 3), range(first, 5))
    assert done == list(range(first, 5))
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "trace_rank0.json.gz").read_bytes()))
    ranges = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    names = [event["name"] for event in sorted(ranges, key=lambda event: event["ts"])]
    assert names == [name for step in recorded for name in (f"training step {step}", "gen")]
    assert len(notes) == 1 and "table.txt and traces" in notes[0]
    assert re.search(r"^ +gen ", (tmp_path / "profile" / "table.txt").read_text(), re.MULTILINE)
    assert metrics.reduce()["timing_s/gen"] > 0
    assert run(tmp_path / "end", range(4, 9), range(3, 5))[0] == [3, 4]  # no step beyond the last one
    done, notes, _ = run(tmp_path / "later", range(1, 3), range(3, 5))  # a run that resumes after the wanted steps
    assert done == [3, 4] and "steps 3 to 4, and none of" in notes[0] and not (tmp_path / "later").exists()


def test_a_failing_step_ends_the_recording_and_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    metrics, notes = Metrics(), list[str]()
    within = metrics.within
    steps = profiler(tmp_path, range(1), metrics, notes).over(range(2))
    next(steps)
    assert metrics.within is not within
    steps.close()  # type: ignore[attr-defined]
    assert metrics.within is within and not any(tmp_path.iterdir())
    (tmp_path / "file").touch()
    assert run(tmp_path / "file", range(1), range(2))[0] == [0, 1]


def test_the_option_names_steps_of_the_run() -> None:
    assert parse(TrainOptions, ["run.yaml", "--profile", "3-5"]).profile == range(3, 6)
    assert parse(TrainOptions, ["run.yaml", "--profile", "3"]).profile == range(3, 4)
    assert parse(TrainOptions, ["run.yaml"]).profile is None
    for arguments, message in (
        (["5-3"], "5-3' is not a step like 3"),
        (["-1"], ""),
        (["x"], "x' is not a step"),
        (["3", "--dry-run"], ""),
    ):
        with pytest.raises((SystemExit, ConfigError), match=message):
            parse(TrainOptions, ["run.yaml", "--profile", *arguments])
