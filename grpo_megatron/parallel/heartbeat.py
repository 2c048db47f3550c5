"""Heartbeat: every rank notes its phase, some ranks watch all, and a stall ends the run with the stacks of all ranks.

output_dir/heartbeats/rank_00003.json, .stacks   rank 3's last beat; the stacks that SIGNAL makes it write, also in C code
output_dir/heartbeats/stalled.json               written by the first rank that sees a stall
output_dir/stalls/001/report.txt                 who has stalled, and what every rank was doing
output_dir/stalls/001/rank_00003.txt             the stacks of rank 3's threads, or why there are none
The beats are files, which works alike with gloo and NCCL. The launcher of a machine finds what its ranks cannot: see
LauncherWatch. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from grpo_megatron.parallel.mesh import Mesh, RankError, on_first_rank
from grpo_megatron.processes.process import child_pids, start_ticks
from grpo_megatron.storage.run_files import add_event

# -- which rank has stalled: pure functions of what was read, and of the time -----------------------------------------

STEP = "step"  # the phase that contains a training step
_BETWEEN = "between phases"
SLOW_DISK_PHASES = ("renew_reference", "dump")  # inside a step
SAVING_PHASES = ("save_checkpoint", *SLOW_DISK_PHASES)
SAVE_FACTOR = 10


class StalledRank(RankError):
    """At least one rank that does not go on, so that the run cannot. Names rank, node, phase and step."""

    is_loss = True  # not a fault of the program

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a rank. `phase` is a path of nested phases: "step/update_actor"."""

    rank: int
    node: str
    pid: int
    started: int  # see start_ticks
    count: int  # beats so far
    step: int | None  # None: before the first step
    phase: str
    changes: int  # how many phases the rank has begun and ended; equal on all ranks at the same place of the program
    phase_s: float  # seconds since the last change
    idle_s: float  # seconds for which the main thread has been idle
    where: str  # the main thread's innermost Python function
    ended: bool = False
    step_s: float = 0.0  # seconds since the outermost phase began
    is_saving: bool = False  # a checkpoint is being written, perhaps beside the step
    role: str = ""  # where ranks have roles: "training" or "rollout"

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.role}{', ' * bool(self.role)}node {self.node}, process {self.pid})"

    @property
    def place(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        name = self.phase_path.rpartition("/")[2]
        return f"{'' if name == _BETWEEN else 'phase '}{name}{step}"

    @property
    def phase_path(self) -> str:
        """Returns the phase, or where a rank is that is in none."""
        return self.phase or ("start" if self.step is None else _BETWEEN)


class Watch:
    """One rank's view of all ranks. Call `update` about every `period_s` seconds.

    A rank has stalled when no rank has begun or ended a phase for `timeout_s` (trainer.stall_timeout_s), and it is
    silent or idle for as long. Silent: it has written no beat (SIGSTOP, a lost machine, C code that keeps Python's
    lock). Idle, inside a step only: its main thread sleeps and waits for no other rank or process; outside a step it
    may wait for a file system, which looks the same.

    Waiting alone is no stall: a long generation uses a core, a long save beats, a slow reward is waited for by a
    process. A busy or suspended machine delays the watcher as well, so a pause of it counts for two periods at most,
    and silence is measured on its own clock. A rank that computes for ever, and a deadlock in collectives, are left to
    trainer.timeout_s, whose error names the ranks that are `behind`.

    Beats share the file system with checkpoints: while one is saved, a rank may be silent SAVE_FACTOR times as long,
    unless its process is stopped, which a watcher sees on its own machine. It is the file system that has stalled when
    the watcher's own beat does not come back, or reading takes more than two periods, or all ranks of at least two
    other nodes are silent at once: this is printed, and the run goes on. Where one machine alone loses the file system
    a false alarm is possible; a longer time avoids it.
    """

    def __init__(self, timeout_s: float, period_s: float, now: float) -> None:
        self.timeout_s, self.period_s, self._last = timeout_s, period_s, now
        self.beats: dict[int, Beat] = {}
        self.silent_s: dict[int, float] = {}
        self.no_change_s = self.files_stall_s = 0.0
        self._is_saving, self._stopped = False, frozenset[int]()

    def update(
        self,
        beats: Mapping[int, Beat],
        now: float,
        local: Beat | None = None,
        files_s: float = 0.0,
        stopped: frozenset[int] = frozenset(),
    ) -> list[Beat]:
        """Returns the last beats of the stalled ranks; `now`: seconds of this rank's clock.

        `beats`: what could be read. `local`: the beat that this rank has written; `files_s`: the seconds of writing it
        and of reading all beats. `stopped`: ranks of this machine whose process is stopped. `files_stall_s` then says
        for how long the file system has stalled.
        """
        passed = min(now - self._last, 2 * self.period_s)
        self._last, self._stopped = now, stopped
        read_back = beats.get(local.rank) if local is not None else None
        if local is not None and (read_back is None or read_back.count != local.count or files_s > 2 * self.period_s):
            self.files_stall_s += max(passed, files_s)
            return []
        self.no_change_s += passed
        self._is_saving = any(beat.is_saving for beat in beats.values())
        for rank, beat in beats.items():
            last = self.beats.get(rank)
            if last is None or beat.changes != last.changes:
                self.no_change_s = 0.0
            self.silent_s[rank] = 0.0 if last is None or beat.count != last.count else self.silent_s[rank] + passed
            self.beats[rank] = beat
        elsewhere = [b for b in self.beats.values() if local is not None and b.node != local.node and not b.ended]
        is_cut_off = len({b.node for b in elsewhere}) > 1 and all(
            self.silent_s[b.rank] >= self.timeout_s for b in elsewhere
        )
        self.files_stall_s = min(self.silent_s[b.rank] for b in elsewhere) if is_cut_off else 0.0
        if self.no_change_s < self.timeout_s or is_cut_off:
            return []
        return [b for b in self.beats.values() if not b.ended and (self.is_silent(b) or self._is_idle(b))]

    def is_silent(self, beat: Beat) -> bool:
        may_save = self._is_saving and beat.rank not in self._stopped
        return self.silent_s[beat.rank] >= self.timeout_s * (SAVE_FACTOR if may_save else 1)

    def _is_idle(self, beat: Beat) -> bool:
        phases = beat.phase.split("/")
        in_step = phases[0] == STEP and not set(phases) & set(SLOW_DISK_PHASES)
        return in_step and len(self.beats) > 1 and beat.idle_s >= self.timeout_s


def reason(beat: Beat, silent_s: float | None) -> str:
    """Writes one line: who, where, and why it is a stall. `silent_s` None: the rank is idle."""
    if silent_s is not None:
        return f"{beat.name} has stalled in {beat.place}: no sign of life for {silent_s:.0f} s"
    return (
        f"{beat.name} has stalled in {beat.place}: for {beat.idle_s:.0f} s it has used no processor, and it waits for no"
        f" other rank; it is in {beat.where}"
    )


def behind(beats: Sequence[Beat]) -> list[Beat]:
    """Returns the ranks that have come less far than others of their role; none where all are at the same place."""
    late = []
    for role in sorted({beat.role for beat in beats}):
        running = [beat for beat in beats if not beat.ended and beat.role == role]
        least = min((beat.changes for beat in running), default=0)
        last = [beat for beat in running if beat.changes == least]
        late += last if len(last) < len(running) else []
    return late


def table(beats: Sequence[Beat]) -> str:
    """Writes a line per rank, for report.txt."""
    rows = [("rank", "node", "process", "step", "phase", "for", "main thread")]
    for beat in sorted(beats, key=lambda beat: beat.rank):
        step = "-" if beat.step is None else str(beat.step)
        phase, since = "ended" if beat.ended else beat.phase_path, f"{beat.phase_s:.0f} s"
        rows.append((str(beat.rank), beat.node, str(beat.pid), step, phase, since, beat.where))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


# -- the main thread of this process, and the state of another process of this machine (Linux) ------------------------

WAITS = (  # modules that wait for another rank, a process, a connection or a debugger's prompt
    *("torch.distributed", "megatron.core.distributed", "megatron.core.pipeline_parallel.p2p_communication"),
    *("grpo_megatron.parallel.control", "grpo_megatron.parallel.bridge", "vllm.distributed"),
    *(
        "transformer_engine.pytorch.distributed",
        "multiprocessing",
        "subprocess",
        "concurrent",
        "queue",
        "asyncio",
        "zmq",
    ),
    *("selectors", "socket", "ssl", "http", "urllib", "urllib3", "pdb", "bdb", "cmd"),
)
INNERMOST = 4  # frames; a deeper one has called the code that does not return
BUSY = 0.02  # share of a core


class MainThread:
    """The main thread of this process, seen from another thread.

    It is idle when the process used less than BUSY of a core since the last look (without the looking thread), the
    kernel says that the main thread sleeps (S, not D or R), and none of its innermost frames is in a module of WAITS.
    CUDA waits by spinning, unless it was told otherwise, so a thread that waits for a GPU is not idle.
    """

    def __init__(self) -> None:
        thread = threading.main_thread()
        self._ident, self._stat = thread.ident, Path(f"/proc/self/task/{thread.native_id}/stat")
        self._last, self._cpu = time.monotonic(), self._cpu_seconds()

    def look(self) -> tuple[str, bool]:
        """Returns the main thread's place, "function (file.py:12)", and whether it was idle, also since the last look."""
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
    """Returns the state in a stat file of /proc, as one letter; "" if there is none."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_stopped(pid: int) -> bool:
    """Tells whether a process of this machine is stopped, by SIGSTOP or a debugger."""
    return _state(Path(f"/proc/{pid}/stat")) in ("T", "t")


def describe_process(pid: int) -> str:
    """Describes a process of this machine by its state in the kernel, for a report."""
    state = _state(Path(f"/proc/{pid}/stat"))
    if is_stopped(pid):
        return f"the process is stopped, by SIGSTOP or a debugger, and cannot write its stack (`kill -CONT {pid}` continues it)"
    if state == "D":
        return "the process waits in the kernel, for a disk, a network file system or a driver (state D)"
    if state in ("", "Z", "X"):
        return "the process has ended"
    return "the process runs, but none of its Python threads does: code in C keeps Python's lock"


def same_process(pid: int, ticks: int) -> bool:
    """Tells whether process `pid` of this machine is the one that was started at `ticks`."""
    return ticks != 0 and start_ticks(pid) == ticks and pid != os.getpid()


# -- the heartbeat of a rank -------------------------------------------------------------------------------------------

FOLDER, REPORTS = "heartbeats", "stalls"
MAX_WATCHERS, MAX_READS = 8, 4096
MIN_PERIOD_S, MAX_PERIOD_S = 1.0, 5.0  # of the beats: a new phase is written after the shorter one
STACKS_S = 2.0  # time to write stacks, for a process that can
SIGNAL = signal.SIGRTMIN + 5  # SIGUSR2 writes the stacks to standard error (training/stopping.py)


def _print(error: StalledRank) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 1


_report: list[Callable[[StalledRank], int]] = [_print]


def when_stalled(report: Callable[[StalledRank], int]) -> None:
    """Sets `report(error)`, which the heartbeat's thread calls after a stall; it returns this rank's exit code."""
    _report.append(report)


class Heartbeat:
    """The heartbeat of one rank. A context manager; entering it is collective. `timeout_s` None: nothing is watched.

    A few ranks read all files: MAX_WATCHERS, or fewer above 512 ranks, so that they read at most MAX_READS files per
    look (but two watch in any case). After a stall every rank ends; the rank that has seen it ends first, so that its
    message is the reason.
    """

    def __init__(self, output_dir: Path, mesh: Mesh, timeout_s: float | None) -> None:
        self.output_dir, self.mesh, self.timeout_s = output_dir, mesh, timeout_s
        self.folder = output_dir / FOLDER
        self.period_s = min(MAX_PERIOD_S, (timeout_s or 60.0) / 6)
        self.step: int | None = None
        self._phases: list[str] = []
        self.listener: Callable[[int | None, list[str]], None] = lambda step, phases: None  # called at each change
        self._changes, self._changed_at = 0, time.monotonic()
        self._step_began = self._changed_at
        self._count, self._idle_since = 0, time.monotonic()
        self._node, self._started = socket.gethostname(), start_ticks()
        self.is_flushing: Callable[[], bool] = lambda: False  # whether a checkpoint is written in the background
        self._files_since: float | None = None  # when the thread began to use the file system; None: it does not
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._stacks: Any = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Marks the main thread's phase until the block ends. All ranks enter the same phases in the same order.

        A block that raises leaves the phase as it is: the error may be reported with it.
        """
        outer = self._phases
        self._change([*outer, name])
        yield
        self._change(outer)

    def _change(self, phases: list[str]) -> None:
        if not self._phases:
            self._step_began = time.monotonic()
        self._phases, self._changes, self._changed_at = phases, self._changes + 1, time.monotonic()
        self._wake.set()
        self.listener(self.step, phases)

    @contextlib.contextmanager
    def naming_timeouts(self) -> Iterator[None]:
        """Turns a collective that times out inside into StalledRank, which names the ranks that are behind the others."""
        try:
            yield
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            if (since := self._files_since) is not None and time.monotonic() - since > (self.timeout_s or 60.0):
                raise StalledRank(
                    f"a collective has timed out (trainer.timeout_s): {self._stalled_files(time.monotonic() - since)}"
                ) from error
            beats = list(self._read().values())
            late = behind(beats)
            who = "; ".join(f"{beat.name} is still in {beat.place}, {beat.where}" for beat in late)
            text = f"a collective has timed out (trainer.timeout_s): {who or 'all ranks are in the same phase'}"
            text += "\n" + "".join(f"  {line}\n" for line in table(beats).splitlines())
            raise StalledRank(text, [beat.rank for beat in late]) from error

    def __enter__(self) -> Heartbeat:
        if not (bridge := self.mesh.bridge) or not bridge.samples_only:
            on_first_rank(self.mesh, f"cannot write {self.folder}", self._clear)
        if bridge is not None:
            bridge.meet()
        with contextlib.suppress(OSError):  # without it a hung rank's stacks are missing, nothing else
            self._stacks = self._file(self.mesh.run_rank, "stacks").open("w")
            faulthandler.register(SIGNAL, file=self._stacks, all_threads=True)
        self._idle_since = time.monotonic()
        self._thread.start()
        return self

    def _clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)  # the launcher may write its beat meanwhile

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._wake.set()
        self._thread.join()
        faulthandler.unregister(SIGNAL)
        if self._stacks is not None:
            self._stacks.close()

    def _run(self) -> None:
        main, watch, last_look, is_named = MainThread(), None, time.monotonic(), False
        watchers = max(2, min(MAX_WATCHERS, MAX_READS // self.mesh.run_size))
        if self.timeout_s is not None and self.mesh.run_rank % -(-self.mesh.run_size // watchers) == 0:
            watch = Watch(self.timeout_s, self.period_s, last_look)
        while True:
            is_over = self._stopped.is_set()
            beat = self._beat(main, is_over)
            self._files_since = before = time.monotonic()
            with contextlib.suppress(OSError):  # a full disk: the metrics or the save report it
                self._file(beat.rank, "json").write_text(json.dumps(asdict(beat)) + "\n")
            self._files_since = None
            if is_over:
                return
            if time.monotonic() - last_look >= self.period_s:
                if watch is not None:
                    self._files_since = before
                    beats = self._read()
                    self._files_since = None
                    last_look = time.monotonic()
                    local = [b for b in beats.values() if b.node == self._node and same_process(b.pid, b.started)]
                    stopped = frozenset(b.rank for b in local if is_stopped(b.pid))
                    if stalled := watch.update(beats, last_look, beat, last_look - before, stopped):
                        self._announce(stalled, watch)
                    is_named = self._name_stalled_files(watch, is_named)
                last_look = time.monotonic()
                if self.timeout_s is not None and (announced := self._announced()) is not None:
                    self._end_stalled(announced)
                    return
            self._wake.wait(self.period_s)
            self._wake.clear()
            self._stopped.wait(min(MIN_PERIOD_S, self.period_s / 3))  # a step of a tiny model has dozens of phases

    def _beat(self, main: MainThread, is_over: bool) -> Beat:
        where, is_idle = main.look()
        now = time.monotonic()
        self._count += 1
        if not is_idle or self._changed_at > self._idle_since:
            self._idle_since = now
        return Beat(
            rank=self.mesh.run_rank,
            node=self._node,
            pid=os.getpid(),
            started=self._started,
            count=self._count,
            step=self.step,
            phase="/".join(self._phases),
            changes=self._changes,
            phase_s=now - self._changed_at,
            step_s=now - self._step_began if self._phases else 0.0,
            idle_s=now - self._idle_since,
            where=where,
            ended=is_over,
            is_saving=bool(set(self._phases) & set(SAVING_PHASES)) or self.is_flushing(),
            role=self.mesh.role.strip(),
        )

    def _file(self, rank: int, ending: str) -> Path:
        return self.folder / f"rank_{rank:05d}.{ending}"

    def _read(self) -> dict[int, Beat]:
        beats = {}
        for rank in range(self.mesh.run_size):
            with contextlib.suppress(OSError, ValueError, TypeError):  # there is none, or it is being rewritten
                beats[rank] = Beat(**json.loads(self._file(rank, "json").read_text()))
        return beats

    def _name_stalled_files(self, watch: Watch, is_named: bool) -> bool:
        """Prints once that the file system has stalled; returns whether this has been printed of the present stall."""
        is_stalled = watch.files_stall_s >= watch.timeout_s
        if is_stalled and not is_named:
            print(f"warning: {self._stalled_files(watch.files_stall_s)}; the run goes on", file=sys.stderr, flush=True)
        return is_stalled

    def _stalled_files(self, seconds: float) -> str:
        return (
            f"the file system of {self.output_dir} has stalled, as node {self._node} sees it, not the ranks: for"
            f" {seconds:.0f} s it has not taken and returned their heartbeats"
        )

    def _announce(self, stalled: list[Beat], watch: Watch) -> None:
        """Tells all ranks, unless another rank has. This rank is then the one that reports."""
        path = self.folder / "stalled.json"
        try:
            file = path.open("x")
        except OSError:
            return
        with file:
            root, number = self.output_dir / REPORTS, 1
            while (root / f"{number:03d}").exists():
                number += 1
            (folder := root / f"{number:03d}").mkdir(parents=True)
            silent = {beat.rank: watch.silent_s[beat.rank] for beat in stalled if watch.is_silent(beat)}
            lines = [self._described(beat, silent.get(beat.rank)) for beat in stalled]
            lines.append(f"  what every rank was doing, and the stacks of its threads: {folder}")
            (folder / "report.txt").write_text("\n".join(lines) + "\n\n" + table(list(watch.beats.values())))
            who = {"by": self.mesh.run_rank, "silent": sorted(silent), "ranks": [beat.rank for beat in stalled]}
            json.dump({**who, "folder": folder.name, "lines": lines}, file)
        add_event(self.output_dir, "stalled", self.step, "\n".join(lines))

    def _described(self, beat: Beat, silent_s: float | None) -> str:
        is_local = beat.node == self._node and silent_s is not None
        return reason(beat, silent_s) + (f"; {describe_process(beat.pid)}" if is_local else "")

    def _announced(self) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] = json.loads((self.folder / "stalled.json").read_text())
        except (OSError, ValueError):  # there is none, or it is being written
            return None
        return content

    def _end_stalled(self, announced: dict[str, Any]) -> None:
        """Writes this rank's stacks, and those of silent ranks of this machine; then ends this rank."""
        beats, folder = self._read(), self.output_dir / REPORTS / announced["folder"]
        silent = [beats[rank] for rank in announced["silent"] if rank in beats]
        with contextlib.suppress(OSError), (folder / self._file(self.mesh.run_rank, "txt").name).open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        local = [b.rank for b in beats.values() if b.node == self._node and b.rank not in announced["silent"]]
        if self.mesh.run_rank == min(local, default=-1):
            self._write_stacks([beat for beat in silent if beat.node == self._node], folder)
        # The rank that has announced it ends first, after the other ranks have seen it and written their stacks.
        is_first = self.mesh.run_rank == announced["by"]
        time.sleep((self.period_s + STACKS_S) * (1 if is_first else 3))
        code = _report[-1](StalledRank("\n".join(announced["lines"]), announced["ranks"]))
        # A stopped process does not react to SIGTERM, and torchrun's agent would wait for it. After the report: the death
        # of a rank before it would look like the reason.
        for beat in silent:
            if beat.node == self._node and same_process(beat.pid, beat.started):
                with contextlib.suppress(OSError):
                    os.kill(beat.pid, signal.SIGKILL)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _write_stacks(self, silent: list[Beat], folder: Path) -> None:
        """Has the processes of silent ranks write their stacks; where one cannot, writes why."""
        for beat in silent:
            if same_process(beat.pid, beat.started):
                with contextlib.suppress(OSError):
                    os.kill(beat.pid, SIGNAL)
        time.sleep(STACKS_S)
        for beat in silent:
            with contextlib.suppress(OSError):
                stacks = self._file(beat.rank, "stacks").read_text() or f"no stacks: {describe_process(beat.pid)}\n"
                (folder / self._file(beat.rank, "txt").name).write_text(stacks)


# -- the watch of the launcher ----------------------------------------------------------------------------------------


STOPPED_S = 5.0  # of a rank in state T (SIGSTOP), on the clock of a watch that heals


class LauncherWatch(threading.Thread):
    """Ends ranks of this machine that no rank can find: all are stopped or hang, or their heartbeats have not begun.

    A context manager around the life of the ranks, which are the next children of process `parent`. After its first beat a
    rank is watched as by the ranks (`Watch`), which get the time to end it themselves and to write stacks. Before it, a rank
    is lost that has been stopped for `timeout_s`; one that `heals` is lost at any time after STOPPED_S. All are when none has
    a beat, and for `timeout_s` none has used a processor or waits for a disk; on several nodes they may wait for a rank of
    another one, and are not ended.
    """

    def __init__(
        self, output_dir: Path, timeout_s: float, parent: int, num_nodes: int = 1, *, heals: bool = False
    ) -> None:
        super().__init__(name="launcher's watch", daemon=True)
        self.output_dir, self.timeout_s, self.parent, self.num_nodes = output_dir, timeout_s, parent, num_nodes
        self.heals, self.stopped_s = heals, min(STOPPED_S, timeout_s) if heals else timeout_s
        self.period_s = min(MAX_PERIOD_S, self.stopped_s / 2, timeout_s / 6)
        self.grace_s = 2 * (self.period_s + STACKS_S)
        self.text, self.ended = "", dict[int, int | None]()  # why; process -> rank, None: not known
        self._known, self._over = child_pids(parent), threading.Event()
        self._stopped_s: dict[int, float] = {}
        self._cpu_s = self._quiet_s = 0.0

    def __enter__(self) -> LauncherWatch:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        watch, last, announced_at = Watch(self.timeout_s + self.grace_s, self.period_s, time.monotonic()), 0.0, 0.0
        local = Beat(-1, socket.gethostname(), os.getpid(), start_ticks(), 0, None, "", 0, 0.0, 0.0, "")
        while not self.ended and not self._over.wait(self.period_s):
            now = time.monotonic()
            passed, last = min(now - last, 2 * self.period_s), now
            beats = self._exchange(local := replace(local, count=local.count + 1))
            states = {pid: _state(Path(f"/proc/{pid}/stat")) for pid in child_pids(self.parent) - self._known}
            states = {pid: state for pid, state in states.items() if state not in ("", "Z", "X")}
            beats = {rank: b for rank, b in beats.items() if b.node == local.node and b.pid in {*states, local.pid}}
            stopped = frozenset(beat.rank for beat in beats.values() if states.get(beat.pid) in ("T", "t"))
            stalled = watch.update(beats, now, local, time.monotonic() - now, stopped)
            stalled = [beat for beat in stalled if beat.pid in states and watch.is_silent(beat)]
            if stalled and (self.output_dir / FOLDER / "stalled.json").exists():
                announced_at = announced_at or now
                stalled = stalled if now - announced_at > 2 * self.grace_s else []
            early = states.keys() - {beat.pid for beat in beats.values()}
            if stalled:
                lines = [f"{reason(beat, watch.silent_s[beat.rank])}; {describe_process(beat.pid)}" for beat in stalled]
                self._end(lines, {beat.pid: beat.rank for beat in stalled})
            elif lost := self._stopped_for_long(states.keys() if self.heals else early, states, passed):
                ranks = {pid: next((b.rank for b in beats.values() if b.pid == pid), None) for pid in lost}
                since = f"{'' if lost - early else ' before its first heartbeat'}: for {self.stopped_s:g} s"
                self._end(
                    [f"process {pid} of a rank has stalled{since} {describe_process(pid)}" for pid in lost], ranks
                )
            elif self._is_quiet(early == states.keys() and self.num_nodes == 1, states, passed):
                since = f"for {self.timeout_s:g} s none has used a processor"
                self._end([f"all ranks have stalled before their first heartbeat: {since}"], dict.fromkeys(states))

    def _exchange(self, local: Beat) -> dict[int, Beat]:
        """Writes the launcher's beat, which shows that the file system works, and reads those of all."""
        beats = {}
        with contextlib.suppress(OSError):
            (self.output_dir / FOLDER / f"launcher_{local.pid}.json").write_text(json.dumps(asdict(local)) + "\n")
        for file in (self.output_dir / FOLDER).glob("*r*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):  # stalled.json, or it is being rewritten
                beat = Beat(**json.loads(file.read_text()))
                if beat.rank != local.rank or beat.pid == local.pid:  # there may be a launcher for each node
                    beats[beat.rank] = beat
        return beats

    def _stopped_for_long(self, pids: Set[int], states: Mapping[int, str], passed: float) -> Set[int]:
        stopped, last = {pid for pid in pids if states[pid] == "T"}, self._stopped_s  # "t": a debugger's
        self._stopped_s = {pid: last.get(pid, 0.0) + passed for pid in stopped}
        return {pid for pid in stopped & last.keys() if self._stopped_s[pid] >= self.stopped_s}

    def _is_quiet(self, is_watched: bool, states: Mapping[int, str], passed: float) -> bool:
        before, self._cpu_s = self._cpu_s, sum(map(_cpu_seconds, states))
        is_busy = abs(self._cpu_s - before) > BUSY * passed or set(states.values()) & {"D", "R"}
        self._quiet_s = 0.0 if is_busy or not is_watched or not states else self._quiet_s + passed
        return self._quiet_s >= self.timeout_s

    def _end(self, lines: list[str], ranks: Mapping[int, int | None]) -> None:
        """Kills ranks. torchrun's agent then ends the others, and this launcher finds `text`."""
        self.text, self.ended = "\n".join(lines), dict(ranks)
        if self.output_dir.is_dir():
            add_event(self.output_dir, "stalled", None, self.text)
        for pid in ranks:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _cpu_seconds(pid: int) -> float:
    """Returns the processor seconds of a process; 0.0 without such a process."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except (OSError, ValueError):
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
