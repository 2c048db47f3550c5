"""The files of a conversion, hashed by a thread while they are written. Every block of a few MiB goes through a cycle:

    take a free block -> read into it -> write it -> sha256 in the thread -> free again

Memory is neither copied nor allocated again. While the thread hashes one block, the next is read and written: hashlib,
read and write all release Python's global interpreter lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.convert.progress import Progress
from grpo_megatron.convert.span import ReusedMemory, as_bytes

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
