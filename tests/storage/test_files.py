"""Files and folders that are complete or absent, manifests, and what killed runs leave: real kills, real locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.config import ConfigError
from grpo_megatron.evaluation.ledger import claim_output
from grpo_megatron.storage import StorageError, files
from grpo_megatron.storage.files import (
    MANIFEST_FILE,
    Verification,
    check_sizes,
    is_partial,
    new_folder,
    partial_of,
    publish_folder,
    read_manifest,
    sha256_of,
    write_file,
    write_manifest,
)
from grpo_megatron.storage.run_files import read_step


def to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def killed(action: Callable[[], Any]) -> None:
    """Run `action` in a forked child, which must be killed by it."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_space(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_its_mode_follows_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_file(tmp_path / "file", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_an_error_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the content, or of the disk."""

    def content() -> Iterator[str]:
        yield "new"
        raise RuntimeError("no more")

    (tmp_path / "file").write_text("old")
    with pytest.raises(RuntimeError, match="no more"):
        write_file(tmp_path / "file", content())
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "file", "new")
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_kill_leaves_the_old_file(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, moment, kill)
    killed(lambda: write_file(tmp_path / "file", "new"))
    assert (tmp_path / "file").read_text() == "old"
    leftovers = [name for name in names(tmp_path) if name != "file"]
    assert len(leftovers) == 1 and is_partial(tmp_path / leftovers[0])


def test_content_is_on_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync of the file, rename, fsync of the folder: in this order."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_replace(old: Any, new: Any) -> None:
        calls.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_file(tmp_path / "file", "text")
    assert calls == ["file", "rename", "folder"]


# -- folders -----------------------------------------------------------------------------------------------------------


def fill(folder: Path, text: str) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text(text)


def test_a_folder_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "not yet" / "out"
    with new_folder(target) as folder:
        assert folder == partial_of(target) and is_partial(folder) and not target.exists()
        fill(folder, "first")
    assert names(target.parent) == ["out"] and (target / "sub/file").read_text() == "first"
    with new_folder(target) as folder:
        fill(folder, "second")
        assert (target / "sub/file").read_text() == "first"
    assert names(target.parent) == ["out"] and (target / "sub/file").read_text() == "second"


def test_an_error_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_folder(tmp_path / "out") as folder:
        fill(folder, "old")
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out") as folder:
        fill(folder, "new")
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="No space left"), new_folder(tmp_path / "out") as folder:
        fill(folder, "new")
        monkeypatch.setattr(os, "fsync", no_space)
    assert names(tmp_path) == ["out"] and (tmp_path / "out/sub/file").read_text() == "old"


