"""The output folder of a conversion, its files, which are hashed while they are written, and the progress that is printed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from grpo_megatron.convert import ConvertError
from grpo_megatron.storage.files import MANIFEST_FILE, new_folder
from grpo_megatron.untrusted import reason_of

SECONDS_BETWEEN_LINES = 15.0


def check_target(target: Path, source: Path, force: bool) -> None:
    """Refuses, before any work, a target that must not be written. Raises ConvertError."""
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
    """Gives the block a new folder, which becomes `target` at the end and is removed after an error. Makes missing parents.

    Raises ConvertError instead of an operating system error; after a full disk it says how much was free and needed.
    """
    parent = _existing_parent(target)
    above = target.absolute().parents
    missing = above[: above.index(parent)] if parent in above else ()  # the lowest first
    try:
        free = shutil.disk_usage(parent).free
        if free < needed_bytes:
            raise ConvertError(
                f"output {str(target)!r} needs {format_bytes(needed_bytes)}, its disk has {format_bytes(free)} free"
            )
        with new_folder(target) as folder:
            yield folder
    except BaseException as error:
        for made in missing:
            with contextlib.suppress(OSError):  # another program has written there meanwhile
                made.rmdir()
        if not isinstance(error, OSError):
            raise
        room = ""
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            free = shutil.disk_usage(parent).free
            room = f" ({format_bytes(free)} free, {format_bytes(needed_bytes)} needed)"
        raise ConvertError(f"cannot write {str(target)!r}: {reason_of(error)}{room}") from error


def _existing_parent(target: Path) -> Path:
    """Returns the nearest folder above `target` that exists; or a file that stands in the place of a folder."""
    return next(path for path in target.absolute().parents if os.path.lexists(path))


class HashedFiles:
    """Writes the files of a folder one after the other. `hashes` (name -> sha256) is complete when the `with` ends.

    A thread hashes the last write while the next data is read: hashing, reading and writing release Python's lock.
    Data must not change after it has been written.
    """

    def __init__(self, folder: Path) -> None:
        self.hashes: dict[str, str] = {}
        self.size = 0  # bytes of the current file
        self._folder, self._name, self._sha = folder, "", hashlib.sha256()
        self._file: Any = None
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def __enter__(self) -> HashedFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._end()
        finally:
            self._thread.shutdown()
            if self._file is not None:
                self._file.close()

    def begin(self, name: str) -> None:
        """End the current file. Later writes go to a new file `name`."""
        self._end()
        self._name, self.size, self._sha = name, 0, hashlib.sha256()
        self._file = (self._folder / name).open("xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Append to the current file. Raises OSError."""
        self.wait()
        self._pending = self._thread.submit(self._sha.update, data)
        done = 0
        with memoryview(data) as view:
            while done < len(view):
                done += self._file.write(view[done:])
        self.size += done

    def wait(self) -> None:
        """Return when nothing reads the data of the last `write` any more."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _end(self) -> None:
        self.wait()
        if self._file is not None:
            self._file.close()
            self.hashes[self._name] = self._sha.hexdigest()


class Progress:
    """`with Progress("to-megatron", total) as progress: progress.add(n)`: bytes done and bytes per second.

    Shows a bar on a terminal, otherwise one line per 15 seconds. Writes to standard error.
    """

    def __init__(self, label: str, total: int, quiet: bool = False) -> None:
        self.label, self.total, self.quiet, self.done = label, total, quiet, 0
        self._start = self._last = time.monotonic()
        has_bar = sys.stderr.isatty() and not quiet
        self._bar = tqdm(
            total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=not has_bar
        )

    def add(self, count: int) -> None:
        """Count `count` more bytes."""
        self.done += count
        self._bar.update(count)
        if self._bar.disable and time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._line()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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


def format_bytes(count: float) -> str:
    """Writes a number of bytes in the largest unit that leaves at least 1: 2.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
