"""The sandbox backends `docker` and `podman`, with a stand-in for their program (fake_docker.py): no daemon is here."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_megatron.data.folders import FolderTask, read_folder
from grpo_megatron.environments.sandboxes import backend
from grpo_megatron.environments.sandboxes.backend import SandboxError, SandboxLimits
from grpo_megatron.environments.sandboxes.containers import LABEL, DockerSandbox, PodmanSandbox, digest_of
from grpo_megatron.environments.sandboxes.local import walls_problem
from grpo_megatron.processes.process import start_ticks
from tests.environments.test_folders import CONFIG, played, row_of
from tests.environments.test_sandbox import ROOT, folder_for_all

pytestmark = pytest.mark.skipif(bool(walls_problem()), reason="the stand-in runs commands in local sandboxes")
LIMITS = SandboxLimits(cpus=2, memory_mib=300, disk_mib=8, processes=20)


@pytest.fixture(params=["docker"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Puts the stand-in on the path. Yields the folder of its state; no container may be left."""
    with folder_for_all() as folder:
        (folder / "images").mkdir()
        (folder / "containers").mkdir()
        program = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {ROOT}/tests/environments/fake_docker.py {folder} "$@"\n'
        (folder / request.param).write_text(program)
        (folder / request.param).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(backend, "PAUSE_S", 0.0)
        DockerSandbox._check_engine.cache_clear()
        yield folder
        assert os.listdir(folder / "containers") == []


def calls(engine: Path, word: str) -> list[list[str]]:
    logged = [json.loads(line) for line in (engine / "log").read_text().splitlines()]
    return [call for call in logged if call[0] == word]


def name_of(engine: Path) -> str:
    return "podman" if (engine / "podman").exists() else "docker"


def test_a_trajectory_in_a_container(engine: Path, tmp_path: Path) -> None:
    """The image is built once for its content; each sandbox is a container with the limits, and is removed."""
    row = row_of(tmp_path / "task")
    options = {"backend": name_of(engine), "memory_mib": 300}
    assert played(row, "cat word > out.txt", **options)[0] == 1.0
    assert played(row, "echo 'exit 0' > /tests/test.sh; rm word", verifier="shared", **options)[0] == 0.0
    image = f"grpo-megatron/{digest_of(tmp_path / 'task/environment')[:24]}"
    assert [call[call.index("-t") + 1] for call in calls(engine, "build")] == [image]
    first, *others = calls(engine, "run")
    assert len(others) == 2 and {
        "--network=none",
        "--memory=300m",
        "--memory-swap=300m",
        "--cpus=1",
        "--pids-limit=48",
    } <= {*first}
    assert {"no-new-privileges", "--cap-drop", "--cap-add=SETUID"} <= {*first} and "--cap-add=SYS_ADMIN" not in first
    assert f"{LABEL}={platform.node()}/{os.getpid()}.{start_ticks()}" in first and image in first
    assert (
        len(calls(engine, "restart")) == 1
    )  # what the agent left running ends before a verifier in the same container


def test_limits_of_a_container(engine: Path, tmp_path: Path) -> None:
    """A late command ends with all that runs there; what a container has written is looked at after each command."""
    one = (PodmanSandbox if name_of(engine) == "podman" else DockerSandbox)(
        read_folder(Path(row_of(tmp_path)["folder"])), LIMITS
    )
    one.start()
    late = one.run(["sleep", "60"], 3.0)
    assert (
        late.timed_out and late.problem == "the command has not ended after 3 s" and len(calls(engine, "restart")) == 1
    )
    assert one.run(["sh", "-c", "cat; exit 3"], 60.0, stdin=b"x").output == b"x"
    filled = one.run(["sh", "-c", "head -c 20000000 /dev/zero > large"], 60.0)
    assert filled.problem == "the sandbox has 19 MiB of files; at most 8 are allowed"
    one.stop()
    with pytest.raises(SandboxError, match="No such container"):
        one.run(["true"], 60.0)


def test_what_a_killed_run_left_is_removed(engine: Path, tmp_path: Path) -> None:
    """A container whose owner is gone; not that of a living process, or of another machine."""
    kind = PodmanSandbox if name_of(engine) == "podman" else DockerSandbox
    sandboxes = [kind(read_folder(Path(row_of(tmp_path)["folder"])), LIMITS) for _ in range(3)]
    for one, owner in zip(sandboxes, ("", f"{platform.node()}/{os.getpid()}.1", "elsewhere/1.1"), strict=True):
        one.start()
        path = engine / "containers" / one.state()["id"]
        path.write_text(json.dumps(json.loads(path.read_text()) | ({"label": f"{LABEL}={owner}"} if owner else {})))
    kind.prepare(LIMITS, prewarm=str(tmp_path))
    assert sorted(os.listdir(engine / "containers")) == sorted(
        one.state()["id"] for one in (sandboxes[0], sandboxes[2])
    )
    for one in sandboxes:
        one.stop()


def test_an_image_that_is_not_there(engine: Path, tmp_path: Path) -> None:
    options = {"backend": name_of(engine)}
    row = row_of(tmp_path / "a", dockerfile="")
    with pytest.raises(
        ValueError, match=r"needs an image, and there is no .*/environment/Dockerfile; write one, or name"
    ):
        played(row, **options)
    row = row_of(tmp_path / "b", config=f'{CONFIG}[environment]\ndocker_image = "x/y:1"\n')
    with pytest.raises(SandboxError, match="start of a sandbox has failed 3 times; .*pull access denied for x/y:1"):
        played(row, **options)
    row = row_of(tmp_path / "c", dockerfile="FROM x\nWORKDIR /\n")
    with pytest.raises((ValueError, SandboxError), match="no WORKDIR|cannot be written"):
        played(row, **options)


@pytest.mark.parametrize("engine", ["docker", "podman"], indirect=True)
def test_no_daemon_and_no_program(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker does not start, with the reason; in a run, a lost daemon is a failure and no reward."""
    kind = PodmanSandbox if name_of(engine) == "podman" else DockerSandbox
    (engine / "down").touch()
    with pytest.raises(
        ValueError,
        match="does not answer .*Is the docker daemon running.*; start its service, or set rollout.multi_turn.kwargs.backend",
    ):
        kind.prepare(LIMITS)
    with pytest.raises(SandboxError, match="Cannot connect"):
        kind(FolderTask("t", "", image="x"), LIMITS).start()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=f"there is no program {kind.engine}; install it"):
        kind.prepare(LIMITS)
