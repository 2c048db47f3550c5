"""What a process tree that was killed as a whole leaves on its machine, and its removal at the next start.

    grpo_megatron-* among the temporary files    private folders of a launcher, which holds a lock on them
    /dev/shm/sem.mp-*                            semaphores of Python's multiprocessing
    /dev/shm/*-cpushm_*                          shared memory of vLLM on CPU

Only this user's are removed, only after MIN_AGE_S, and shared memory only when no visible process has mapped it. Files are
compared by inode: glibc maps a semaphore under a temporary name, and another process may still open it by its own.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

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
    for folder in _own_and_old(Path(tempfile.gettempdir()), [f"{PREFIX}*"]):
        if not _is_locked(folder):
            shutil.rmtree(folder, ignore_errors=True)
    candidates = _own_and_old(SHARED_MEMORY, PATTERNS)
    mapped = _mapped_files() if candidates else set()
    for path in candidates:
        with contextlib.suppress(OSError):
            if path.lstat().st_ino not in mapped:
                path.unlink()


def _own_and_old(parent: Path, patterns: list[str] | tuple[str, ...]) -> list[Path]:
    found = []
    for pattern in patterns:
        for path in parent.glob(pattern):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > MIN_AGE_S:
                    found.append(path)
    return found


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _mapped_files() -> set[int]:
    """Inodes of the files below /dev/shm that any process has mapped, of those whose maps this user can read."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                if str(SHARED_MEMORY) in line:
                    found.add(int(line.split(maxsplit=5)[4]))  # address, permissions, offset, device, inode, path
    return found
