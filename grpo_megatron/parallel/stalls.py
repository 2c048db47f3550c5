"""Which rank has stalled, judged from the heartbeats of all ranks. Pure functions of what was read, and of the time.

A rank has stalled when all of this has lasted for `trainer.stall_timeout_s` (35 s by default):

    no rank has begun or ended a phase      the run as a whole makes no progress
    the rank is silent or idle
        silent   its thread has written no heartbeat: it was stopped (SIGSTOP), its machine is lost, or code in C keeps
                 Python's lock. This counts in every phase.
        idle     its main thread sleeps and waits for no other rank or process (activity.py). This counts inside a training
                 step only: outside it a rank may wait for a file system, which looks the same.

Waiting alone is no stall, for any time. So none of these is one: a long generation, on one rank or all (the engine uses a
core); a long save (the thread still beats); ranks that wait for a slow one (they wait in a collective); a slow reward or tool
(its caller waits for a process or a connection); a breakpoint. A machine that is too busy, or that was suspended, delays the
ranks that watch as well: no single pause of a watcher counts for more than two of its periods, and each rank's silence is
measured on the watcher's own clock, so clocks need not agree.

What this misses, trainer.timeout_s ends: a rank that computes for ever, a deadlock in which all ranks wait in collectives, and
a rank that is idle outside a step. The error then names the ranks that are behind the others (`behind`).

A false alarm is possible in one case: a machine loses the file system of the output folder for the whole time, while all
ranks are in one long phase. Set a longer time where that happens; null turns the watch off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from grpo_megatron.parallel.mesh import RankError

STEP = "step"  # the phase that contains a training step
SLOW_DISK_PHASES = ("renew_reference", "dump")  # inside a step


class StalledRank(RankError):
    """At least one rank does not go on, and the run cannot. The message names rank, node, phase and step."""


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a rank. `phase` is a path of nested phases: "step/update_actor"."""

    rank: int
    node: str
    pid: int
    started: int  # see activity.start_ticks
    count: int  # beats so far
    step: int | None  # None: before the first step
    phase: str
    changes: int  # how many phases the rank has begun and ended; equal on all ranks at the same place of the program
    phase_s: float  # seconds since the last change
    idle_s: float  # seconds for which the main thread has been idle
    where: str  # the main thread's innermost Python function
    ended: bool = False
    step_s: float = 0.0  # seconds since the outermost phase began

    def text(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @property
    def name(self) -> str:
        return f"rank {self.rank} (node {self.node}, process {self.pid})"

    @property
    def place(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        return f"phase {self.phase.rpartition('/')[2] or 'start'}{step}"


def read_beat(text: str) -> Beat | None:
    """The beat in a file's text; None where the file is being rewritten."""
    try:
        return Beat(**json.loads(text))
    except (ValueError, TypeError):
        return None


class Watch:
    """What one rank has seen of all ranks. Call `update` about every `period_s` seconds."""

    def __init__(self, timeout_s: float, period_s: float, now: float) -> None:
        self.timeout_s, self.period_s, self._last = timeout_s, period_s, now
        self.beats: dict[int, Beat] = {}
        self.silent_s: dict[int, float] = {}
        self.no_change_s = 0.0

    def update(self, beats: Mapping[int, Beat], now: float) -> list[Beat]:
        """The last beats of the ranks that have stalled. `beats`: what could be read; `now`: seconds of this rank's clock."""
        passed = min(now - self._last, 2 * self.period_s)
        self._last = now
        self.no_change_s += passed
        for rank, beat in beats.items():
            known = self.beats.get(rank)
            if known is None or beat.changes != known.changes:
                self.no_change_s = 0.0
            self.silent_s[rank] = 0.0 if known is None or beat.count != known.count else self.silent_s[rank] + passed
            self.beats[rank] = beat
        if self.no_change_s < self.timeout_s:
            return []
        return [
            beat for beat in self.beats.values() if not beat.ended and (self.is_silent(beat) or self._is_idle(beat))
        ]

    def is_silent(self, beat: Beat) -> bool:
        return self.silent_s[beat.rank] >= self.timeout_s

    def _is_idle(self, beat: Beat) -> bool:
        phases = beat.phase.split("/")
        in_step = phases[0] == STEP and not set(phases) & set(SLOW_DISK_PHASES)
        return in_step and len(self.beats) > 1 and beat.idle_s >= self.timeout_s


def reason(beat: Beat, silent_s: float | None) -> str:
    """One line: who, where, and what makes it a stall. `silent_s` None: the rank is idle."""
    if silent_s is not None:
        return f"{beat.name} has stalled in {beat.place}: no sign of life for {silent_s:.0f} s"
    return (
        f"{beat.name} has stalled in {beat.place}: for {beat.idle_s:.0f} s it has used no processor, and it waits for no"
        f" other rank; it is in {beat.where}"
    )


def behind(beats: Sequence[Beat]) -> list[Beat]:
    """The ranks that have come less far than others; none where all are at the same place."""
    beats = [beat for beat in beats if not beat.ended]
    farthest = max((beat.changes for beat in beats), default=0)
    least = min((beat.changes for beat in beats), default=0)
    return [beat for beat in beats if beat.changes == least] if least < farthest else []


def table(beats: Sequence[Beat]) -> str:
    """A line per rank, for report.txt."""
    rows = [("rank", "node", "process", "step", "phase", "for", "main thread")]
    for beat in sorted(beats, key=lambda beat: beat.rank):
        step = "-" if beat.step is None else str(beat.step)
        phase, since = "ended" if beat.ended else beat.phase or "start", f"{beat.phase_s:.0f} s"
        rows.append((str(beat.rank), beat.node, str(beat.pid), step, phase, since, beat.where))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )
