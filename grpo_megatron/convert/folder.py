"""An output folder that is complete or absent: written under a hidden name beside it, renamed at the very end.

What a kill leaves behind is `.NAME.partial`, which no command takes for a result and the next run replaces.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from grpo_megatron.convert import ConvertError, manifest


def check_target(target: Path, source: Path, force: bool) -> None:
    """Refuse, before any work, a target that must not be written. Raises ConvertError."""
    here, there = target.resolve(), source.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ConvertError(f"output {str(target)!r} and input {str(source)!r} overlap; choose another output folder")
    if not target.parent.is_dir():
        raise ConvertError(f"output {str(target)!r}: the folder {str(target.parent)!r} does not exist")
    if not os.path.lexists(target):
        return
    if not force:
        raise ConvertError(f"output {str(target)!r} exists; choose another folder, or replace it with --force")
    is_ours = target.is_dir() and not target.is_symlink()
    is_ours = is_ours and ((target / manifest.NAME).exists() or not any(target.iterdir()))
    if not is_ours:
        raise ConvertError(
            f"output {str(target)!r} exists and has no {manifest.NAME}: --force replaces only what this tool has written;"
            " remove it yourself"
        )


@contextlib.contextmanager
def replacing(target: Path, needed_bytes: int) -> Iterator[Path]:
    """A new folder that becomes `target` when the block ends well, and is removed when it does not.

    An operating system error inside becomes one ConvertError that says what the disk has and what was needed.
    """
    partial = target.with_name(f".{target.name}.partial")
    lock = None
    try:
        free = shutil.disk_usage(target.parent).free
        if free < needed_bytes:
            raise ConvertError(f"output {str(target)!r} needs {size(needed_bytes)}, its disk has {size(free)} free")
        lock = _lock(partial)
        _empty(partial)
        yield partial
        _sync(partial)
        old = target.with_name(f".{target.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        _sync_folder(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        where = f" ({size(shutil.disk_usage(target.parent).free)} free, {size(needed_bytes)} needed)"
        where = where if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT) else ""
        raise ConvertError(f"cannot write {str(target)!r}: {error.strerror or error}{where}") from error
    finally:
        if lock is not None:
            shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)


def _lock(partial: Path) -> int:
    partial.mkdir(exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConvertError(f"{partial} is being written by another process; wait for it") from error
    return descriptor


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sync(folder: Path) -> None:
    """Everything on disk before the name says that it is complete."""
    for path in folder.rglob("*"):
        _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
