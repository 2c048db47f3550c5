"""The output folder of a conversion: what may be replaced, how much space it needs, and one error for a failed write."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from grpo_megatron.convert import ConvertError
from grpo_megatron.storage.atomic import new_folder
from grpo_megatron.storage.manifest import MANIFEST_FILE


def check_target(target: Path, source: Path, force: bool) -> None:
    """Refuse, before any work, a target that must not be written. Raises ConvertError."""
    output, source_path = target.resolve(), source.resolve()
    if output == source_path or output in source_path.parents or source_path in output.parents:
        raise ConvertError(f"output {str(target)!r} and input {str(source)!r} overlap; choose another output folder")
    if not (parent := _existing_parent(target)).is_dir():
        raise ConvertError(f"output {str(target)!r}: {str(parent)!r} is no folder; choose another output folder")
    if not os.path.lexists(target):
        return
    if not force:
        raise ConvertError(f"output {str(target)!r} exists; choose another folder, or replace it with --force")
    is_folder = target.is_dir() and not target.is_symlink()
    if not (is_folder and ((target / MANIFEST_FILE).exists() or not any(target.iterdir()))):
        raise ConvertError(
            f"output {str(target)!r} exists and has no {MANIFEST_FILE}: --force replaces only what this tool has written;"
            " remove it yourself"
        )


@contextlib.contextmanager
def output_folder(target: Path, needed_bytes: int) -> Iterator[Path]:
    """A new folder that becomes `target` when the block ends, and is removed after an error. Missing parents are made.

    Raises ConvertError instead of an operating system error; after a full disk it says how much was free and needed.
    """
    parent = _existing_parent(target)
    try:
        free = shutil.disk_usage(parent).free
        if free < needed_bytes:
            raise ConvertError(
                f"output {str(target)!r} needs {format_bytes(needed_bytes)}, its disk has {format_bytes(free)} free"
            )
        with _parents_of(target, parent), new_folder(target) as folder:
            yield folder
    except OSError as error:
        room = ""
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            free = shutil.disk_usage(parent).free
            room = f" ({format_bytes(free)} free, {format_bytes(needed_bytes)} needed)"
        raise ConvertError(f"cannot write {str(target)!r}: {error.strerror or error}{room}") from error


def _existing_parent(target: Path) -> Path:
    """The nearest folder above `target` that exists; or a file that stands in the place of a folder."""
    return next(path for path in target.absolute().parents if os.path.lexists(path))


@contextlib.contextmanager
def _parents_of(target: Path, existing: Path) -> Iterator[None]:
    """The folders between `existing` and `target`, which are removed again after an error. Raises OSError."""
    above = target.absolute().parents
    missing = above[: above.index(existing)] if existing in above else ()
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in missing:  # the lowest first
            with contextlib.suppress(OSError):  # another program has written there meanwhile
                folder.rmdir()
        raise


def format_bytes(count: float) -> str:
    """A number of bytes in the largest unit that leaves at least 1: 2.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
