"""Survey: one pass over all rows before the run, in chunks. Every row is checked, and a few numbers of each are kept.

Memory does not grow with the rows, but for these numbers. With a key, each chunk is kept in the cache of the data, and the
processes that survey the same rows share the work: each takes the chunks that nobody else has, under a lock, and reads what
the others have stored. So no rank waits for another that has died, and ranks need no process group. Processor cores that no
rank uses are taken by child processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
from tqdm import tqdm

from grpo_megatron.data.cache import DataCache, data_cache, take_lock
from grpo_megatron.data.row_set import RowSet
from grpo_megatron.importing import collection_paused

T = TypeVar("T")

ROWS_PER_CHUNK = 8192  # rows
MIN_CACHED = 2048  # fewer rows are surveyed in less time than files take
CHUNKS_PER_CHILD = 4  # fewer chunks are not worth the start of a process

Numbers = np.ndarray[Any, np.dtype[np.int32]]
Measure = Callable[[list[tuple[int, T]]], Numbers]  # (row number, parsed row) of a chunk -> [items, columns]


class Survey(Generic[T]):
    """`parse(row)` raises ValueError for a wrong row. `measure` gives one line of numbers per item of a chunk.

    `key`: everything that the numbers depend on; None: they are not cached.
    """

    def __init__(
        self, rows: RowSet, parse: Callable[[dict[str, Any]], T], measure: Measure[T], key: str | None
    ) -> None:
        self.rows, self.parse, self.measure = rows, parse, measure
        self._name = f"survey-{key}" if key and len(rows) >= MIN_CACHED else None
        self._chunks = range(-(-len(rows) // ROWS_PER_CHUNK))
        self._problems: list[tuple[int, str]] = []

    def run(self) -> Numbers:
        """The numbers of all rows, in order. Raises ConfigError for wrong rows, and what `measure` raises."""
        if self._name is None:
            parts = [self._compute(chunk) for chunk in self._counted()]
        else:
            parts = self._shared(self._name, data_cache())
        if self._problems:
            raise self.rows.wrong_rows(sorted(self._problems), len(self.rows))
        return np.concatenate([part for part in parts if part is not None])

    def _shared(self, name: str, cache: DataCache) -> list[Numbers | None]:
        missing = [chunk for chunk in self._chunks if not (cache.folder / _entry(name, chunk)).exists()]
        with _children(missing, lambda chunks: self._take(name, cache, chunks)):
            own = int(os.environ.get("LOCAL_RANK", "0")) * len(missing) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            kept = self._take(name, cache, missing[own:] + missing[:own])
        wrong = [chunk for chunk, part in kept.items() if part is None]
        parts: list[Numbers | None] = []
        with cache.lock_file(name) as descriptor:
            for chunk in self._counted():
                part = kept.pop(chunk) if chunk in kept else _stored(cache, name, chunk)
                if part is None and chunk not in wrong:
                    with take_lock(descriptor, chunk, wait=True):  # another process may be at it
                        part = _stored(cache, name, chunk)
                        part = self._compute_and_store(cache, name, chunk) if part is None else part
                parts.append(part)
        return parts

    def _take(self, name: str, cache: DataCache, chunks: Sequence[int]) -> dict[int, Numbers | None]:
        """Compute the chunks that no other process has taken. Returns them."""
        taken: dict[int, Numbers | None] = {}
        with cache.lock_file(name) as descriptor:
            for chunk in chunks:
                with take_lock(descriptor, chunk, wait=False) as is_taken:
                    if is_taken and not (cache.folder / _entry(name, chunk)).exists():
                        taken[chunk] = self._compute_and_store(cache, name, chunk)
        return taken

    def _compute_and_store(self, cache: DataCache, name: str, chunk: int) -> Numbers | None:
        part = self._compute(chunk)
        if part is not None:
            shape = json.dumps(part.shape).encode().ljust(SHAPE_BYTES)
            cache.write(_entry(name, chunk), shape + part.tobytes())
        return part

    def _compute(self, chunk: int) -> Numbers | None:
        """The numbers of a chunk; None after a wrong row, from which on rows are only checked."""
        start, stop = chunk * ROWS_PER_CHUNK, min((chunk + 1) * ROWS_PER_CHUNK, len(self.rows))
        with collection_paused():  # collections took 40 % of the time of a check (measured)
            parsed = self._parsed(start, stop)
        if chunk == 0 and not parsed and stop < len(self.rows):  # a wrong task, most likely
            raise self.rows.wrong_rows(self._problems, stop)
        return None if self._problems else self.measure(parsed)

    def _parsed(self, start: int, stop: int) -> list[tuple[int, T]]:
        """(row number, parsed row) of the right rows of [start, stop). The wrong ones are added to the problems."""
        parsed: list[tuple[int, T]] = []
        for number, row in enumerate(self.rows.rows(start, stop), start):
            try:
                if isinstance(row, ValueError):
                    raise row
                parsed.append((number, self.parse(row)))
            except ValueError as error:
                self._problems.append((number, str(error)))
        return parsed

    def _counted(self) -> Iterable[int]:
        """The chunks, with a progress bar on a terminal where there are many.

        A bar that is only disabled would leave a semaphore, of which Python complains when a rank ends at once.
        """
        if len(self._chunks) < SHOWN_FROM or not sys.stderr.isatty():
            return self._chunks
        return tqdm(self._chunks, "rows", unit=f" x {ROWS_PER_CHUNK} rows", leave=False)


SHAPE_BYTES = 32
SHOWN_FROM = 8  # chunks


def _entry(name: str, chunk: int) -> str:
    return f"{name}/{chunk:06d}"


def _stored(cache: DataCache, name: str, chunk: int) -> Numbers | None:
    content = cache.read(_entry(name, chunk))
    if content is None:
        return None
    return np.frombuffer(content[SHAPE_BYTES:], np.int32).reshape(json.loads(content[:SHAPE_BYTES]))


@contextlib.contextmanager
def _children(chunks: Sequence[int], take: Callable[[Sequence[int]], object]) -> Iterator[None]:
    """Child processes that `take` chunks too, one per processor core that is left; they end with the block at the latest.

    They are forked: they run Python code only, before this process has used a device or threads of its own.
    """
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    count = min(cores - 1, len(chunks) // CHUNKS_PER_CHILD)
    children: list[int] = []
    try:
        for number in range(1, count + 1):
            child = os.fork()
            if child == 0:
                _end_with(take, chunks[number * len(chunks) // (count + 1) :])
            children.append(child)
        yield
        for child in children:  # they finish the chunks that they have taken
            os.waitpid(child, 0)
        children.clear()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _end_with(take: Callable[[Sequence[int]], object], chunks: Sequence[int]) -> NoReturn:
    """In a child: take chunks while the parent lives. Failures are the parent's to report: it finds the chunk missing."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not survive the fork
    parent, code = os.getppid(), 1
    try:
        for chunk in chunks:
            if os.getppid() == parent:
                take([chunk])
        code = 0
    finally:
        os._exit(code)
