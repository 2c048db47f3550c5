"""FolderLock: one run at a time writes into a folder.

The lock is flock(2) on a file in the folder. The kernel releases it when its holder ends, however that happens. A network
file system may need a while to notice that the holder's machine has died, so a lock of the same Slurm job, which has been
requeued, is waited for. A file system without locks is used without one, with a warning.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import fcntl
import itertools
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_megatron.storage import StorageError
from grpo_megatron.storage.atomic import try_lock

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
        """Release the lock."""
        os.close(self._descriptor)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take(self, deadline: float) -> None:
        try:
            while not try_lock(self._descriptor):
                holder = _signature(self.path)
                if not _is_of_this_job(holder) or time.monotonic() > deadline:
                    raise StorageError(in_use_by(holder))
                time.sleep(1)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            text = "%s: this file system has no locks; start no second run in this folder"
            logging.getLogger(__name__).warning(text, self.path)

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
        if _is_free(path, fcntl.LOCK_SH):
            return None
    except OSError:
        return None
    holder = _signature(path)
    return None if _is_of_this_job(holder) else holder


def _is_free(path: Path, kind: int, flags: int = 0) -> bool:
    """Whether nobody holds a lock of a file or folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        return try_lock(descriptor, kind)
    finally:
        os.close(descriptor)


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


# -- What a process tree that was killed as a whole leaves on its machine, and its removal at the next start -----------
# grpo_megatron-* among the temporary files    private folders of a launcher, which holds a lock on them
# /dev/shm/sem.mp-*                            semaphores of Python's multiprocessing
# /dev/shm/*-cpushm_*                          shared memory of vLLM on CPU
#
# Only this user's are removed, only after MIN_AGE_S, and shared memory only when no visible process has mapped it. Files are
# compared by inode: glibc maps a semaphore under a temporary name, and another process may still open it by its own.

PREFIX = "grpo_megatron-"
SHARED_MEMORY = Path("/dev/shm")
PATTERNS = ("sem.mp-*", "*-cpushm_*")
MIN_AGE_S = 60.0  # a younger one may be between its creation and its lock, or its first use


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new temporary folder that only this user can read; it is locked until the block ends, and then removed."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def folder_until_exit() -> Path:
    """As `private_folder`, but until this process ends. A killed process leaves it to `remove_leftovers`."""
    held = contextlib.ExitStack()
    atexit.register(held.close)
    return held.enter_context(private_folder())


def remove_leftovers() -> None:
    """Remove what killed runs of this user have left. Errors are ignored: another process may clean up, too."""
    for folder in _own_and_old(Path(tempfile.gettempdir()), f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_free(folder, fcntl.LOCK_EX, os.O_DIRECTORY | os.O_NOFOLLOW):
                shutil.rmtree(folder, ignore_errors=True)
    candidates = _own_and_old(SHARED_MEMORY, *PATTERNS)
    mapped = _mapped_files() if candidates else set()
    for path in candidates:
        with contextlib.suppress(OSError):
            if path.lstat().st_ino not in mapped:
                path.unlink()


def _own_and_old(parent: Path, *patterns: str) -> list[Path]:
    found = []
    for path in itertools.chain(*map(parent.glob, patterns)):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > MIN_AGE_S:
                found.append(path)
    return found


def _mapped_files() -> set[int]:
    """Inodes of the files below /dev/shm that any process has mapped, of those whose maps this user can read."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                if str(SHARED_MEMORY) in line:
                    found.add(int(line.split(maxsplit=5)[4]))  # address, permissions, offset, device, inode, path
    return found
