"""The Profiler in a world of one rank without process groups: which steps it records, and that it undoes its replacements."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from grpo_megatron.cli import main
from grpo_megatron.cli.commands import TrainOptions
from grpo_megatron.config import ConfigError
from grpo_megatron.config.options import parse
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.collectives import OPERATIONS
from grpo_megatron.training.profiler import Profiler, flat_settings


class Engine:
    num_unfinished = 3

    def poll(self) -> list[Any]:
        return []


def replaceable() -> list[Any]:
    return [dist.Work.__dict__["wait"], *(dist.ProcessGroup.__dict__.get(name) for name in OPERATIONS)]


def run(folder: Path, profiled: range | None, steps: range) -> tuple[list[int], list[str], Engine, Metrics]:
    """Do the steps, each with a phase and a poll. Returns the steps done, what was printed, the engine, the metrics."""
    mesh = SimpleNamespace(world_size=1, rank=0, barrier=lambda: None, gather=lambda value: [value])
    engine, metrics, notes = Engine(), Metrics(), []
    profiler = Profiler(
        profiled,
        metrics,
        engine,  # type: ignore[arg-type]
        mesh,  # type: ignore[arg-type]
        lambda: None,
        output_dir=folder,
        settings={},
        note=notes.append,
    )
    within = metrics.within
    done = []
    for step in profiler.over(steps):
        with metrics.phase("gen"):
            engine.poll()
        done.append(step)
    assert metrics.within is within
    return done, notes, engine, metrics


def recorded_names(folder: Path) -> list[str]:
    trace = json.loads((folder / "profile" / "trace.json").read_text())
    return [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize(("first", "recorded"), [(0, [1, 2]), (2, [2])])
def test_it_records_the_wanted_steps_and_undoes_its_replacements(
    tmp_path: Path, first: int, recorded: list[int]
) -> None:
    before = replaceable()
    done, notes, engine, metrics = run(tmp_path, range(1, 3), range(first, 5))
    assert done == list(range(first, 5))
    assert recorded_names(tmp_path) == [n for s in recorded for n in (f"training step {s}", "gen", "engine step")]
    assert len(notes) == 1 and "where the time went" in notes[0]
    assert replaceable() == before and "poll" not in vars(engine)
    assert metrics.reduce()["timing_s/gen"] > 0


def test_without_steps_it_does_nothing(tmp_path: Path) -> None:
    """Also when the run resumes after the wanted steps: then it says so."""
    assert run(tmp_path, None, range(3))[:2] == ([0, 1, 2], [])
    done, notes, *_ = run(tmp_path, range(1, 3), range(3, 5))
    assert done == [3, 4] and "starts at step 3" in notes[0] and not any(tmp_path.iterdir())


def test_a_failing_step_undoes_the_replacements(tmp_path: Path) -> None:
    before = replaceable()
    mesh: Any = SimpleNamespace(world_size=1, rank=0, barrier=lambda: None)
    profiler = Profiler(
        range(1), Metrics(), None, mesh, lambda: None, output_dir=tmp_path, settings={}, note=lambda text: None
    )
    steps = profiler.over(range(2))
    next(steps)
    assert replaceable() != before
    steps.close()  # type: ignore[attr-defined]
    assert replaceable() == before and not any(tmp_path.iterdir())


def test_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(TrainOptions, ["run.yaml", "--profile", "3-5"]).profile == range(3, 6)
    assert parse(TrainOptions, ["run.yaml", "--profile", "3"]).profile == range(3, 4)
    assert parse(TrainOptions, ["run.yaml"]).profile is None
    for arguments in (["5-3"], ["-1"], ["x"], ["3", "--dry-run"]):
        with pytest.raises((SystemExit, ConfigError)):
            parse(TrainOptions, ["run.yaml", "--profile", *arguments])
    assert "5-3' is not a step like 3" in capsys.readouterr().err


def test_a_step_that_the_run_does_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "run.yaml").write_text(f"model: {{path: {tmp_path}}}\ntrainer: {{total_training_steps: 4}}\n")
    assert main.main(["train", str(tmp_path / "run.yaml"), "--profile", "2-4"]) == 2
    assert "the run has 4 steps, counted from 0, so there is no step 4" in capsys.readouterr().err


def test_settings_are_flat() -> None:
    assert flat_settings({"a": {"b": 1, "c": {"d": 2}}, "e": {}}) == {"a.b": 1, "a.c.d": 2, "e": {}}
