"""Which rank has stalled, judged from the heartbeats of all ranks. Pure functions of what was read, and of the time.

A rank has stalled when all of this has lasted for `trainer.stall_timeout_s` (35 s by default):

    no rank has begun or ended a phase      the run as a whole makes no progress
    the rank is silent or idle
        silent   its thread has written no heartbeat: it was stopped (SIGSTOP), its machine is lost, or code in C keeps
                 Python's lock. This counts in every phase.
        idle     its main thread sleeps and waits for no other rank or process (`MainThread`). This counts inside a training
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
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

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


# -- What a process is doing: the main thread of this one, and the state of another process of this machine. Linux only
# A main thread is *idle* when it works on nothing that could end its wait. All of this must hold:
#
# the whole process used less than 2 % of a core since the last look (the time of the thread that looks is left out)
# the kernel says that the main thread sleeps (S); a thread that waits for a disk (D) or for a core (R) is not idle
# it waits for no other rank, no other process, no connection and no prompt of a debugger: none of its innermost
# Python frames is in one of the modules of WAITS
#
# A thread that waits for a GPU is not idle either: CUDA waits by spinning, unless it was told otherwise.

FOR_RANKS = ("torch.distributed", "megatron.core.distributed", "megatron.core.pipeline_parallel.p2p_communication")
FOR_CONTROL = ("grpo_megatron.parallel.control",)
FOR_ENGINES = ("vllm.distributed", "transformer_engine.pytorch.distributed")
FOR_PROCESSES = ("multiprocessing", "subprocess", "concurrent", "queue", "asyncio", "zmq")
FOR_CONNECTIONS = ("selectors", "socket", "ssl", "http", "urllib", "urllib3", "pdb", "bdb", "cmd")
WAITS = FOR_RANKS + FOR_CONTROL + FOR_ENGINES + FOR_PROCESSES + FOR_CONNECTIONS
INNERMOST = 4  # frames; a deeper one has called the code that does not return
BUSY = 0.02  # share of a core


class MainThread:
    """Looks at the main thread of this process, from another thread."""

    def __init__(self) -> None:
        thread = threading.main_thread()
        self._ident, self._stat = thread.ident, Path(f"/proc/self/task/{thread.native_id}/stat")
        self._last, self._cpu = time.monotonic(), self._cpu_seconds()

    def look(self) -> tuple[str, bool]:
        """Where the main thread is, "function (file.py:12)", and whether it was idle at this look and since the last one."""
        now, cpu = time.monotonic(), self._cpu_seconds()
        is_busy = cpu - self._cpu > BUSY * (now - self._last)
        self._last, self._cpu = now, cpu
        frame = sys._current_frames().get(self._ident or 0)
        if frame is None:
            return "", False
        where = f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        return where, not is_busy and not _waits(frame) and _state(self._stat) == "S"

    @staticmethod
    def _cpu_seconds() -> float:
        return time.process_time() - time.thread_time()


def _waits(frame: FrameType | None) -> bool:
    for _ in range(INNERMOST):
        if frame is None:
            return False
        module = str(frame.f_globals.get("__name__", ""))
        if any(module == name or module.startswith(f"{name}.") for name in WAITS):
            return True
        frame = frame.f_back
    return False


def _state(stat: Path) -> str:
    """The state in a stat file of /proc, as one letter; "" if there is none."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def start_ticks(pid: int | str = "self") -> int:
    """When a process was started, in clock ticks since the machine was; 0 without such a process.

    A process id can be given to another process later. Together with this number it belongs to one process.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def describe_process(pid: int) -> str:
    """What the kernel says about a process of this machine, for a report."""
    state = _state(Path(f"/proc/{pid}/stat"))
    if state in ("T", "t"):
        return f"the process is stopped, by SIGSTOP or a debugger, and cannot write its stack (`kill -CONT {pid}` continues it)"
    if state == "D":
        return "the process waits in the kernel, for a disk, a network file system or a driver (state D)"
    if state in ("", "Z", "X"):
        return "the process has ended"
    return "the process runs, but none of its Python threads does: code in C keeps Python's lock"


def same_process(pid: int, ticks: int) -> bool:
    """Whether process `pid` of this machine is the one that was started at `ticks`."""
    return ticks != 0 and start_ticks(pid) == ticks and pid != os.getpid()
