"""The output folder: one run at a time, nothing of an earlier run is lost, and what a kill leaves is cleaned up."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from safetensors import safe_open

from grpo_megatron.config import Config, ConfigError, LoraConfig, TrainerConfig
from grpo_megatron.models.families import architecture_of
from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.storage import files
from grpo_megatron.storage.run_files import on_disk, steps_of
from grpo_megatron.training import checkpoint
from grpo_megatron.training.checkpoint import Checkpoints, checkpoint_bytes
from grpo_megatron.training.output_folder import OutputFolder, record_config
from grpo_megatron.training.stopping import REASONS, Stopped, Stopping
from tests import tiny
from tests.fakes import FakeStopping, LoneMesh, only
from tests.fakes import run_trainer as run

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys
from pathlib import Path
from grpo_megatron.storage.files import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def open_folder(path: Path, **trainer: Any) -> OutputFolder:
    return OutputFolder(TrainerConfig(output_dir=path, **trainer), LoneMesh())


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- one run at a time -------------------------------------------------------------------------------------------------


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    """The second one names the first. A killed run holds no lock."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"in use by process {other.pid} on .* since .*use another folder"):
            open_folder(tmp_path)
        other.kill()
        other.wait()
    open_folder(tmp_path).close()
    open_folder(tmp_path).close()


def test_a_requeued_job_waits_for_the_lock_of_its_dead_machine(tmp_path: Path) -> None:
    """The lock is free after the first wait, as when the file system notices that the machine has died."""
    with mock.patch.dict(os.environ, SLURM_JOB_ID="17"):
        first = open_folder(tmp_path)
        with mock.patch.object(files.time, "sleep", lambda seconds: first.close()):
            open_folder(tmp_path).close()
        second = open_folder(tmp_path)
    with mock.patch.dict(os.environ, SLURM_JOB_ID="18"), pytest.raises(ConfigError, match=r"\(Slurm job 17\)"):
        open_folder(tmp_path)
    second.close()


def test_a_folder_that_is_deleted_during_the_run(tmp_path: Path) -> None:
    """Also when something has made a new folder of the same name, as the next save does."""
    out = tmp_path / "out"
    with open_folder(out) as folder:
        stopping = Stopping(TrainerConfig(output_dir=out), LoneMesh(), folder.lock)
        stopping.after(1, lambda steps_done: out)
        shutil.rmtree(out)
        for _ in range(2):
            with pytest.raises(RankError, match=r"cannot go on in .*/out: the folder was deleted or replaced"):
                stopping.after(2, lambda steps_done: out)
            open_folder(out).close()


@pytest.mark.parametrize(("steps", "expected"), [("steps", 2), ("warm-up steps", None)])
def test_steps_of_the_warm_up_are_no_steps_of_the_run(steps: str, expected: int | None, tmp_path: Path) -> None:
    """`watch` named step 100 of a run of 40 steps."""
    stopping = Stopping(TrainerConfig(output_dir=tmp_path), LoneMesh(), None, steps)
    with mock.patch.object(stopping, "_reason", lambda steps_done: REASONS.index("SIGINT")), pytest.raises(Stopped):
        stopping.after(2, lambda steps_done: tmp_path)
    assert json.loads((tmp_path / "events.jsonl").read_text())["step"] == expected


# -- an earlier run ----------------------------------------------------------------------------------------------------


def test_a_run_that_does_not_resume_moves_the_earlier_one_aside(tmp_path: Path) -> None:
    """Checkpoints and metrics of both runs stay; a second time, they get the next number."""
    trainer = {"total_training_steps": 4, "save_freq": 2}
    run(tmp_path, trainer=trainer)
    (tmp_path / "attempts").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    events, rows = run(tmp_path, trainer={**trainer, "total_training_steps": 2, "resume_mode": "disable"})
    assert [row["step"] for row in rows] == [0, 1] and only(events, "save") == [("save", 2)]
    assert [path.name for path in on_disk(tmp_path)] == ["step_000002"]
    earlier = tmp_path / "earlier_001"
    assert [path.name for path in on_disk(earlier)] == ["step_000002", "step_000004"]
    assert len((earlier / "metrics.jsonl").read_text().splitlines()) == 4 and (earlier / "config.yaml").exists()
    assert {"attempts", "notes.txt"} <= names(tmp_path) and not names(earlier) & {"attempts", "notes.txt", ".lock"}
    run(tmp_path, trainer={**trainer, "resume_mode": "disable"})
    assert [path.name for path in on_disk(tmp_path / "earlier_002")] == ["step_000002"]


