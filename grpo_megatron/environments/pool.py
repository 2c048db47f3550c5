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

import contextlib
import fcntl
import itertools
import json
import os
import selectors
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.config import ConfigError, MultiTurnConfig
from grpo_megatron.environments.environment import ChatMessage, Environment, Outcome, read_outcome
from grpo_megatron.environments.tool_environment import ToolEnvironment
from grpo_megatron.processes.family import end_orphans
from grpo_megatron.processes.process import MAX_FAILED_STARTS, STARTUP_TIMEOUT_S, PipedProcess
from grpo_megatron.registry import Registry

# -- The pool's side of one worker: its trajectories, and the replay of those of a worker that is lost -----------------

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


# -- Names in `rollout.multi_turn.environment` -> classes: registered ones, or `module:Class` of the user's own --------

environments: Registry[type[Environment]] = Registry("environment")
environments.register("tools")(ToolEnvironment)


def load_environment(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Makes instances of the class called `name`. Imports the class and preloads it.

    Raises ValueError for a name that is no Environment, and whatever the user's module or its `preload` raises.
    """
    found = environment_class(name)
    found.preload(**kwargs)
    return lambda: found(**kwargs)


def environment_class(name: str) -> type[Environment]:
    """Raises ValueError for a name that is no Environment, and whatever the user's module raises."""
    found = environments.get(name)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ValueError(f"{name!r} is no subclass of grpo_megatron.environments.environment.Environment; name one")
    return found


# -- From the section `rollout.multi_turn` to an environment's class, one instance, or a pool of worker processes ------

_KEY = "rollout.multi_turn.environment"


def find_environment(name: str) -> type[Environment]:
    """The class that `rollout.multi_turn.environment` names. Raises ConfigError."""
    try:
        return environment_class(name)
    except ValueError as error:
        raise ConfigError(f"{_KEY}: {error}") from error
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ConfigError(
            f"{_KEY}={name!r}: importing it raised {type(error).__name__}: {error}; correct the module"
        ) from error


def environment_kwargs(multi_turn: MultiTurnConfig) -> dict[str, Any]:
    """The keyword arguments of the class: `kwargs`, and for the built-in `tools` the keys about tools."""
    if multi_turn.environment != "tools":
        return dict(multi_turn.kwargs)
    own = {name: getattr(multi_turn, name) for name in ("tools", "format", "max_parallel_calls")}
    return {**own, **multi_turn.kwargs}


def make_environment(multi_turn: MultiTurnConfig) -> Environment:
    """One instance in this process, neither preloaded nor reset. Raises ConfigError."""
    assert multi_turn.environment is not None
    found, kwargs = find_environment(multi_turn.environment), environment_kwargs(multi_turn)
    try:
        return found(**kwargs)
    except Exception as error:  # whatever the user's class raises
        raise ConfigError(
            f"{_KEY}={multi_turn.environment!r} cannot be made with {kwargs}: {type(error).__name__}: {error}; correct"
            " rollout.multi_turn.kwargs, or the class"
        ) from error


def first_messages(multi_turn: MultiTurnConfig, row: Mapping[str, Any]) -> list[ChatMessage]:
    """What the environment's reset gives for a row, in a worker as during the run. Raises ConfigError."""
    key = f"{_KEY}={multi_turn.environment!r}"
    try:
        with build_pool(multi_turn.model_copy(update={"num_workers": 1})) as pool:
            pool.start("first row", row, seed=0)
            outcome = pool.wait(["first row"])["first row"]
    except RuntimeError as error:
        raise ConfigError(f"{key}: {error}") from error
    if outcome.step is None:
        raise ConfigError(
            f"{key}: its reset fails on the first row of the data ({outcome.status}: {outcome.message}); the row's fields"
            f" are {', '.join(row)}"
        )
    if not outcome.step.messages:
        raise ConfigError(f"{key}: its reset gives no message for the first row of the data; the prompt would be empty")
    return outcome.step.messages


def build_pool(multi_turn: MultiTurnConfig) -> EnvironmentPool:
    """The workers of one engine. Raises ConfigError for kwargs that are no JSON."""
    assert multi_turn.environment is not None
    try:
        return EnvironmentPool(
            multi_turn.environment,
            environment_kwargs(multi_turn),
            multi_turn.num_workers,
            multi_turn.timeout_s,
            multi_turn.memory_gib,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
