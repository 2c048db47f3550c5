"""Heartbeat: every rank notes what it is doing, some ranks watch all, and a stall ends the run with the stacks of all ranks.

A thread of every rank writes its beat every few seconds, one small file per rank. The folder is in the output folder, which
all nodes share. A few ranks, spread over the nodes, read all files (`stalls.py` says what a stall is): MAX_WATCHERS, or at
more than 512 ranks fewer, so that they read at most MAX_READS files per look (but two of them watch in any case).

    output_dir/heartbeats/rank_00003.json     the last beat of rank 3
    output_dir/heartbeats/rank_00003.stacks   where SIGNAL makes rank 3 write its stacks, also while it runs C code
    output_dir/heartbeats/stalled.json        written by the first rank that sees a stall; the threads of all ranks look for it
    output_dir/stalls/001/report.txt          who has stalled, and what every rank was doing
    output_dir/stalls/001/rank_00003.txt      the stacks of rank 3's threads, or why there are none

Then every rank ends. The rank that has seen the stall ends first, so that its message is the reason (`when_stalled`).
The beats are files, and nothing is sent through torch.distributed: it works in the same way with gloo and NCCL.
Not run on a GPU yet.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.parallel.mesh import Mesh, on_first_rank
from grpo_megatron.parallel.stalls import (
    Beat,
    MainThread,
    StalledRank,
    Watch,
    behind,
    describe_process,
    read_beat,
    reason,
    same_process,
    start_ticks,
    table,
)
from grpo_megatron.storage.run_files import add_event

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
    """Call `report(error)` in the heartbeat's thread when the run has stalled; it returns the exit code of this rank."""
    _report.append(report)


def is_watcher(rank: int, world_size: int) -> bool:
    """Whether this rank reads the beats of all ranks."""
    watchers = max(2, min(MAX_WATCHERS, MAX_READS // world_size))
    return rank % -(-world_size // watchers) == 0


class Heartbeat:
    """The heartbeat of one rank. A context manager; entering it is collective. `timeout_s` None: nothing is watched."""

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
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._stacks: Any = None

    # -- what the main thread tells ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The main thread is in this phase until the block ends. All ranks enter the same phases in the same order.

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
        """A collective that times out inside raises StalledRank, which names the ranks that are behind the others."""
        try:
            yield
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            beats = list(self._read().values())
            late = behind(beats)
            who = "; ".join(f"{beat.name} is still in {beat.place}, {beat.where}" for beat in late)
            text = f"a collective has timed out (trainer.timeout_s): {who or 'all ranks are in the same phase'}"
            raise StalledRank(f"{text}\n" + "".join(f"  {line}\n" for line in table(beats).splitlines())) from error

    def __enter__(self) -> Heartbeat:
        on_first_rank(self.mesh, f"cannot write {self.folder}", self._clear)
        with contextlib.suppress(OSError):  # without it a hung rank's stacks are missing, nothing else
            self._stacks = self._file(self.mesh.rank, "stacks").open("w")
            faulthandler.register(SIGNAL, file=self._stacks, all_threads=True)
        self._idle_since = time.monotonic()
        self._thread.start()
        return self

    def _clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._wake.set()
        self._thread.join()
        faulthandler.unregister(SIGNAL)
        if self._stacks is not None:
            self._stacks.close()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        main, watch, last_look = MainThread(), None, time.monotonic()
        if self.timeout_s is not None and is_watcher(self.mesh.rank, self.mesh.world_size):
            watch = Watch(self.timeout_s, self.period_s, last_look)
        while True:
            is_over = self._stopped.is_set()
            beat = self._beat(main, is_over)
            with contextlib.suppress(OSError):  # a full disk: the metrics or the save report it
                self._file(beat.rank, "json").write_text(beat.text())
            if is_over:
                return
            if time.monotonic() - last_look >= self.period_s:
                last_look = time.monotonic()
                if watch is not None and (stalled := watch.update(self._read(), last_look)):
                    self._announce(stalled, watch)
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
            rank=self.mesh.rank,
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
        )

    def _file(self, rank: int, ending: str) -> Path:
        return self.folder / f"rank_{rank:05d}.{ending}"

    def _read(self) -> dict[int, Beat]:
        beats = {}
        for rank in range(self.mesh.world_size):
            with contextlib.suppress(OSError):
                if (beat := read_beat(self._file(rank, "json").read_text())) is not None:
                    beats[rank] = beat
        return beats

    # -- the end of a stalled run --------------------------------------------------------------------------------------

    def _announce(self, stalled: list[Beat], watch: Watch) -> None:
        """Tell all ranks, unless another rank has. This rank is then the one that reports."""
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
            json.dump({"by": self.mesh.rank, "folder": folder.name, "silent": sorted(silent), "lines": lines}, file)
        add_event(self.output_dir, "stalled", self.step, "\n".join(lines))

    def _described(self, beat: Beat, silent_s: float | None) -> str:
        is_local = beat.node == self._node and silent_s is not None
        return reason(beat, silent_s) + (f"; {describe_process(beat.pid)}" if is_local else "")

    def _announced(self) -> dict[str, Any] | None:
        try:
            content = json.loads((self.folder / "stalled.json").read_text())
        except (OSError, ValueError):  # there is none, or it is being written
            return None
        return content if isinstance(content, dict) else None

    def _end_stalled(self, announced: dict[str, Any]) -> None:
        """Write this rank's stacks, and those of silent ranks of this machine; then end this rank."""
        beats, folder = self._read(), self.output_dir / REPORTS / announced["folder"]
        silent = [beats[rank] for rank in announced["silent"] if rank in beats]
        with contextlib.suppress(OSError), (folder / self._file(self.mesh.rank, "txt").name).open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        local = [b.rank for b in beats.values() if b.node == self._node and b.rank not in announced["silent"]]
        if self.mesh.rank == min(local, default=-1):
            self._write_stacks([beat for beat in silent if beat.node == self._node], folder)
        # The rank that has announced it ends first, after the other ranks have seen it and written their stacks.
        is_first = self.mesh.rank == announced["by"]
        time.sleep((self.period_s + STACKS_S) * (1 if is_first else 3))
        code = _report[-1](StalledRank("\n".join(announced["lines"])))
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
        """Have the processes of silent ranks write their stacks; where one cannot, write why."""
        for beat in silent:
            if same_process(beat.pid, beat.started):
                with contextlib.suppress(OSError):
                    os.kill(beat.pid, SIGNAL)
        time.sleep(STACKS_S)
        for beat in silent:
            with contextlib.suppress(OSError):
                stacks = self._file(beat.rank, "stacks").read_text() or f"no stacks: {describe_process(beat.pid)}\n"
                (folder / self._file(beat.rank, "txt").name).write_text(stacks)
