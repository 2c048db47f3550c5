"""Damaged checkpoints are not used, and after a request to stop all ranks stop at the same step."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.storage.files import MANIFEST_FILE, read_manifest
from grpo_megatron.storage.run_files import read_events
from tests import tiny, worlds
from tests.runs import stand_in_trainer

# -- the ranks ---------------------------------------------------------------------------------------------------------


def _damage(root: Path) -> None:
    """Flip one bit of the newest checkpoint, truncate a file of the one before, remove a file of the one before that."""
    flipped, cut, lost = (sorted((root / f"step_00000{n}/state").glob("__1_*.distcp"))[0] for n in (4, 3, 2))
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    os.truncate(cut, cut.stat().st_size - 1)
    lost.unlink()


@worlds.ranks(2)
def checkpoints(model: Path, out: Path) -> dict[str, Any]:
    from grpo_megatron.config import Config, ConfigError, OptimConfig
    from grpo_megatron.training.checkpoint import Checkpoints
    from tests.models.policies import build

    policy = build(model)
    policy.set_optimizer(OptimConfig(), 10)
    mesh, config = policy.mesh, Config.model_validate({"model": {"path": model}})
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("grpo_megatron.training.checkpoint").addHandler(handler)

    first = Checkpoints(out, mesh, keep=None)
    if mesh.rank == 0:
        for leftover in (".step_000009.partial", ".step_000009.removed"):
            (out / "checkpoints" / leftover).mkdir(parents=True)
    for step in range(1, 5):
        first.save(step, policy, config)
    result: dict[str, Any] = {
        "undamaged": Checkpoints(out, mesh, keep=None).newest(),
        "warnings at first": list(warnings),
    }
    result["leftovers"] = list((out / "checkpoints").glob(".*"))
    mesh.barrier()
    if mesh.rank == 0:
        _damage(out / "checkpoints")
    mesh.barrier()
    result["by sizes"] = Checkpoints(out, mesh, keep=None, verify="sizes").newest()
    again = Checkpoints(out, mesh, keep=1)
    result["found"] = newest = again.newest()
    result["warnings"] = list(warnings)
    assert newest is not None
    result["steps"] = again.load(newest, policy)
    result["set aside"] = sorted(path.name for path in (out / "checkpoints").glob("*.damaged"))
    again.save(2, policy, config)  # keep=1: damaged checkpoints do not count
    result["kept"] = sorted(path.name for path in (out / "checkpoints").glob("step_??????"))
    mesh.barrier()
    if mesh.rank == 0:
        (out / "checkpoints/step_000002/manifest.json").unlink()
    mesh.barrier()
    try:
        again.newest()
    except ConfigError as error:
        result["error"] = str(error)
    return {**result, "stops": _stops(mesh, out)}


def _stops(mesh: Any, out: Path) -> dict[str, Any]:
    """Way to request a stop -> (steps done when it stopped, message). Only one rank gets the request."""
    from grpo_megatron.config import TrainerConfig
    from grpo_megatron.training import stopping

    def run(config: TrainerConfig, request: Any = lambda: None) -> tuple[int, str]:
        watch = stopping.Stopping(config, mesh)
        for step in range(1, 20):
            if step == 3:
                request()
            time.sleep(0.02)
            try:
                watch.after(step, lambda done: out / f"checkpoints/step_{done}")
            except stopping.Stopped as stopped:
                return step, str(stopped)
        return 0, "never"

    stopping.listen()
    base = {"output_dir": out}
    stops = {"nothing": run(TrainerConfig(**base))}
    stops["time"] = run(TrainerConfig(**base, stop_at=time.time() + 3600 * (mesh.rank == 1)))
    file = out / "stop"
    stops["file"] = run(TrainerConfig(**base, stop_file=file), lambda: mesh.rank == 0 and file.touch())
    mesh.barrier()
    stops["signal"] = run(TrainerConfig(**base), lambda: mesh.rank == 1 and os.kill(os.getpid(), signal.SIGUSR1))
    return stops


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def result(out: Path) -> dict[str, Any]:
    """Returns the result of rank 0; all ranks have the same."""
    model = tiny.make_model(out / "model", num_hidden_layers=1)
    first, second = checkpoints(model=model, out=out)
    for key in ("undamaged", "by sizes", "found", "steps", "error", "stops"):
        assert first[key] == second[key], key
    return dict(first)


def test_the_newest_is_used_and_leftovers_are_removed(out: Path, result: dict[str, Any]) -> None:
    assert result["undamaged"].name == "step_000004"
    assert result["warnings at first"] == [] and result["leftovers"] == []
    folder = out / "checkpoints" / "step_000003.damaged"  # truncated: its manifest still names every file
    files = read_manifest(folder)
    assert files is not None and {"trainer.json", "state/.metadata"} <= set(files)
    paths = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert paths == {*files, MANIFEST_FILE}
    assert json.loads((folder / "trainer.json").read_text())["step"] == 3


def test_damage_is_named_and_the_checkpoint_before_is_used(result: dict[str, Any]) -> None:
    """Sizes alone do not show a flipped bit. Damaged checkpoints do not count as kept, and a run does not start over."""
    damage = {
        4: ".distcp has changed since it was written (sha256)",  # one bit
        3: " bytes, expected ",  # truncated
        2: "missing state/__1_0.distcp",
    }
    assert result["by sizes"].name == "step_000004"
    for step, words in damage.items():
        assert f"step_{step:06d}.damaged" in result["set aside"]
        (warning,) = (text for text in result["warnings"] if f"step_{step:06d}.damaged" in text)
        assert words in warning and "the one before it is tried" in warning
    assert (result["found"].name, result["steps"], result["kept"]) == ("step_000001", 1, ["step_000002"])
    assert "no undamaged checkpoint is left" in result["error"] and "trainer.resume_mode=disable" in result["error"]
    assert "step_000002.damaged, step_000003.damaged, step_000004.damaged" in result["error"]


def test_a_request_to_one_rank_stops_all(out: Path, result: dict[str, Any]) -> None:
    """At the same step; the outcome of the last stop, by a signal, is on disk."""
    wanted = {"time": (1, "the time limit"), "file": (3, "the stop file"), "signal": (3, "SIGUSR1")}
    wanted["nothing"] = (0, "never")
    for way, (step, reason) in wanted.items():
        assert result["stops"][way][0] == step and reason in result["stops"][way][1], way
    outcome = {"state": "stopped", "steps_done": 3, "checkpoint": str(out / "checkpoints/step_3"), "exit_code": 75}
    assert json.loads((out / "outcome.json").read_text()) == outcome
    assert (out / "heartbeat").read_text() == "3\n"
    last = read_events(out)[-1]
    assert (last["kind"], last["step"]) == ("stopped", 3) and last["text"].startswith("stopped by ")
    assert last["text"].endswith(f"or: grpo-megatron train {out}/config.yaml")


RUN = """
    from grpo_megatron.training.stopping import Stopped
    raise Stopped("stopped")
"""


@pytest.mark.soak  # cli/test_main.py has a signal to the launcher of two
def test_a_command_of_one_process_ends_with_75_and_no_error_message(tmp_path: Path) -> None:
    """tests/cli/test_main.py has several."""
    stand_in_trainer(tmp_path, RUN)
    (tmp_path / "run.yaml").write_text("model: {path: m}\ntrainer: {n_gpus_per_node: 1}\n")
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