def test_what_a_kill_leaves_is_replaced(tmp_path: Path) -> None:
    def write() -> None:
        with new_folder(tmp_path / "out") as folder:
            fill(folder, "half")
            kill()

    killed(write)
    assert names(tmp_path) == [".out.partial"]
    (tmp_path / ".out.partial" / "link").symlink_to(tmp_path)
    with new_folder(tmp_path / "out") as folder:
        assert names(folder) == []
        fill(folder, "whole")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["sub"]


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_between_the_renames_loses_nothing(
    tmp_path: Path, renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first rename there is no folder with the final name, but both contents are there."""
    partial = partial_of(tmp_path / "out")
    for folder, text in ((tmp_path / "out", "old"), (partial, "new")):
        folder.mkdir()
        fill(folder, text)
    rename, calls = Path.rename, [0]

    def count(path: Path, new: Path) -> None:
        calls[0] += 1
        if calls[0] == renames:
            kill()
        rename(path, new)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", count)
        killed(lambda: publish_folder(partial, tmp_path / "out"))
    assert names(tmp_path) == [[".out.partial", "out"], [".out.partial", ".out.replaced"]][renames - 1]
    publish_folder(partial, tmp_path / "out")
    assert names(tmp_path) == ["out"] and (tmp_path / "out/sub/file").read_text() == "new"


def test_everything_is_on_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    sync, rename = files.sync_path, Path.rename

    def note_sync(path: Path) -> None:
        calls.append(path.name)
        sync(path)

    def note_rename(path: Path, new: Path) -> None:
        calls.append("rename")
        rename(path, new)

    monkeypatch.setattr(files, "sync_path", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    with new_folder(tmp_path / "out") as folder:
        fill(folder, "text")
    assert sorted(calls[:3]) == [".out.partial", "file", "sub"] and calls[3:] == ["rename", tmp_path.name]


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    """The second one is refused, and the first one is not disturbed."""
    with new_folder(tmp_path / "out") as folder:
        fill(folder, "first")
        with pytest.raises(StorageError, match="being written by another process"), new_folder(tmp_path / "out"):
            pass
    assert names(tmp_path) == ["out"] and (tmp_path / "out/sub/file").read_text() == "first"


def test_a_file_system_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"), new_folder(tmp_path / "out"):
        pass


@pytest.mark.parametrize(("kind", "make"), {"folder": Path.mkdir, "FIFO": os.mkfifo, "device": to_zero}.items())
def test_a_lock_that_is_no_file_is_refused_by_name(tmp_path: Path, kind: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / ".lock")
    with pytest.raises(StorageError, match=rf"/.lock is a {kind}, not a regular file; remove it"):
        files.FolderLock(tmp_path)
    with pytest.raises(ConfigError, match=kind), claim_output(tmp_path):
        pass


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"step": "2", "config": {}}', None])
def test_a_damaged_trainer_json_is_named(tmp_path: Path, content: str | None) -> None:
    os.mkfifo(tmp_path / "trainer.json") if content is None else (tmp_path / "trainer.json").write_text(content)
    with pytest.raises(StorageError, match=r"/trainer.json is (damaged: it lacks the key 'step'|not JSON|a FIFO)"):
        read_step(tmp_path, "step", "config")


ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", FIPS 180-2
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "sub" / "empty").write_text("")
    write_manifest(tmp_path, "test", {})
    return tmp_path


def test_every_file_is_in_it(listed: Path) -> None:
    assert json.loads((listed / MANIFEST_FILE).read_text()) == {
        "version": 1,
        "kind": "test",
        "files": {"a.txt": {"size": 3, "sha256": ABC}, "sub/empty": {"size": 0, "sha256": EMPTY}},
    }
    assert check_sizes(listed) and Verification(listed).finish()


def test_known_hashes_are_not_computed_again(listed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "READ_BYTES", 2)
    assert sha256_of(listed / "a.txt") == ABC  # of several blocks
    write_manifest(listed, "test", {"a.txt": "known"})
    listed = read_manifest(listed)
    assert listed is not None and listed["a.txt"]["sha256"] == "known" and listed["sub/empty"]["sha256"] == EMPTY


def test_without_a_manifest_nothing_is_compared(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None and not check_sizes(tmp_path) and not Verification(tmp_path).finish()


def test_all_that_differs_is_named(listed: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = shutil.copytree(listed, tmp_path_factory.mktemp("copy"), dirs_exist_ok=True)
    (copy / "a.txt").write_text("abd")  # of the same size
    (listed / "a.txt").write_text("abcd")
    (listed / "sub" / "empty").unlink()
    (listed / "extra.safetensors").write_text("")
    verification = Verification(copy)
    with pytest.raises(StorageError, match=r"a\.txt: sha256 differs"):
        verification.finish()
    with pytest.raises(StorageError) as error:
        check_sizes(listed)
    assert str(error.value).splitlines() == [
        f"{listed} is not what its manifest.json says:",
        "  a.txt has 4 bytes, expected 3",
        "  missing sub/empty",
        "  extra.safetensors is not in the manifest",
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("files"),
        lambda content: content["files"].update({"../secret": {"size": 1, "sha256": ABC}}),
        lambda content: content["files"].update({"/etc/passwd": {"size": 1, "sha256": ABC}}),
    ],
)
def test_what_is_no_manifest_is_refused(listed: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((listed / MANIFEST_FILE).read_text())
    change(content)
    (listed / MANIFEST_FILE).write_text(json.dumps(content))
    with pytest.raises(StorageError, match="not a readable manifest"):
        read_manifest(listed)


ROOT = Path(__file__).resolve().parents[2]
SERVE = """
import sys
from grpo_megatron.cli.ranks import start_fork_server
start_fork_server()
print("serving", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary files of this test, and of its children, are here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    tempfile.tempdir = None


def make_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (time.time() - 3600,) * 2)


@pytest.mark.parametrize("is_killed", [True, False])
def test_fork_server(shared: Path, is_killed: bool) -> None:
    """multiprocessing would leave a folder pymp-* with the server's socket, which nobody removes."""
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == "serving\n"
        (private,) = shared.iterdir()
        make_old(private)
        files.remove_leftovers()  # leaves what is locked
        assert private.stat().st_mode & 0o077 == 0 and any(private.iterdir())  # the socket
        if is_killed:
            launcher.kill()
    if is_killed:
        make_old(private)
        files.remove_leftovers()
    assert not list(shared.iterdir())


def test_a_folder_that_was_just_made_and_those_of_others_stay(shared: Path) -> None:
    young, other = shared / "grpo_megatron-young", shared / "grpo_megatron_other"
    for path in (young, other):
        path.mkdir()
    make_old(other)
    files.remove_leftovers()
    assert young.exists() and other.exists()


def test_any_command_removes_what_killed_ones_have_left(shared: Path) -> None:
    (left := shared / f"{files.PREFIX}left").mkdir()
    make_old(left)
    assert main(["generate", "--model", "no-such-model", "--prompt", "a", "--device", "cpu"]) == 2
    assert not left.exists()
