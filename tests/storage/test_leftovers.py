"""What killed runs have left is removed; what a running process uses, or somebody has just made, is not."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.storage import files

ROOT = Path(__file__).resolve().parents[2]
SERVE = """
import sys
from grpo_megatron.cli.ranks import start_fork_server
start_fork_server()
print("serving", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary files of this test, and of its children, are here; so is the shared memory that is looked at."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    yield tmp_path
    tempfile.tempdir = None


def make_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (time.time() - 3600,) * 2)


@pytest.mark.parametrize("is_killed", [True, False])
def test_fork_server(folder: Path, is_killed: bool) -> None:
    """multiprocessing would leave a folder pymp-* with the server's socket, which nobody removes."""
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == "serving\n"
        (private,) = folder.iterdir()
        make_old(private)
        files.remove_leftovers()  # leaves what is locked
        assert private.stat().st_mode & 0o077 == 0 and any(private.iterdir())  # the socket
        if is_killed:
            launcher.kill()
    if is_killed:
        make_old(private)
        files.remove_leftovers()
    assert not list(folder.iterdir())


def test_a_folder_that_was_just_made_and_those_of_others_stay(folder: Path) -> None:
    young, other = folder / "grpo_megatron-young", folder / "grpo_megatron_other"
    for path in (young, other):
        path.mkdir()
    make_old(other)
    files.remove_leftovers()
    assert young.exists() and other.exists()


def test_semaphores_and_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third one is mapped under another name, as glibc does; the fourth is young, the last has nobody's name."""
    names = ["sem.mp-lost", "29500-tp:0-[0-1]-cpushm_0", "sem.mp-used", "sem.mp-young", "sem.user"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        monkeypatch.setattr(files, "SHARED_MEMORY", folder := Path(name))
        paths = [folder / name for name in names]
        for path in paths:
            path.write_bytes(b"x" * 32)
        make_old(paths[0], paths[1], paths[2], paths[4])
        paths[2].rename(folder / "sem.nv1eHJ")
        with (folder / "sem.nv1eHJ").open("r+b") as file, mmap.mmap(file.fileno(), 32):
            (folder / "sem.nv1eHJ").rename(paths[2])
            files.remove_leftovers()
        assert [path.name for path in paths if path.exists()] == ["sem.mp-used", "sem.mp-young", "sem.user"]
        files.remove_leftovers()
        assert not paths[2].exists()


def test_a_semaphore_that_another_process_has_yet_to_open() -> None:
    """A real one, of multiprocessing."""
    held = multiprocessing.get_context("spawn").Lock()
    path = Path("/dev/shm") / f"sem.{held._semlock.name.removeprefix('/')}"  # type: ignore[attr-defined]
    make_old(path)
    files.remove_leftovers()
    assert path.exists()


def test_any_command_removes_what_killed_ones_have_left(folder: Path) -> None:
    (left := folder / f"{files.PREFIX}left").mkdir()
    make_old(left)
    assert main(["generate", "--model", "no-such-model", "--prompt", "a", "--device", "cpu"]) == 2
    assert not left.exists()
