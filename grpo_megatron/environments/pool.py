"""EnvironmentPool: hundreds of environments, each in a process of its own; and environments from `rollout.multi_turn`.

One that fails ends its own trajectory only, after a second try. Outcomes are kept by key: the order in which processes
answer changes nothing. A trajectory whose host is lost, or whose environment has raised or died once, is replayed from its
row, seed and completions (processes/pool.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_megatron.config import ConfigError, MultiTurnConfig
from grpo_megatron.data.images import flat_message
from grpo_megatron.environments.environment import (
    MAX_IMAGES,
    Environment,
    Outcome,
    environment_class,
    read_outcome,
    written_turn,
)
from grpo_megatron.processes.pool import Limits, PoolClient, ProcessAnswer, ProcessPool
from grpo_megatron.processes.process import describe

MAX_OUTPUT = 1 << 20  # bytes that one call may print
MAX_PROCESSES = 64  # that one environment may run at a time
TRIED_TWICE = (
    "raised",
    "died",
)  # a service may have been away; a timeout, a flood or a lack of memory would come again


class EnvironmentPool(PoolClient):
    """Environments called `name`, made with `kwargs` in `num_workers` hosts. Use it in a `with` block, or `close` it.

    `timeout_s`: wall-clock seconds of one reset or step. `memory_gib`: address space of one environment, above what its
    host has loaded. `max_characters`: of the messages of one answer. Raises ValueError for kwargs that are no JSON. Any
    method raises RuntimeError when the environment cannot be loaded.
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
        self._timeout_s, self._max_characters = timeout_s, max_characters
        self._starts: dict[str, dict[str, Any]] = {}  # key -> its first request, with all completions so far
        self._outcomes: dict[str, Outcome | None] = {}  # key -> an outcome to be read; None: not there yet
        self._failed_once: set[str] = set()
        self._again: list[str] = []  # of them, those that are to be started again
        settings = {
            "name": name,
            "kwargs": dict(kwargs or {}),
            "memory_bytes": int(memory_gib * (1 << 30)),
            "max_characters": max_characters,
        }
        # Messages and a request, of which JSON writes a character in 12 bytes; and images.
        max_line = 12 * 3 * max_characters + MAX_IMAGES + (1 << 16)
        limits = Limits(max_line, MAX_OUTPUT, MAX_PROCESSES, keeps_state=True)
        # The order of sets must not depend on the process. One thread: libraries' pools of threads do not survive forks.
        variables = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        program = "grpo_megatron.environments.environment:open_environments"
        what = "environment", "rollout.multi_turn.kwargs"
        self._processes = ProcessPool(*what, program, settings, limits, self._accept, num_workers, variables)

    def start(self, key: str, row: Mapping[str, Any], seed: int, completions: Sequence[str | None] = ()) -> None:
        """Resets a new environment called `key`, and repeats `completions`. Returns at once.

        The outcome is that of the last call: the reset, or the step of the last completion.
        """
        assert key not in self._starts, f"trajectory {key!r} exists; end it first"
        self._starts[key] = {"start": dict(row), "seed": seed, "completions": list(completions)}
        self._submit(key, self._starts[key])

    def step(self, key: str, completion: str | None) -> None:
        """Gives `completion` to an environment whose last outcome has been read; None: `finish`. Returns at once."""
        assert key not in self._outcomes, f"trajectory {key!r} has not answered yet, or its answer was not read"
        self._starts[key]["completions"].append(completion)
        self._submit(key, {"step": completion})

    def wait(self, keys: Iterable[str]) -> dict[str, Outcome]:
        """Returns the outcomes of these keys, in their order. Blocks until all have answered."""
        outcomes: dict[str, Outcome] = {}
        for key in keys:
            while (outcome := self._outcomes[key]) is None:
                self._start_again()
                self._processes.serve(block=True)
            outcomes[key] = outcome
            del self._outcomes[key]
        return outcomes

    def end(self, keys: Iterable[str]) -> None:
        """Forgets these trajectories, whatever their state, and kills their processes. Unknown keys are ignored."""
        for key in keys:
            self._processes.end(key)
            self._starts.pop(key, None)
            self._outcomes.pop(key, None)
            self._failed_once.discard(key)
        self._processes.serve(block=False)

    def _submit(self, key: str, request: dict[str, Any]) -> None:
        """Sends `request`. A new process gets to the state after it by `start`, with all steps and the time of all."""
        start = self._starts[key]
        num_calls = 1 + len(start["completions"])
        self._outcomes[key] = None
        seconds = self._timeout_s * (num_calls if request is start else 1)
        self._processes.submit(key, request, seconds, replay=(start, self._timeout_s * num_calls))
        self._processes.serve(block=False)

    def _start_again(self) -> None:
        again, self._again = self._again, []
        for key in again:
            if key in self._starts:
                self._processes.end(key)
                self._submit(key, self._starts[key])

    def _accept(self, key: str, answer: ProcessAnswer) -> None:
        outcome = read_outcome(answer, self._max_characters)
        if outcome.status in TRIED_TWICE and key not in self._failed_once and not answer.get("is_final"):
            self._failed_once.add(key)
            self._again.append(key)  # not from here: the pool is in the middle of its messages
        else:
            self._outcomes[key] = outcome


