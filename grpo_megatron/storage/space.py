"""Free space of a file system, asked before hours of work depend on it. Quotas are not seen."""

from __future__ import annotations

import shutil
from pathlib import Path

from grpo_megatron.storage import StorageError


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise StorageError when the file system of `folder` has less than `needed` bytes for `what`.

    `folder` and its parents may be missing.
    """
    free = _free(folder)
    if free < needed:
        raise StorageError(
            f"no space left: {what} takes {_gib(needed)}, the file system of {folder} has {_gib(free)} free"
        )


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
