"""StepTime: where the time of the profiled steps went, computed from the events of all ranks. No clock is read here.

A step of a rank is cut at the borders of its phases. Each cut has one innermost phase, and its time is divided so that the
four parts add up to it:

    waiting     inside a collective, before the last of its ranks had started it
    moving      inside a collective after that, and in the phases of MOVING what is neither waiting nor idle
    idle        wall time - CPU time of the process, outside collectives
    computing   the rest

The waiting time of a collective is charged to the rank that started it last, and to the phases which that rank was in
meanwhile. If that rank was waiting for a third rank, the third one is not looked for. A collective that some rank did not
record, because its events did not fit, cannot be divided and counts as moving.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from grpo_megatron.observability.recorder import COLLECTIVE, ENGINE, PHASE, STEP, Event, OperationKey

MOVING = ("update_weights", "save_checkpoint", "dump_rollout_generations")  # their work is copying
BETWEEN, AFTER = "between phases", "log and checks"  # inside the phase `step` but no other one; after it
TIME_PARTS = ("computing", "waiting", "moving", "idle")
TAIL = 8  # an engine step belongs to the tail while at most 1 / TAIL of the requests are unfinished


@dataclass
class TimeParts:
    """The parts of some time."""

    computing: float = 0.0
    waiting: float = 0.0
    moving: float = 0.0
    idle: float = 0.0

    @property
    def total(self) -> float:
        return self.computing + self.waiting + self.moving + self.idle

    def add(self, other: TimeParts, factor: float = 1.0) -> None:
        for part in TIME_PARTS:
            setattr(self, part, getattr(self, part) + factor * getattr(other, part))


class Wait(NamedTuple):
    """`rank` waited for `late` during [begin, end), nanoseconds."""

    rank: int
    begin: int
    end: int
    late: int
    name: str


class Cut(NamedTuple):
    begin: int
    end: int
    phase: str
    cpu: int


@dataclass
class StepTime:
    """Of all ranks; `ranks[r]` are rank r's events on a common clock."""

    ranks: Sequence[Sequence[Event]]
    steps: list[int] = field(default_factory=list)
    shares: dict[tuple[int, int, str], TimeParts] = field(default_factory=dict)  # (rank, step, phase)
    waits: list[Wait] = field(default_factory=list)
    charged: dict[tuple[int, str], float] = field(default_factory=dict)  # (late rank, its phase) -> seconds of others
    num_undivided: int = 0  # collectives that a rank did not record
    engine_steps: int = 0
    engine_s: float = 0.0
    tail_s: float = 0.0

    def by_phase(self) -> dict[str, TimeParts]:
        """Per step and rank, on average. The largest phase is first."""
        phases: dict[str, TimeParts] = defaultdict(TimeParts)
        for (_, _, phase), seconds in self.shares.items():
            phases[phase].add(seconds, 1 / self.num_rank_steps)
        return dict(sorted(phases.items(), key=lambda item: -item[1].total))

    def of_rank(self, rank: int) -> TimeParts:
        """Per step, on average."""
        whole = TimeParts()
        for (owner, _, _), seconds in self.shares.items():
            if owner == rank:
                whole.add(seconds, 1 / len(self.steps))
        return whole

    def whole(self) -> TimeParts:
        """Per step and rank, on average: `total` is the length of a step."""
        whole = TimeParts()
        for seconds in self.by_phase().values():
            whole.add(seconds)
        return whole

    def waiting_for(self, phase: str) -> float:
        """Seconds per step that the average rank waited for a rank in `phase`."""
        return sum(s for (_, late), s in self.charged.items() if late == phase) / self.num_rank_steps

    @property
    def num_rank_steps(self) -> int:
        return max(1, len(self.ranks) * len(self.steps))


def measure(ranks: Sequence[Sequence[Event]]) -> StepTime:
    """`ranks[r]`: the events of rank r, in any order, their times on one common clock."""
    result = StepTime(ranks)
    cuts = [_cuts(events) for events in ranks]
    starts = _starts(ranks)
    result.steps = sorted({event.number for events in ranks for event in events if event.kind == STEP})
    for rank, events in enumerate(ranks):
        for step in (event for event in events if event.kind == STEP):
            _share(result, rank, step, [cut for cut in cuts[rank] if step.begin <= cut.begin < step.end], cuts, starts)
        _engine(result, events)
    return result


def _cuts(events: Sequence[Event]) -> list[Cut]:
    """A rank's steps, cut at the borders of phases. Events are intervals that are nested or apart."""
    spans = sorted((e for e in events if e.kind in (STEP, PHASE)), key=lambda e: (e.begin, -e.end, e.kind != STEP))
    cuts: list[Cut] = []

    def visit(index: int) -> int:
        """Cut spans[index] around the spans inside it; returns the index of the first one behind it."""
        span, place, cpu, index = spans[index], spans[index].begin, spans[index].cpu, index + 1
        pieces = []
        while index < len(spans) and spans[index].begin < span.end:
            child = spans[index]
            pieces.append((place, child.begin))
            index = visit(index)
            place, cpu = child.end, cpu - child.cpu
        pieces.append((place, span.end))
        name = AFTER if span.kind == STEP else BETWEEN if span.name == "step" else span.name
        length = max(1, sum(end - begin for begin, end in pieces))
        # The CPU time between the phases inside a span is known as a sum: it is divided by length.
        cuts.extend(Cut(a, b, name, max(0, cpu) * (b - a) // length) for a, b in pieces if b > a)
        return index

    index = 0
    while index < len(spans):
        index = visit(index)
    return sorted(cuts)


class Start(NamedTuple):
    """When the last rank started an operation, which rank that was, and how many ranks recorded it."""

    last: int
    late: int
    num_ranks: int


def _starts(ranks: Sequence[Sequence[Event]]) -> dict[OperationKey, Start]:
    starts: dict[OperationKey, Start] = {}
    for rank, events in enumerate(ranks):
        for event in events:
            if event.kind == COLLECTIVE and event.key is not None:
                last, late, count = starts.get(event.key, Start(event.number, rank, 0))
                starts[event.key] = Start(*max((last, late), (event.number, rank)), count + 1)
    return starts


def _share(
    result: StepTime,
    rank: int,
    step: Event,
    own: list[Cut],
    cuts: list[list[Cut]],
    starts: Mapping[OperationKey, Start],
) -> None:
    """Divide one step of one rank."""
    begins = [cut.begin for cut in own]
    waiting, inside, cpu_inside = [0] * len(own), [0] * len(own), [0] * len(own)
    for event in result.ranks[rank]:
        if event.kind != COLLECTIVE or not step.begin <= event.begin < step.end:
            continue
        place = bisect.bisect_right(begins, event.begin) - 1
        inside[place] += event.end - event.begin
        cpu_inside[place] += event.cpu
        if event.key is None or starts[event.key].num_ranks < event.key[2]:
            result.num_undivided += 1
            continue
        last, late, _ = starts[event.key]
        if last > event.begin:
            wait = Wait(rank, event.begin, min(last, event.end), late, event.name)
            waiting[place] += wait.end - wait.begin
            result.waits.append(wait)
            _charge(result, wait, cuts[late])
    for cut, waited, collective, cpu in zip(own, waiting, inside, cpu_inside, strict=True):
        rest = max(0, cut.end - cut.begin - collective)
        busy = min(rest, max(0, cut.cpu - cpu))
        is_moving = cut.phase in MOVING
        seconds = TimeParts(
            computing=0.0 if is_moving else busy / 1e9,
            waiting=waited / 1e9,
            moving=(collective - waited + (busy if is_moving else 0)) / 1e9,
            idle=(rest - busy) / 1e9,
        )
        result.shares.setdefault((rank, step.number, cut.phase), TimeParts()).add(seconds)


def _charge(result: StepTime, wait: Wait, late: list[Cut]) -> None:
    """Charge a wait to what the late rank did meanwhile."""
    place = max(0, bisect.bisect_right([cut.begin for cut in late], wait.begin) - 1)
    for cut in late[place:]:
        if cut.begin >= wait.end:
            break
        overlap = min(cut.end, wait.end) - max(cut.begin, wait.begin)
        if overlap > 0:
            key = (wait.late, cut.phase)
            result.charged[key] = result.charged.get(key, 0.0) + overlap / 1e9


def _engine(result: StepTime, events: Sequence[Event]) -> None:
    """Add one rank's engine steps. A rollout begins where the number of unfinished requests grows."""
    most = 0
    before = 0
    for event in sorted((e for e in events if e.kind == ENGINE), key=lambda e: e.begin):
        most = event.number if event.number > before else most
        before = event.number
        seconds = (event.end - event.begin) / 1e9
        result.engine_steps += 1
        result.engine_s += seconds
        if event.number * TAIL <= most:
            result.tail_s += seconds
