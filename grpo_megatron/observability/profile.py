"""Where the time of profiled steps went: seconds per rank and phase, from torch.profiler's events and the borders of the phases.

A step is cut at the borders of its phases; each cut belongs to its innermost phase. Its wall time is divided into four parts:

    communication   inside collectives and messages: the events "gloo:..." of a CPU; on a GPU NCCL's kernels while no other runs
    moving          of a phase, the least communication of any rank: the rank that arrives last waits for nobody
    waiting         what a rank's communication exceeds that by
    computing       on a GPU, while kernels run that are not NCCL's; on a CPU, processor time of the process outside
                    communication. In the phases of COPYING it counts as moving
    idle            the rest: the process slept, had no core, or launched kernels too slowly

`moving` and `waiting` are estimates: ranks with different work in a phase, such as pipeline stages, communicate different
amounts. Communication that overlaps with a CPU's computation counts as communication.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_megatron.observability.console import format_table

COPYING = ("update_weights", "save_checkpoint", "dump_rollout_generations")
BETWEEN, AFTER = "between phases", "log and checks"  # inside the phase `step` but no other one; after it
COMMUNICATION = ("gloo:", "ncclDevKernel", "ncclKernel")  # beginnings of names of events: of gloo, and NCCL's kernels

_Span = tuple[int, int]  # [begin, end), nanoseconds since the epoch


class Cut(NamedTuple):
    """A part of a step within one innermost phase. `cpu`: processor nanoseconds of all threads of the process."""

    phase: str
    begin: int
    end: int
    cpu: int


class PhaseSeconds(NamedTuple):
    """Seconds per step of one rank in one phase. `busy` and `communication` do not overlap."""

    wall: float
    busy: float
    communication: float


class TimeParts(NamedTuple):
    """The parts of the time of one rank in one phase, seconds per step."""

    computing: float = 0.0
    waiting: float = 0.0
    moving: float = 0.0
    idle: float = 0.0


class PhaseClock:
    """Cuts the time of one rank at the borders of nested phases. The clocks return nanoseconds."""

    def __init__(
        self,
        clock: Callable[[], int] = time.time_ns,
        cpu_clock: Callable[[], int] = time.process_time_ns,
    ) -> None:
        self.cuts: list[Cut] = []
        self._clock, self._cpu_clock = clock, cpu_clock
        self._open: list[str] = []
        self._since = (0, 0)

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Enter the phase of this name, inside the one that is open."""
        self._cut()
        self._open.append(BETWEEN if name == "step" else name)
        try:
            yield
        finally:
            self._cut()
            self._open.pop()

    def _cut(self) -> None:
        now, cpu = self._clock(), self._cpu_clock()
        if self._open:
            self.cuts.append(Cut(self._open[-1], self._since[0], now, cpu - self._since[1]))
        self._since = now, cpu


def phase_seconds(cuts: Sequence[Cut], events: Sequence[Any], num_steps: int) -> dict[str, PhaseSeconds]:
    """Sum the seconds per step of one rank. `events`: kineto's of the same steps, on the clock of `time.time_ns`."""
    on_host, on_device, kernels = list[_Span](), list[_Span](), list[_Span]()
    for event in events:
        is_host, span = event.device_type().name == "CPU", (event.start_ns(), event.end_ns())
        if event.name().startswith(COMMUNICATION):
            (on_host if is_host else on_device).append(span)
        elif not is_host and not event.is_user_annotation():  # an annotation spans the kernels that it launches
            kernels.append(span)
    computed, together = _Union(kernels), _Union([*kernels, *on_device] if kernels else on_host)
    sums: dict[str, list[float]] = {}
    for cut in cuts:
        wall, busy = cut.end - cut.begin, computed.within(cut.begin, cut.end)
        communication = together.within(cut.begin, cut.end) - busy
        if not kernels:
            busy = min(max(0, cut.cpu), wall - communication)
        whole = sums.setdefault(cut.phase, [0.0] * 3)
        for place, nanoseconds in enumerate((wall, busy, communication)):
            whole[place] += nanoseconds / 1e9 / num_steps
    return {phase: PhaseSeconds(*seconds) for phase, seconds in sums.items()}


class _Union:
    """A union of spans, and how much of it lies within a span."""

    def __init__(self, spans: Sequence[_Span]) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in sorted(spans):
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def within(self, begin: int, end: int) -> int:
        places = range(bisect.bisect_right(self._ends, begin), bisect.bisect_left(self._begins, end))
        return sum(min(end, self._ends[place]) - max(begin, self._begins[place]) for place in places)


def divide(ranks: Sequence[Mapping[str, PhaseSeconds]]) -> list[dict[str, TimeParts]]:
    """Divide the time of each rank: phase -> its parts. `ranks[r]` is rank r's `phase_seconds`."""

    def parts(phase: str, of: PhaseSeconds) -> TimeParts:
        least = min(phases[phase].communication for phases in ranks if phase in phases)
        idle, copied = max(0.0, of.wall - of.busy - of.communication), of.busy if phase in COPYING else 0.0
        return TimeParts(of.busy - copied, of.communication - least, least + copied, idle)

    return [{phase: parts(phase, seconds) for phase, seconds in phases.items()} for phases in ranks]


def profile_tables(steps: range, ranks: Sequence[Mapping[str, TimeParts]]) -> tuple[str, str]:
    """Format the mean of all ranks per phase, and the table of every rank and phase; the longest phase comes first."""
    phases: dict[str, list[float]] = {}
    for parts in ranks:
        for phase, seconds in parts.items():
            whole = phases.setdefault(phase, [0.0] * 4)
            phases[phase] = [a + b / len(ranks) for a, b in zip(whole, seconds, strict=True)]
    order = sorted(phases, key=lambda phase: -sum(phases[phase]))
    phases["whole"] = [sum(column) for column in zip(*phases.values(), strict=True)]
    which = f"Step {steps.start}" if len(steps) == 1 else f"Steps {steps.start} to {steps.stop - 1}"
    head = f"{which}, {len(ranks)} rank{'s' if len(ranks) > 1 else ''}: seconds per step"
    titles = ("phase", "seconds", "computing", "waiting", "moving", "idle")
    means = [(phase, *_numbers(phases[phase])) for phase in (*order, "whole")]
    rows = [
        (str(rank), phase, *_numbers(parts[phase]))
        for rank, parts in enumerate(ranks)
        for phase in order
        if phase in parts
    ]
    return (
        f"{head}, mean of the ranks\n{format_table(means, titles, 1)}",
        f"{head}\n{format_table(rows, ('rank', *titles), 2)}",
    )


def _numbers(parts: Sequence[float]) -> tuple[str, ...]:
    return tuple(f"{seconds:.3f}" for seconds in (sum(parts), *parts))
