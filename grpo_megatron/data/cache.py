"""DataCache: what is computed once from data files and kept on disk, for all ranks of a machine and for later runs.

The folder is $GRPO_MEGATRON_CACHE, or else ~/.cache/grpo_megatron. On a shared file system all nodes share it. It may be
deleted at any time. Where it cannot be written, each process has a folder of its own, which ends with the process.

An entry is written under another name and then renamed, so it is complete or absent. Its bytes are preceded by their sha256:
an entry that was damaged counts as absent. Locks (POSIX record locks) end with their holder, and a file system without locks
only costs work that is done twice.

The key of a file's content is its sha256 up to WHOLE bytes. A larger file is not read whole for a key: it is known by its
size, its time of modification in nanoseconds and the sha256 of SAMPLES blocks at equal distances.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from grpo_megatron.storage.run_files import CACHE_VARIABLE, cache_folder

logger = logging.getLogger(__name__)

WHOLE = 1 << 28  # bytes
SAMPLES, SAMPLE = 256, 1 << 16  # blocks of a large file, and bytes of each
DIGEST = 32  # bytes


class DataCache:
    """Entries in `folder`, which exists and can be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> bytes | None:
        """The bytes of an entry; None where it is absent or damaged."""
        try:
            content = (self.folder / name).read_bytes()
        except OSError:
            return None
        digest, payload = content[:DIGEST], content[DIGEST:]
        return payload if hashlib.sha256(payload).digest() == digest else None

    def write(self, name: str, payload: bytes) -> None:
        """Write or replace an entry. A full disk is a warning: the work is then done again by the next process."""
        with self._partial(name) as partial:
            partial.write_bytes(hashlib.sha256(payload).digest() + payload)
            os.replace(partial, self.folder / name)

    def file(self, name: str, write: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> Path:
        """The path of an entry that is too large to be read: `write(path)` makes it where `is_whole(path)` is false.

        Raises OSError when it cannot be written.
        """
        target = self.folder / name
        with self.lock(name, 0, wait=True):
            if not is_whole(target):
                partial = self._partial_path(name)
                try:
                    write(partial)
                    os.replace(partial, target)
                finally:
                    partial.unlink(missing_ok=True)
        return target

    @contextlib.contextmanager
    def lock(self, name: str, place: int, *, wait: bool) -> Iterator[bool]:
        """Whether this process has lock number `place` of `name`. Without `wait`, False where another process has it."""
        with self.lock_file(name) as descriptor, take_lock(descriptor, place, wait=wait) as is_taken:
            yield is_taken

    @contextlib.contextmanager
    def lock_file(self, name: str) -> Iterator[int]:
        """The descriptor of the file with the locks of `name`. A process closes it only after its last lock."""
        path = self.folder / f"{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _partial(self, name: str) -> Iterator[Path]:
        partial = self._partial_path(name)
        try:
            yield partial
        except OSError as error:
            logger.warning("cannot write to the cache %s: %s", self.folder, error.strerror)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def _partial_path(self, name: str) -> Path:
        path = self.folder / f"{name}.{uuid.uuid4().hex[:8]}.partial"
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path


@contextlib.contextmanager
def take_lock(descriptor: int, place: int, *, wait: bool) -> Iterator[bool]:
    """Hold the lock on byte `place` of an open file. Yields whether it is held."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, place)
    except BlockingIOError:
        yield False
        return
    except PermissionError:  # the other error number that POSIX allows for a lock that is taken
        yield False
        return
    except OSError:  # a file system without locks
        yield True
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, place)


def data_cache() -> DataCache:
    """The cache of this process."""
    return _cache_in(cache_folder())


@functools.cache
def _cache_in(folder: str) -> DataCache:
    path = Path(folder) / "data"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return DataCache(path)
    except OSError as error:
        logger.warning("the cache %s cannot be written (%s); set %s to a folder", path, error.strerror, CACHE_VARIABLE)
        return DataCache(Path(_temporary_folder().name))


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="grpo_megatron_")


@functools.lru_cache(maxsize=64)
def _digest(path: Path, size: int, modified: int) -> str:
    known = hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE:
            while block := file.read(1 << 20):
                known.update(block)
        else:
            known.update(f"{size} {modified}".encode())
            for number in range(SAMPLES):
                file.seek(number * (size - SAMPLE) // (SAMPLES - 1))
                known.update(file.read(SAMPLE))
    return known.hexdigest()


def content_key(path: Path) -> str:
    """The key of a file's content: see the header. Raises OSError."""
    stat = path.stat()
    return _digest(path, stat.st_size, stat.st_mtime_ns)
