"""The supervised warm-up, a stage of its own: its rows, metrics and checkpoints, and where a run that ends in it goes on.

The trainer is the real one over stand-ins (tests/fakes.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from grpo_megatron.checks.methods import steps_of_epochs
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import ConfigError
from grpo_megatron.data.responses import WrittenResponse
from grpo_megatron.report.console import ConsoleSink
from grpo_megatron.storage.run_files import read_events
from grpo_megatron.training.warm_up import stage_config
from tests import fakes
from tests.fakes import only
from tests.stored import rows_without

ROWS = [([number], WrittenResponse([7])) for number in range(5)]


def run(
    folder: Path, steps: int, rows: Any = ROWS, save_freq: int = 100, **options: Any
) -> tuple[list[Any], list[Any]]:
    """A warm-up of two rows per update before one step of GRPO. Returns its batches, and all events."""
    sft = {"steps": steps, "train_batch_size": 2, "save_freq": save_freq, "optim": {"lr": 0.5}}
    trainer = {"total_training_steps": 1, "save_freq": 9, "logger": ["jsonl", "console"], **options.pop("trainer", {})}
    update, batches = fakes.FakePolicy.update, []

    def watched(self: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        if any(event[0] == "draw" for event in self.events):
            return update(self, batch, *arguments, **named)
        batches.append(batch)
        sums, constants = update(self, batch, *arguments, **named)
        return sums, {**constants, "actor/lr": 0.5, "actor/pg_loss": float(self.updates)}

    with mock.patch.object(fakes.FakePolicy, "update", watched):
        events, _ = fakes.run_trainer(folder, rows=rows, sft=sft, trainer=trainer, **options)
    return batches, events


def numbers(batches: list[Any]) -> list[list[int]]:
    """The rows of each update."""
    return [sorted(int(tokens[0]) for tokens in batch.tokens) for batch in batches]


def test_the_console_tells_it_from_the_steps_of_the_run(tmp_path: Path) -> None:
    entered: list[tuple[int | None, tuple[str, ...]]] = []
    with mock.patch.object(ConsoleSink, "enter", lambda self, step, phases: entered.append((step, tuple(phases)))):
        run(tmp_path, 2)
    assert (1, ("warm-up", "step", "update_actor")) in entered and (0, ("step", "update_actor")) in entered
    assert not any(phases[:1] == ("step",) for step, phases in entered if step == 1)  # the run itself has step 0 only
    (done,) = [event for event in read_events(tmp_path / "sft") if event["kind"] == "done"]
    assert done["step"] == 2


def test_it_notes_its_progress_and_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, 25)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warm-up")]
    assert [note.split()[1] for note in notes] == [f"{step}/25" for step in (*range(2, 25, 2), 25)]
    assert notes[-1].startswith("warm-up    25/25  loss 25.0000  lr 5.00e-01")


@pytest.mark.parametrize("stop_after", [pytest.param(2, marks=pytest.mark.soak), 5])
def test_a_run_that_ends_in_the_warm_up_goes_on_from_there(tmp_path: Path, stop_after: int) -> None:
    """The same rows, updates and logged steps as without the stop; after the last of the five steps none is left."""
    whole, events = run(tmp_path / "whole", 5)
    assert numbers(whole) == [[0, 1], [2, 3], [0, 4], [1, 2], [3, 4]]  # in the order of the file, again and again
    assert only(events, "optimizer")[0] == ("optimizer", 0.5, 5)
    first, events = run(tmp_path / "halves", 5, stop_warm_up_after=stop_after)
    assert only(events, "draw", "save hf") == [] and only(events, "save")[-1] == ("save", stop_after)
    second, events = run(tmp_path / "halves", 5)
    assert numbers(first) + numbers(second) == numbers(whole)
    assert only(events, "load")[0] == ("load", f"step_{stop_after:06d}")
    assert only(events, "save hf")[0] == ("save hf", "warmup", "policy after 5")
    rows = rows_without(tmp_path / "whole/sft")
    assert rows_without(tmp_path / "halves/sft") == rows
    assert [row["training/epoch"] for row in rows] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2])


def test_it_saves_if_the_run_does_and_does_not_go_on_as_another_one(tmp_path: Path) -> None:
    assert only(run(tmp_path / "a", 5, save_freq=2)[1], "save") == [("save", 2), ("save", 4), ("save", 5), ("save", 1)]
    assert only(run(tmp_path / "b", 5, save_freq=2, trainer={"save_freq": -1})[1], "save") == []
    run(tmp_path / "c", 5, stop_warm_up_after=2)
    with pytest.raises(ConfigError, match="sft.steps 5 -> 6: cannot change when a run resumes"):
        run(tmp_path / "c", 6)


def test_the_example_of_a_supervised_run_is_the_warm_up_of_the_quickstart() -> None:
    """13,440 rows in batches of 32 are 420 steps. Both runs had the same weights at the end, bit for bit (measured)."""
    examples = Path(__file__).resolve().parents[2] / "examples"
    stage = stage_config(load_config(examples / "quickstart.yaml", []))
    alone = load_config(examples / "quickstart_sft.yaml", [])
    clip = {"clip_ratio_high": 0.28}  # of GRPO: no likelihood reads it
    assert (stage.model, stage.algorithm) == (alone.model, alone.algorithm)
    assert stage.actor == alone.actor.model_copy(update=clip)
    names = ("task", "train_files", "train_batch_size", "shuffle", "apply_chat_template", "max_prompt_length")
    assert [getattr(stage.data, name) for name in names] == [getattr(alone.data, name) for name in names]
    assert steps_of_epochs(alone, 13_440) == stage.trainer.total_training_steps == 420
    assert stage.has_rollouts is False is alone.has_rollouts