def test_what_the_run_reads_is_not_moved(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    config = TrainerConfig(output_dir=tmp_path, resume_mode="disable")
    with pytest.raises(ConfigError, match=r"the run reads '.*/hf/model', which is one of them"):
        OutputFolder(config, LoneMesh(), [None, tmp_path / "hf" / "model"])
    assert names(tmp_path) == {"hf", ".lock"}


def save(checkpoints: Checkpoints, step: int) -> Path:
    """The real `save` of a policy without weights."""
    policy: Any = SimpleNamespace(state=dict)
    config = Config.model_validate({"model": {"path": "model"}})
    with mock.patch.object(checkpoint, "save_sharded", lambda policy, folder, writes: None):
        return checkpoints.save(step, policy, config)


def test_retention_touches_only_what_this_run_has_written(tmp_path: Path) -> None:
    """Steps 40 and 50 are not this run's: it has done fewer."""
    for step in (40, 50):
        save(Checkpoints(tmp_path, LoneMesh(), keep=None), step)
    checkpoints = Checkpoints(tmp_path, LoneMesh(), keep=2)
    for step in (1, 2, 3):
        assert save(checkpoints, step).exists()
    assert [steps_of(path) for path in on_disk(tmp_path)] == [2, 3, 40, 50]


def test_a_kill_while_pruning_leaves_no_part_under_a_final_name(tmp_path: Path) -> None:
    """The deletion stops after the first file; the rest has a temporary name, which the next run removes."""
    checkpoints = Checkpoints(tmp_path, LoneMesh(), keep=1)
    save(checkpoints, 1)

    def killed(path: Path, *, ignore_errors: bool = False) -> None:
        if path.exists() and path.name.startswith(".step_000001"):
            next(path.iterdir()).unlink()
            raise KeyboardInterrupt

    with mock.patch.object(shutil, "rmtree", killed), pytest.raises(KeyboardInterrupt):
        save(checkpoints, 2)
    assert names(tmp_path / "checkpoints") == {".step_000001.removed", "step_000002"}
    open_folder(tmp_path).close()
    assert names(tmp_path / "checkpoints") == {"step_000002"}


def test_what_a_kill_has_left_is_cleaned_at_the_start(tmp_path: Path) -> None:
    """A folder that was being replaced, and whose successor is missing, gets its name back."""
    for name in (".hf.partial", ".hf.replaced", "checkpoints/.step_000001.removed", "iterations/.step_000003.partial"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
    (tmp_path / ".config.yaml.0123abcd.partial").write_text("")
    open_folder(tmp_path).close()
    assert names(tmp_path) == {".lock", "hf", "checkpoints", "iterations"}
    assert (tmp_path / "hf/file").read_text() == ".hf.replaced"
    assert names(tmp_path / "checkpoints") == names(tmp_path / "iterations") == set()


# -- metrics and checkpoints -------------------------------------------------------------------------------------------


def test_no_checkpoint_has_a_step_that_metrics_lack(tmp_path: Path) -> None:
    """Killed right after each save: the row of its last step, with the validation before it, is in metrics.jsonl."""
    seen = []

    def after(self: FakeStopping, steps_done: int, save: Any) -> None:
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        seen.append((len(on_disk(tmp_path)), rows[-1]["step"], any(name.startswith("val-core") for name in rows[-1])))

    with mock.patch.object(FakeStopping, "after", after):
        run(tmp_path, trainer={"total_training_steps": 3, "save_freq": 1, "test_freq": 2})
    assert seen == [(1, 0, False), (2, 1, False), (3, 2, True)]


def test_a_config_that_cannot_be_written(tmp_path: Path) -> None:
    """The message has path and reason; the config of the earlier attempt stays."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    record_config(tmp_path, LoneMesh(), {"model": "old"}, resumed=False)
    for resumed, path in ((False, r"config\.yaml"), (True, "config_attempts")):
        expected = pytest.raises(RankError, match=rf"cannot write .*/{path}: .*No space left on device")
        with mock.patch.object(files.os, "fsync", side_effect=full), expected:
            record_config(tmp_path, LoneMesh(), {"model": "new"}, resumed=resumed)
    assert (tmp_path / "config.yaml").read_text() == "model: old\n"


# -- free space --------------------------------------------------------------------------------------------------------


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`free.free`: the bytes of every file system."""
    space = SimpleNamespace(free=2**20)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: space)
    return space


def test_a_run_that_could_not_save_does_not_start(tmp_path: Path, free: SimpleNamespace) -> None:
    text = r"no space left: a checkpoint takes 2,097,152 bytes, the file system of .*/out has 1,048,576 bytes free"
    with open_folder(tmp_path / "out") as folder, pytest.raises(RankError, match=text):
        folder.check_space(2**21)
    free.free = -1
    with pytest.raises(RankError, match=r"cannot save in .*trainer\.save_freq=-1: no space left"):
        run(tmp_path, trainer={"save_freq": 1})
    events, _ = run(tmp_path, trainer={"save_freq": -1})
    assert only(events, "finished")


def test_free_space_is_checked_before_each_save(tmp_path: Path, free: SimpleNamespace) -> None:
    checkpoints = Checkpoints(tmp_path, LoneMesh(), keep=3)
    free.free = sum(file.stat().st_size for file in save(checkpoints, 1).rglob("*")) - 1
    with pytest.raises(RankError, match=r"cannot write checkpoint .*step_000002: no space left: a checkpoint takes"):
        save(checkpoints, 2)
    assert names(tmp_path / "checkpoints") == {"step_000001"}


def test_the_size_of_a_checkpoint(tmp_path: Path) -> None:
    """A tiny Qwen2, counted from its file: 16 bytes per parameter in float32, 14 in bfloat16."""
    folder = tiny.make_model(tmp_path / "model", "qwen2")
    arch = architecture_of(json.loads((folder / "config.json").read_text()))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert checkpoint_bytes(arch, "float32", LoraConfig()) == 16 * parameters
    assert checkpoint_bytes(arch, "bfloat16", LoraConfig()) == 14 * parameters
    lora = LoraConfig.model_validate({"rank": 2, "target_modules": ["q_proj"]})  # A [2, 128], B [128, 2], 4 layers
    assert checkpoint_bytes(arch, "bfloat16", lora) == 14 * 4 * 2 * 256
