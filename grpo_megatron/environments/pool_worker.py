"""The pool's side of one worker: its trajectories, and the replay of those of a worker that is lost."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from grpo_megatron.workers.process import STARTUP_TIMEOUT_S, PipedProcess

GRACE_S = 60.0  # beyond the time limit of an environment, after which a silent worker is lost
PROGRAM = "grpo_megatron.environments.worker"


@dataclass
class Record:
    """What a trajectory can be replayed from: `start` is its first request, with all completions so far."""

    key: str
    number: int  # its name in messages: a key may be used again after its end
    start: dict[str, Any]
    worker: WorkerLink
    is_pending: bool = False  # the caller waits for an outcome
    failure: str = ""  # its process is gone, and is not replayed

    @property
    def length(self) -> int:
        """Completions so far."""
        return len(self.start["completions"])


class WorkerLink(PipedProcess):
    """The constructor starts the process. In a worker that replaces a lost one, `recover` comes first."""

    def __init__(self, settings: dict[str, Any]) -> None:
        # The order of sets must not depend on the process. One thread: libraries' pools of threads do not survive forks.
        variables = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        super().__init__(PROGRAM, 16 * settings["max_characters"] + (1 << 17), variables)
        # A burst of requests fits the pipe. Otherwise its rest would wait for the pool's next call.
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(self.stdin, fcntl.F_SETPIPE_SZ, 1 << 20)
        self.ready = False
        self.trajectories: dict[int, Record] = {}
        self._in_work: dict[int, int] = {}  # trajectories with a request that is not answered -> completions with it
        self._recovering: deque[tuple[Record, dict[str, Any]]] = deque()  # sent one at a time
        self._is_recovering = False
        self._clock = time.monotonic()
        self.send(settings)

    def submit(self, trajectory: Record, request: dict[str, Any]) -> None:
        """Send a request, or queue it while trajectories are replayed."""
        if not self._is_recovering:
            self._send(trajectory, request)
        elif all(queued is not trajectory for queued, _ in self._recovering):  # else its start has the completion
            self._recovering.append((trajectory, request))

    def recover(self, trajectories: Iterable[Record]) -> None:
        """Replay trajectories of a lost worker one by one, so that one that kills this worker too is known."""
        self._is_recovering = True
        for trajectory in trajectories:
            trajectory.worker = self
            self.trajectories[trajectory.number] = trajectory
            if not trajectory.failure:
                self._recovering.append((trajectory, trajectory.start))
        self._next()

    def answered(self, number: int) -> Record | None:
        """The trajectory that has answered to its last request. None: to an earlier one, in a replay, or it has ended."""
        length = self._in_work.pop(number, None)
        if self._is_recovering:
            self._next()
        trajectory = self.trajectories.get(number)
        return trajectory if trajectory and trajectory.is_pending and trajectory.length == length else None

    def forget(self, trajectory: Record) -> None:
        """End it in the worker. An answer that is under way is dropped."""
        del self.trajectories[trajectory.number]
        self._in_work.pop(trajectory.number, None)
        self.send({"end": [trajectory.number]})
        if self._is_recovering:
            self._next()

    def culprit(self) -> Record | None:
        """The trajectory that was alone in execution while others waited for it."""
        return self.trajectories[next(iter(self._in_work))] if self._is_recovering and self._in_work else None

    def heard(self) -> None:
        """A message has arrived."""
        self._clock = time.monotonic()

    def deadline(self, timeout_s: float) -> float:
        """The time (time.monotonic) after which a silent worker is lost; infinity when nothing is expected of it."""
        if self.ready and not self._in_work:
            return float("inf")
        return self._clock + (timeout_s + GRACE_S if self.ready else STARTUP_TIMEOUT_S)

    def _next(self) -> None:
        while self._recovering and not self._in_work:
            trajectory, request = self._recovering.popleft()
            if trajectory.number in self.trajectories:
                self._send(trajectory, request)
        if not self._recovering and not self._in_work:
            self._is_recovering = False

    def _send(self, trajectory: Record, request: dict[str, Any]) -> None:
        if not self._in_work:
            self._clock = time.monotonic()
        self._in_work[trajectory.number] = trajectory.length
        self.send({"key": trajectory.number, "request": request})
