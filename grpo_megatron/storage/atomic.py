"""Files and folders that are complete or absent, also after a kill or a power failure.

Both are written under a hidden name in the same folder as their target, so that the last step is a rename within one
file system, which is atomic. fsync comes before the rename: the new name must not be on disk before the content is.

    file    .NAME.XXXXXXXX.partial   removed when writing fails; only a kill leaves it behind
    folder  .NAME.partial            the same; the next writer of the same target replaces it
            .NAME.replaced           the target's old content, between the two renames of a replacement
            .NAME.removed            a folder that is being deleted
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from grpo_megatron.storage import StorageError

PARTIAL, REPLACED, REMOVED = ".partial", ".replaced", ".removed"


def write_file(path: Path, content: str | Iterable[str]) -> None:
    """Write or replace a text file (UTF-8) in an existing folder. Raises OSError; an old file then stays as it was."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.writelines([content] if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def partial_of(target: Path) -> Path:
    """The name under which a folder is written before it becomes `target`."""
    return target.with_name(f".{target.name}{PARTIAL}")


def is_partial(folder: Path) -> bool:
    """Whether `folder` has the name of one that is still being written, or that a kill has left behind."""
    return folder.name.startswith(".") and folder.name.endswith(PARTIAL)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """An empty folder that becomes `target`, or replaces it, when the block ends; after an error it is removed.

    Parent folders are created. Raises StorageError when another process is writing the same target, and OSError.
    """
    partial = partial_of(target)
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        if not try_lock(lock):
            raise StorageError(f"{partial} is being written by another process; wait for it")
        try:
            for path in partial.iterdir():
                _remove(path)
            yield partial
            publish_folder(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def publish_folder(partial: Path, target: Path) -> None:
    """Rename the complete folder `partial` to `target` in the same parent folder, in place of an existing one.

    A kill between the two renames of a replacement leaves no target, but both folders. Raises OSError.
    """
    for path in partial.rglob("*"):
        sync_path(path)
    sync_path(partial)
    old = target.with_name(f".{target.name}{REPLACED}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    sync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that its name never stands for a part of it, also after a kill. Raises OSError."""
    removed = folder.with_name(f".{folder.name}{REMOVED}")
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    sync_path(folder.parent)
    shutil.rmtree(removed, ignore_errors=True)


def clear_leftovers(parent: Path) -> None:
    """Delete what a kill has left in `parent`, while nobody writes there. A replaced folder without successor returns."""
    for path in parent.glob(f".*{REPLACED}"):
        target = path.with_name(path.name[1:].removesuffix(REPLACED))
        if not target.exists():
            path.rename(target)
    for ending in (PARTIAL, REPLACED, REMOVED):
        for path in parent.glob(f".*{ending}"):
            with contextlib.suppress(OSError):
                _remove(path)


def sync_path(path: Path) -> None:
    """fsync of a file, or of a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Take the lock (flock) of an open file. False while another process holds it. Raises OSError for other reasons."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# -- Free space of a file system, asked before hours of work depend on it. Quotas are not seen -------------------------


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise StorageError when the file system of `folder` has less than `needed` bytes for `what`.

    `folder` and its parents may be missing.
    """
    free = _free(folder)
    if free < needed:
        text = f"no space left: {what} takes {_gib(needed)}, the file system of {folder} has {_gib(free)} free"
        raise StorageError(text)


def describe_space(folder: Path) -> str:
    """For errors of libraries that do not say that the disk is full."""
    try:
        return f"{folder} has {_gib(_free(folder))} free"
    except OSError as error:
        return str(error)


def _free(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"
