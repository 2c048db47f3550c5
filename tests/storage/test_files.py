"""A file or a folder with its final name is complete, whatever happens while it is written."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.evaluation.ledger import claim_output
from grpo_megatron.storage import StorageError, files
from grpo_megatron.storage.files import is_partial, new_folder, partial_of, publish_folder, write_file
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
    assert files.lock_holder(tmp_path) is None
    with pytest.raises(StorageError, match=kind), claim_output(tmp_path):
        pass


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"step": "2", "config": {}}', None])
def test_a_damaged_trainer_json_is_named(tmp_path: Path, content: str | None) -> None:
    os.mkfifo(tmp_path / "trainer.json") if content is None else (tmp_path / "trainer.json").write_text(content)
    with pytest.raises(StorageError, match=r"/trainer.json is (damaged: it lacks the key 'step'|not JSON|a FIFO)"):
        read_step(tmp_path, "step", "config")
