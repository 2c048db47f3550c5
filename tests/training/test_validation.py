"""Validation: the same samples at every step, metrics per source, failed rewards, and the examples that are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import Config
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.training.stopping import Cadence
from grpo_megatron.training.validation import ValidationRow, Validator, summarize
from grpo_megatron.types import BRANCH, Sample, Turn
from tests.fakes import FakeGenerator, prompt


def row(prompt_index: int, value: float, index: int = 0, **changes: Any) -> ValidationRow:
    fields = {"source": "s", "is_acc": True, "length": 4, "truncated": False, "reward_metrics": (), "example": None}
    return ValidationRow(prompt_index, index, value=value, **{**fields, **changes})  # type: ignore[arg-type]


def test_accuracy_pass_and_failures_of_a_source() -> None:
    # Three problems, two samples each: both right, one right, one wrong and one that could not be graded.
    rows = [row(0, 1.0), row(0, 1.0, 1), row(1, 0.0), row(1, 1.0, 1), row(2, 0.0), row(2, math.nan, 1, length=10)]
    assert summarize(rows, n=2) == pytest.approx(
        {
            "val-core/s/acc/mean@2": 3 / 6,
            "val-core/s/acc/pass@2": 2 / 3,
            "val-aux/s/response_length/mean": 5.0,
            "val-aux/s/truncated_ratio": 0.0,
            "val-aux/s/reward_failed_ratio": 1 / 6,
        }
    )
    for others, n in (([row(0, 1.0)], 1), ([row(0, 0.5), row(0, 1.0, 1)], 2)):  # several samples of zero or one
        assert not any("pass@" in name for name in summarize(others, n=n))


def test_sources_are_kept_apart_and_other_metrics_are_means_of_those_that_report_them() -> None:
    rows = [
        row(0, 1.0, source="a", reward_metrics=(("format", 1.0),)),
        row(1, 3.0, source="b", is_acc=False, reward_metrics=(("format", 0.0),)),
        row(2, 5.0, source="b", is_acc=False, truncated=True),
    ]
    metrics = summarize(rows, n=1)
    assert metrics["val-core/a/acc/mean@1"] == 1.0 and metrics["val-core/b/reward/mean@1"] == 4.0
    assert metrics["val-aux/a/format/mean"] == 1.0 and metrics["val-aux/b/format/mean"] == 0.0
    assert metrics["val-aux/b/truncated_ratio"] == 0.5


def validator(folder: Path, generator: Any, **val_kwargs: Any) -> Validator:
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"max_response_length": 9},
            "rollout": {"val_kwargs": {"n": 2, "temperature": 0.5, "top_p": 0.9, **val_kwargs}},
            "trainer": {"output_dir": folder, "num_logged_samples": 2},
        }
    )
    return Validator(generator, [prompt(i) for i in range(3)], config, Cadence(config.trainer, None))


def test_every_validation_draws_alike_and_is_timed_as_testing(tmp_path: Path) -> None:
    generator, metrics = FakeGenerator(), Metrics()
    part = validator(tmp_path, generator)
    assert part.run(0, metrics) == part.run(5, metrics)
    first, second = generator.draws
    assert first == {**second, "version": 0} and second["version"] == 5
    assert (first["round_id"], first["n"], first["max_tokens"], first["truncation"].top_p) == (-1, 2, 9, 0.9)
    assert set(metrics.reduce()) == {"timing_s/testing"}


def changed(generator: FakeGenerator, change: Callable[[Sample], None]) -> FakeGenerator:
    """The generator, with its samples changed."""
    draw = generator.sample

    def changing(*args: Any, **kwargs: Any) -> list[Sample]:
        samples = draw(*args, **kwargs)
        for sample in samples:
            change(sample)
        return samples

    generator.sample = changing  # type: ignore[method-assign]
    return generator


def test_the_first_problems_are_written_as_text(tmp_path: Path) -> None:
    """Two of three problems, the first sample of each."""
    validator(tmp_path, FakeGenerator(reward=lambda prompt, index, round_id: 0.5)).run(7, Metrics())
    (file,) = (tmp_path / "samples").iterdir()
    assert file.name == "step_000007.txt"
    text = file.read_text()
    assert [line for line in text.splitlines() if line.startswith("question")] == ["question 0", "question 1"]
    assert "--- response (2 tokens, scored 0.5)" in text and "--- reference answer\nanswer\n" in text


def test_a_failed_score_is_a_dash(tmp_path: Path) -> None:
    """In the written samples, with the reason and the texts of the reward; and there is no mean where all have failed."""
    rows = [
        row(0, math.nan, source="a"),
        row(1, math.nan, source="a"),
        row(2, math.nan, source="b"),
        row(3, 1.0, source="b"),
    ]
    metrics = summarize(rows, n=1)
    assert {name: value for name, value in metrics.items() if "core" in name or "failed" in name} == {
        "val-aux/a/reward_failed_ratio": 1.0,
        "val-core/b/acc/mean@1": 0.5,
        "val-aux/b/reward_failed_ratio": 0.5,
    }

    def failing(sample: Sample) -> None:
        sample.reward_failure, sample.reward_texts = "reward 'm:f': KeyError", {"prediction": "\ud800 42"}

    generator = FakeGenerator(reward=lambda prompt, index, round_id: math.nan)
    validator(tmp_path, changed(generator, failing)).run(0, Metrics())
    text = (tmp_path / "samples" / "step_000000.txt").read_text()
    assert "--- response (2 tokens, scored -)\n" in text
    assert "--- reward\nprediction: \\ud800 42\nreward 'm:f': KeyError\n--- reference answer\n" in text


@pytest.mark.parametrize("what", ["declined", "a branch"])
def test_a_declined_sample_and_a_branch_are_left_out(tmp_path: Path, what: str) -> None:
    def change(sample: Sample) -> None:
        if what == "declined":
            sample.reward_metrics.update(ok=1.0)
        elif sample.index == 0:
            sample.index = BRANCH

    generator = changed(FakeGenerator(reward=lambda prompt, index, round_id: 1.0 if index else math.nan), change)
    metrics = validator(tmp_path, generator).run(0, Metrics())
    assert {value for name, value in metrics.items() if "/reward/mean@" in name} == {1.0}
    assert {value for name, value in metrics.items() if "failed_ratio" in name} == {0.0}


def test_trajectories_report_their_turns_and_their_environments_numbers(tmp_path: Path) -> None:
    def played(sample: Sample) -> None:
        if sample.prompt_index == 0 or (sample.prompt_index, sample.index) == (1, 0):
            places = ((0, 1, "assistant", 1), (1, 2, "observation", 9), (2, 3, "assistant", 20))
            sample.turns = [Turn(start, end, kind, 0, clock) for start, end, kind, clock in places]
            sample.trajectory_metrics = {"tool_calls": float(sample.index)}

    metrics = validator(tmp_path, changed(FakeGenerator(), played)).run(0, Metrics())
    assert metrics["val-aux/task/turns/mean"] == 2.0
    assert metrics["val-aux/task/tool_calls/mean"] == pytest.approx(1 / 3)
