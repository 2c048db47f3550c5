"""FolderLock: one run at a time writes into a folder.

The lock is flock(2) on a file in the folder. The kernel releases it when its holder ends, however that happens. A network
file system may need a while to notice that the holder's machine has died, so a lock of the same Slurm job, which has been
requeued, is waited for. A file system without locks is used without one, with a warning.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import logging
import os
import platform
import time
from pathlib import Path

from grpo_megatron.storage import StorageError

LOCK_FILE = ".lock"
SAME_JOB_S = 180.0  # a server of NFS releases the locks of a dead machine after 90 s
JOB = "SLURM_JOB_ID"


class FolderLock:
    """Held from construction to `close`; a context manager. Raises StorageError while another process holds it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(time.monotonic() + SAME_JOB_S)
            self._sign()
        except BaseException:
            os.close(self._descriptor)
            raise

    def is_in_place(self) -> bool:
        """False when the folder, or the lock's file, was deleted or replaced while the lock was held."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        here = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take(self, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    text = "%s: this file system has no locks; start no second run in this folder"
                    logging.getLogger(__name__).warning(text, self.path)
                    return
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            holder = _signature(self.path)
            if not _is_of_this_job(holder) or time.monotonic() > deadline:
                raise StorageError(in_use_by(holder))
            time.sleep(1)

    def _sign(self) -> None:
        since = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        text = f"process {os.getpid()} on {platform.node()} since {since}{_job_suffix()}\n"
        with contextlib.suppress(OSError):  # a full disk: the name of the holder is a help, no part of the lock
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode(), 0)


def lock_holder(folder: Path) -> str | None:
    """Who holds the lock of `folder`; None if nobody does, or only this Slurm job, whose lock is waited for.

    Writes nothing. A folder without the lock's file, or one that cannot be read, counts as free.
    """
    path = folder / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        holder = _signature(path)
        is_held = error.errno in (errno.EWOULDBLOCK, errno.EACCES) and not _is_of_this_job(holder)
        return holder if is_held else None
    finally:
        os.close(descriptor)
    return None


def in_use_by(holder: str) -> str:
    """A message about a folder."""
    return f"it is in use by {holder or 'another process'}; wait for its end, stop it, or use another folder"


def _signature(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _job_suffix() -> str:
    return f" (Slurm job {os.environ[JOB]})" if JOB in os.environ else ""


def _is_of_this_job(holder: str) -> bool:
    return JOB in os.environ and holder.endswith(_job_suffix())
