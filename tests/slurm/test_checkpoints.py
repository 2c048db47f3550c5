"""Damaged checkpoints are not used, and after a request to stop all ranks stop at the same step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.storage.manifest import MANIFEST_FILE, read_manifest
from grpo_megatron.storage.run_files import read_events
from tests import tiny, worlds
from tests.runs import stand_in_trainer
from tests.slurm import checkpoint_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(out: Path) -> list[dict[str, Any]]:
    model = tiny.make_model(out / "model", num_hidden_layers=1)
    return worlds.run(checkpoint_ranks.checkpoints, 2, model=model, out=out)


@pytest.fixture(scope="module")
def result(results: list[dict[str, Any]]) -> dict[str, Any]:
    return results[0]


def test_the_newest_is_used_and_leftovers_are_removed(result: dict[str, Any]) -> None:
    assert result["undamaged"].name == "step_000004"
    assert result["warnings at first"] == [] and result["leftovers"] == []


def test_every_file_is_in_the_manifest(out: Path, result: dict[str, Any]) -> None:
    """Of the checkpoint whose file was truncated: the manifest names every file."""
    folder = out / "checkpoints" / "step_000003.damaged"
    files = read_manifest(folder)
    assert files is not None and "trainer.json" in files and "state/.metadata" in files
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        *files,
        MANIFEST_FILE,
    }
    assert json.loads((folder / "trainer.json").read_text())["step"] == 3


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (4, ".distcp has changed since it was written (sha256)"),  # one bit
        (3, " bytes, expected "),  # truncated
        (2, "missing state/__1_0.distcp"),
    ],
)
def test_damage_is_named_and_the_checkpoint_before_is_used(result: dict[str, Any], step: int, words: str) -> None:
    assert f"step_{step:06d}.damaged" in result["set aside"]
    (warning,) = (text for text in result["warnings"] if f"step_{step:06d}.damaged" in text)
    assert words in warning and "the one before it is tried" in warning
    assert (result["found"].name, result["steps"]) == ("step_000001", 1)


def test_sizes_alone_do_not_show_a_flipped_bit(result: dict[str, Any]) -> None:
    assert result["by sizes"].name == "step_000004"


def test_damaged_checkpoints_do_not_count_as_kept(result: dict[str, Any]) -> None:
    assert result["kept"] == ["step_000002"]


def test_a_run_without_an_undamaged_checkpoint_does_not_start_over(result: dict[str, Any]) -> None:
    assert "no undamaged checkpoint is left" in result["error"] and "trainer.resume_mode=disable" in result["error"]
    assert "step_000002.damaged, step_000003.damaged, step_000004.damaged" in result["error"]


def test_all_ranks_find_the_same(results: list[dict[str, Any]]) -> None:
    for key in ("undamaged", "by sizes", "found", "steps", "error", "stops"):
        assert results[0][key] == results[1][key], key


@pytest.mark.parametrize(
    ("way", "step", "reason"),
    [("time", 1, "the time limit"), ("file", 3, "the stop file"), ("signal", 3, "SIGUSR1"), ("nothing", 0, "never")],
)
def test_a_request_to_one_rank_stops_all(out: Path, result: dict[str, Any], way: str, step: int, reason: str) -> None:
    assert result["stops"][way][0] == step
    assert reason in result["stops"][way][1]


def test_the_outcome_is_on_disk(out: Path, result: dict[str, Any]) -> None:
    assert json.loads((out / "outcome.json").read_text()) == {
        "state": "stopped",
        "steps_done": 3,
        "checkpoint": str(out / "checkpoints/step_3"),
        "exit_code": 75,
    }
    assert (out / "heartbeat").read_text() == "3\n"
    last = read_events(out)[-1]
    assert (last["kind"], last["step"]) == ("stopped", 3) and last["text"].startswith("stopped by ")


RUN = """
    from grpo_megatron.training.stopping import Stopped
    raise Stopped("stopped")
"""


@pytest.mark.parametrize("ranks_here", [1, 2])
def test_the_command_ends_with_75_and_no_error_message(tmp_path: Path, ranks_here: int) -> None:
    """With one process, and with torchrun's agent, for which a rank that ends with 75 has failed."""
    stand_in_trainer(tmp_path, RUN)
    (tmp_path / "run.yaml").write_text(f"model: {{path: m}}\ntrainer: {{n_gpus_per_node: {ranks_here}}}\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "GRPO_DEBUG")}
    done = subprocess.run(
        [sys.executable, "-m", "grpo_megatron", "train", "run.yaml"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (75, "")
