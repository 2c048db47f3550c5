"""The files of a conversion, hashed by a thread while they are written. Every block of a few MiB goes through a cycle:

    take a free block -> read into it -> write it -> sha256 in the thread -> free again

Memory is neither copied nor allocated again. While the thread hashes one block, the next is read and written: hashlib,
read and write all release Python's global interpreter lock.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from grpo_megatron.convert import ConvertError
from grpo_megatron.convert.source import ReusedMemory, as_bytes
from grpo_megatron.storage.atomic import new_folder
from grpo_megatron.storage.manifest import MANIFEST_FILE

# -- The output folder of a conversion: what may be replaced, how much space it needs, and one error for a failed write


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


# -- Bytes done and bytes per second: a bar on a terminal, one line per 15 seconds in a log ----------------------------

SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """`with Progress("to-megatron", total) as progress: progress.add(n)`. Writes to standard error."""

    def __init__(self, label: str, total: int, quiet: bool = False) -> None:
        self.label, self.total, self.quiet, self.done = label, total, quiet, 0
        self._start = self._last = time.monotonic()
        self._bar = None
        if sys.stderr.isatty() and not quiet:
            self._bar = tqdm(total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1024, leave=False)

    def add(self, count: int) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._line()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if kind is None:
            self._line()

    def _line(self) -> None:
        self._last = time.monotonic()
        if not self.quiet:
            done, total = format_bytes(self.done), format_bytes(self.total)
            percent = 100 * self.done / max(self.total, 1)
            speed = format_bytes(self.done / max(self._last - self._start, 1e-6))
            print(f"{self.label}: {done} of {total} ({percent:.0f}%), {speed}/s", file=sys.stderr, flush=True)


NUM_BLOCKS = 4  # in the cycle
# Larger single writes take up to six times the processor time: the kernel looks for larger pages.
WRITE_BYTES = 256 << 10
FLUSH_BYTES = 64 << 20  # after so many bytes the kernel is told to start writing them to the disk


class Output:
    """Writes the files of one folder, one after the other. `hashes` (name -> sha256) is complete when the `with` ends."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.hashes: dict[str, str] = {}
        self._folder, self._progress = folder, progress
        self._free: queue.SimpleQueue[ReusedMemory] = queue.SimpleQueue()
        for _ in range(NUM_BLOCKS):
            self._free.put(ReusedMemory())
        self._written: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._hash, daemon=True)
        self._file: Any = None
        self._sha: Any = None
        self._size = self._flushed = 0

    def __enter__(self) -> Output:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._written.put(None)
        self._thread.join()

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[None]:
        """Within, everything is written to this new file."""
        with (self._folder / name).open("xb", buffering=0) as self._file:
            self._sha, self._size, self._flushed = hashlib.sha256(), 0, 0
            yield
            self._flush()
            self._written.put((self._sha, name, None))

    def tell(self) -> int:
        return self._size

    def write(self, data: bytes) -> None:
        """Write a header, or other small data."""
        self._write(memoryview(data))
        self._written.put((self._sha, data, None))

    @contextlib.contextmanager
    def block(self, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
        """An uninitialised tensor to fill within the block. Then it is written, and its memory is reused."""
        memory = self._free.get()
        tensor = memory.tensor(shape, dtype)
        yield tensor
        data = as_bytes(tensor)
        self._write(data)
        self._written.put((self._sha, data, memory))
        self._progress.add(len(data))

    def _write(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += self._file.write(data[done : done + WRITE_BYTES])
        self._size += done
        if self._size - self._flushed >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Let the disk start writing. Otherwise it is idle until the final fsync, which waits for all of it."""
        count = self._size - self._flushed
        os.posix_fadvise(self._file.fileno(), self._flushed, count, os.POSIX_FADV_DONTNEED)
        self._flushed = self._size

    def _hash(self) -> None:
        while (item := self._written.get()) is not None:
            sha, data, memory = item
            if isinstance(data, str):  # the end of the file of that name
                self.hashes[data] = sha.hexdigest()
                continue
            sha.update(data)
            if memory is not None:
                self._free.put(memory)