# -- from the section `rollout.multi_turn` -----------------------------------------------------------------------------

_KEY = "rollout.multi_turn.environment"


def find_environment(name: str) -> type[Environment]:
    """Finds the class that `rollout.multi_turn.environment` names. Raises ConfigError."""
    try:
        return environment_class(name)
    except ValueError as error:
        raise ConfigError(f"{_KEY}: {error}") from error
    except Exception as error:  # any error of the user's module
        raise ConfigError(f"{_KEY}={name!r}: importing it raised {describe(error)}; correct the module") from error


def environment_kwargs(multi_turn: MultiTurnConfig) -> dict[str, Any]:
    """Returns the keyword arguments of the class: `kwargs`, and for built-in ones the keys that they read."""
    keys = {"tools": ("tools", "format", "max_parallel_calls"), "folders": ("format", "max_parallel_calls")}
    given = {name: getattr(multi_turn, name) for name in keys.get(multi_turn.environment or "", ())}
    if multi_turn.environment in ("folders", "folders_command"):
        given["call_timeout_s"] = multi_turn.timeout_s
    return {**given, **multi_turn.kwargs}


def make_environment(multi_turn: MultiTurnConfig) -> Environment:
    """Makes one instance in this process, neither preloaded nor reset. Raises ConfigError."""
    assert multi_turn.environment is not None
    environment, kwargs = find_environment(multi_turn.environment), environment_kwargs(multi_turn)
    try:
        return environment(**kwargs)
    except Exception as error:  # any error of the user's class
        raise ConfigError(
            f"{_KEY}={multi_turn.environment!r} cannot be made with {kwargs}: {describe(error)}; correct"
            f" rollout.multi_turn.{'tools or kwargs' if multi_turn.environment == 'tools' else 'kwargs'}, or the class"
        ) from error


TRIED_TURNS = 3  # of the episode before a run


def try_episode(multi_turn: MultiTurnConfig, row: Mapping[str, Any], written: str) -> Iterator[tuple[str, str]]:
    """Yields (speaker, text) of an episode on a row, in a worker as in the run; the model writes the same in each turn.

    Raises ConfigError if the environment cannot be loaded or started. A step that fails is a warning: the text may be
    at fault.
    """
    key = f"{_KEY}={multi_turn.environment!r}"
    assert multi_turn.environment is not None
    turn = written_turn(written) if find_environment(multi_turn.environment).reads_turns else written
    try:
        with _kept_stderr() as printed, build_pool(multi_turn.with_values({"num_workers": 1})) as pool:
            pool.start("first row", row, seed=0)
            outcomes = [pool.wait(["first row"])["first row"]]
            turns = min(TRIED_TURNS, multi_turn.max_assistant_turns)
            while len(outcomes) <= turns and (step := outcomes[-1].step) is not None and not step.done:
                pool.step("first row", turn)
                outcomes += pool.wait(["first row"]).values()
    except RuntimeError as error:
        raise ConfigError(f"{key}: {error}") from error
    if outcomes[0].step is not None and printed:
        print(printed[0], end="", file=sys.stderr, flush=True)
    for number, outcome in enumerate(outcomes):
        if number:
            yield "model", written
        if outcome.step is None and number:
            yield "WARNING", f"the step fails ({outcome.status}: {outcome.message})"
            return
        if outcome.step is None:
            raise ConfigError(
                f"{key}: its reset fails on the first row of the data ({outcome.status}: {outcome.message}); the row's fields"
                f" are {', '.join(row)}{''.join(map(_last_printed, printed))}"
            )
        if not number and not outcome.step.messages and outcome.step.request.prompt is None:
            raise ConfigError(
                f"{key}: its reset gives no message for the first row of the data; the prompt would be empty"
            )
        yield from ((message["role"], flat_message(message)["content"]) for message in outcome.step.messages)
        if number:
            reward = "no reward" if outcome.step.reward is None else f"the reward {outcome.step.reward:g}"
            metrics = "".join(f", {name} {value:g}" for name, value in outcome.step.metrics.items())
            yield f"turn {number}", f"{reward}{metrics}; {'the end' if outcome.step.done else 'it goes on'}"


@contextlib.contextmanager
def _kept_stderr() -> Iterator[list[str]]:
    """Keeps what this process and those that it starts print to stderr. At the end the list has the text, if there is any."""
    printed: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file, open(os.dup(2), "wb") as before:
        os.dup2(file.fileno(), 2)
        try:
            yield printed
        finally:
            os.dup2(before.fileno(), 2)
            file.seek(0)
            printed += filter(None, [file.read().decode(errors="replace")])


def _last_printed(text: str) -> str:
    """Indents the last traceback of what a program has printed, or its last lines. It may have run twice."""
    lines = text[max(0, text.rfind("Traceback (most recent")) :].splitlines()[-8:]
    return "\n  it has printed:" + "".join(f"\n    {line}" for line in lines)


def build_pool(multi_turn: MultiTurnConfig) -> EnvironmentPool:
    """Builds the workers of one engine. Raises ConfigError for kwargs that are no JSON."""
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
