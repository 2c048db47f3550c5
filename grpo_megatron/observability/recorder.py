"""Recorder: the events of one rank during the profiled steps, with the clocks of the rank's own machine.

Every event has wall nanoseconds and the CPU nanoseconds that the process used between its two ends. All its threads count.
Wall time without CPU time is therefore idle time: the process slept, or it had no core. A thread that waits for a GPU spins.
A rank keeps a bounded number of events; what did not fit is counted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

STEP, PHASE, ENGINE, COLLECTIVE = "step", "phase", "engine", "collective"  # kinds of events
MAX_EVENTS, MAX_EVENTS_PER_RANK = 2_000_000, 100_000  # some 60 bytes each on the way to rank 0
FOR_PHASES = 0.1  # share of the events that only steps and phases may take: they come last

OperationKey = tuple[str, str, int]  # one operation of several ranks: group, number within it, how many ranks take part


class Event(NamedTuple):
    """`[begin, end)` in nanoseconds. `number`: of the step; unfinished requests (engine); when it was started (collective)."""

    kind: str
    name: str
    begin: int
    end: int
    cpu: int
    number: int = 0
    key: OperationKey | None = None


def max_events(world_size: int) -> int:
    """Of one rank."""
    return min(MAX_EVENTS_PER_RANK, MAX_EVENTS // world_size)


class Recorder:
    """`clock` and `cpu_clock` return nanoseconds; the first must be the same clock in all processes of a machine."""

    def __init__(
        self,
        limit: int,
        clock: Callable[[], int] = time.perf_counter_ns,
        cpu_clock: Callable[[], int] = time.process_time_ns,
    ) -> None:
        self.limit, self.clock, self.cpu_clock = limit, clock, cpu_clock
        self.events: list[Event] = []
        self.num_dropped = 0

    @contextlib.contextmanager
    def span(self, kind: str, name: str, number: int = 0, key: OperationKey | None = None) -> Iterator[None]:
        """Record the block. One that raises is not recorded."""
        begin, cpu = self.clock(), self.cpu_clock()
        yield
        event = Event(kind, name, begin, self.clock(), self.cpu_clock() - cpu, number, key)
        limit = self.limit if kind in (STEP, PHASE) else self.limit - int(FOR_PHASES * self.limit)
        if len(self.events) < limit:
            self.events.append(event)
        else:
            self.num_dropped += 1
