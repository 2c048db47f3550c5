"""EnvironmentPool: hundreds of environments in worker processes. One that fails ends its own trajectory only.

A worker (worker.py) runs each environment in a process of its own, with limits on time, memory, output and processes.
Nothing that an environment does to its process can concern another one. An environment could still kill its worker.
Then all trajectories of that worker are replayed in a new one, from their row, seed and completions, one after the other:
the one in execution when a worker dies for the second time has killed it, and gets the status "died".

Outcomes are kept by key: the order in which workers answer changes nothing. Workers write and count time on their own, so
the caller may come back late. The pool is for one thread. Workers die with this process, and on Linux with the
thread that made the pool.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_megatron.environments.answer import Outcome, read_outcome
from grpo_megatron.environments.pool_worker import Record, WorkerLink
from grpo_megatron.workers.family import end_orphans
from grpo_megatron.workers.process import MAX_FAILED_STARTS

MAX_CONSOLE = 1 << 16  # characters of the environments' output that a pool prints


class EnvironmentPool:
    """`num_workers` processes that make environments called `name` with `kwargs`. Use it in a `with` block, or `close`.

    `timeout_s`: wall-clock seconds of one reset or step. `memory_gib`: address space of one environment, above what its
    worker has loaded. `max_characters`: of the messages of one answer. Raises ValueError for kwargs that are no JSON. Any
    method raises RuntimeError when the workers cannot load the environment.
    """

    def __init__(
        self,
        name: str,
        kwargs: Mapping[str, Any] | None = None,
        num_workers: int = 1,
        timeout_s: float = 30.0,
        memory_gib: float = 2.0,
        max_characters: int = 1 << 18,
    ) -> None:
        self._max_characters = max_characters
        self._timeout_s = timeout_s
        self._settings = {
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "name": name,
            "kwargs": dict(kwargs or {}),
            "timeout_s": timeout_s,
            "memory_bytes": int(memory_gib * (1 << 30)),
            "max_characters": max_characters,
        }
        try:
            json.dumps(self._settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"rollout.multi_turn.kwargs cannot be passed to the workers as JSON: {error}") from None
        end_orphans()
        self._trajectories: dict[str, Record] = {}
        self._numbers = itertools.count()
        self._outcomes: dict[str, Outcome] = {}
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._shown = 0
        self._workers = [self._new_worker() for _ in range(num_workers)]

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. Idempotent."""
        for worker in self._workers:
            self._discard(worker)
        self._workers = []
        self._selector.close()

    def start(self, key: str, row: Mapping[str, Any], seed: int, completions: Sequence[str] = ()) -> None:
        """Reset a new environment called `key`, and repeat `completions`. Returns at once.

        The outcome is that of the last call: the reset, or the step of the last completion.
        """
        assert key not in self._trajectories, f"trajectory {key!r} exists; end it first"
        request = {"start": dict(row), "seed": seed, "completions": list(completions)}
        self._submit(self._add(key, request), request)

    def step(self, key: str, completion: str) -> None:
        """Give `completion` to an environment whose last outcome has been read. Returns at once."""
        trajectory = self._trajectories[key]
        assert not trajectory.is_pending, f"trajectory {key!r} has not answered yet"
        trajectory.start["completions"].append(completion)
        if trajectory.failure:
            self._outcomes[key] = Outcome(None, "died", trajectory.failure)
        else:
            self._submit(trajectory, {"step": completion})

    def wait(self, keys: Iterable[str]) -> dict[str, Outcome]:
        """The outcomes of these keys, in their order. Blocks until all have answered."""
        wanted = list(keys)
        while any(self._trajectories[key].is_pending for key in wanted):
            self._serve(block=True)
        return {key: self._outcomes.pop(key) for key in wanted}

    def end(self, keys: Iterable[str]) -> None:
        """Forget these trajectories, whatever their state, and kill their processes. Unknown keys are ignored."""
        for key in keys:
            trajectory = self._trajectories.pop(key, None)
            self._outcomes.pop(key, None)
            if trajectory:
                trajectory.worker.forget(trajectory)
        self._serve(block=False)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _add(self, key: str, start: dict[str, Any]) -> Record:
        """In the worker that has the fewest."""
        assert self._workers, "the pool is closed"
        worker = min(self._workers, key=lambda worker: len(worker.trajectories))
        trajectory = self._trajectories[key] = Record(key, next(self._numbers), start, worker)
        worker.trajectories[trajectory.number] = trajectory
        return trajectory

    def _submit(self, trajectory: Record, request: dict[str, Any]) -> None:
        trajectory.is_pending = True
        trajectory.worker.submit(trajectory, request)
        self._serve(block=False)

    def _new_worker(self) -> WorkerLink:
        worker = WorkerLink(self._settings)
        for pipe in (worker.stdout, worker.stderr):
            self._selector.register(pipe, selectors.EVENT_READ, worker)
        return worker

    def _discard(self, worker: WorkerLink) -> str:
        for pipe in (worker.stdin, worker.stdout, worker.stderr):
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
        ending = worker.kill()
        worker.close()
        return ending

    def _serve(self, *, block: bool) -> None:
        """Pass messages on. `block`: until something has arrived, or a worker has been silent for too long."""
        for worker in self._workers:
            registered = worker.stdin in self._selector.get_map()
            if worker.wants_to_write and not registered:
                self._selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
            elif registered and not worker.wants_to_write:
                self._selector.unregister(worker.stdin)
        patience = min(worker.deadline(self._timeout_s) for worker in self._workers) - time.monotonic()
        for key, _ in self._selector.select(min(max(patience, 0.0), 60.0) if block else 0):
            worker = key.data
            if worker not in self._workers:
                continue  # an earlier event of this loop has replaced it
            if key.fileobj is worker.stdin:
                worker.write()
            elif key.fileobj is worker.stderr:
                self._show(worker)
            elif not worker.receive(lambda message, worker=worker: self._accept(worker, message)):
                self._replace(worker)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline(self._timeout_s) <= now]:
            worker.problem = "it does not answer"
            self._replace(worker)

    def _accept(self, worker: WorkerLink, message: dict[str, Any]) -> None:
        worker.heard()
        if "error" in message:
            raise RuntimeError(f"the environment cannot be loaded: {message['error']}")
        if "ready" in message:
            worker.ready, self._failed_starts = True, 0
        elif "key" in message and (trajectory := worker.answered(message["key"])):
            trajectory.is_pending = False
            self._outcomes[trajectory.key] = read_outcome(message["answer"], self._max_characters)

    def _replace(self, worker: WorkerLink) -> None:
        """Replay the trajectories of a worker that is lost in a new one."""
        self._show(worker)
        tail = worker.log_tail.strip().rpartition("\n")[2][-200:]
        ending = self._discard(worker)
        ending = (worker.problem or ending) + (f" (last output: {tail})" if tail else "")
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise RuntimeError(f"environment workers do not start: {ending}")
        if culprit := worker.culprit():
            culprit.failure = f"its worker has ended twice while it was in execution: {ending}"
            if culprit.is_pending:
                culprit.is_pending = False
                self._outcomes[culprit.key] = Outcome(None, "died", culprit.failure)
        new = self._new_worker()
        self._workers[self._workers.index(worker)] = new
        new.recover(worker.trajectories.values())

    def _show(self, worker: WorkerLink) -> None:
        """Print what environments print, up to MAX_CONSOLE characters."""
        text, more = worker.read_log()
        if not more and worker.stderr in self._selector.get_map():
            self._selector.unregister(worker.stderr)
        if text and self._shown < MAX_CONSOLE:
            sys.stderr.write(text[: MAX_CONSOLE - self._shown])
            self._shown += len(text)
            if self._shown >= MAX_CONSOLE:
                sys.stderr.write("\n[further output of environments is not shown]\n")
