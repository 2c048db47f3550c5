"""Environments of task folders (data/folders.py): each trajectory works in a sandbox of its own, and a verifier gives the reward.

`folders`: the model has one tool, `bash`. `folders_command`: an agent of your own works there (command.py).

The verifier's files appear only after the agent has ended. It runs in another sandbox that is as new, with the working folder
of the agent and the task's artifacts; or in the agent's, which may be poisoned, where the task or `verifier: shared` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.data.folders import REWARDS, task_of_row
from grpo_megatron.environments.command import CommandEnvironment
from grpo_megatron.environments.environment import ChatMessage, Environment, Step, environments
from grpo_megatron.environments.sandboxes.backend import (
    CommandResult,
    Sandbox,
    SandboxContentError,
    SandboxLimits,
    backends,
    make_archive,
    try_again,
)
from grpo_megatron.environments.tool import Tool, function_schema
from grpo_megatron.environments.tool_environment import Call, ToolEnvironment
from grpo_megatron.processes.process import end_tree
from grpo_megatron.untrusted import shown

_KWARGS = "rollout.multi_turn.kwargs"
MAX_REWARD_FILE = 1 << 16  # bytes
SWEEP_EVERY = 64  # starts, on average, between sweeps of what killed environments left
VERIFIER_MODES = ("separate", "shared")
# a verifier's Python reads no module beside itself, of a user, or of what an agent left in its working folder
CLEAN = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", "HOME": REWARDS}


class VerifierError(RuntimeError):
    """A verifier that has given no reward. It is no sandbox's failure, so it is not called again."""


class _Work:
    """The sandbox of a trajectory with its task, from the start to the reward. `options`: those of both environments."""

    def __init__(
        self,
        backend: str = "local",
        verifier: str = "separate",
        command_timeout_s: float = 20.0,
        call_timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        if verifier not in VERIFIER_MODES:
            raise ValueError(f"{_KWARGS}.verifier={verifier!r}: write {' or '.join(VERIFIER_MODES)}")
        self._backend = backends.get(backend)
        names = {field.name for field in dataclasses.fields(SandboxLimits)}
        if unknown := sorted(set(options) - names - set(self._backend.options)):
            known = ", ".join(sorted({*names, *self._backend.options}))
            raise ValueError(
                f"{_KWARGS}: the sandbox backend {backend} has no option {', '.join(unknown)} (it has: {known})"
            )
        self._limits = SandboxLimits(**{name: value for name, value in options.items() if name in names})
        for name, value in vars(self._limits).items():
            if name != "network" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{_KWARGS}.{name}={value!r}: write a whole number of at least 1")
        self._options = {name: value for name, value in options.items() if name not in names}
        self._mode, self._command_timeout_s, self._call_timeout_s = verifier, command_timeout_s, call_timeout_s

    def prepare(self) -> None:
        """Once per worker. Raises ValueError."""
        self._backend.prepare(self._limits, **self._options)

    def start(self, row: Mapping[str, Any]) -> None:
        """Raises ValueError for a task that cannot run here, SandboxError."""
        self.task, self.seconds = task_of_row(row), 0.0
        task = self.task
        needed, given = task.verifier_timeout_s + self._command_timeout_s, self._call_timeout_s
        if given is not None and needed > given:
            raise ValueError(
                f"task {task.name}: its verifier may take {task.verifier_timeout_s:g} s, and a command"
                f" {self._command_timeout_s:g} s; set rollout.multi_turn.timeout_s={math.ceil(needed + 10)} (it is {given:g})"
            )
        if task.network and not self._limits.network:
            raise ValueError(
                f"task {task.name} wants a network; set {_KWARGS}.network=true, which gives the agent yours, or leave the"
                " folder out"
            )
        bounds = {
            name: min(getattr(task, name) or sys.maxsize, getattr(self._limits, name))
            for name in ("cpus", "memory_mib", "disk_mib")
        }
        self._bounds = dataclasses.replace(self._limits, **bounds)
        if not random.randrange(SWEEP_EVERY):
            self.prepare()
        self.sandbox = try_again(f"task {task.name}: the start of a sandbox", self._new)

    def _new(self) -> Sandbox:
        sandbox = self._backend(self.task, self._bounds, **self._options)
        sandbox.start()
        return sandbox

    @property
    def time_left(self) -> float:
        """Seconds that the agent's commands may still take."""
        return self.task.agent_timeout_s - self.seconds

    def run(self, command: str) -> CommandResult:
        """Runs a command of the agent."""
        timeout = max(min(self._command_timeout_s, self.time_left), 0.1)
        began = time.monotonic()
        try:
            return self.sandbox.run(["bash", "-c", command], timeout, variables=self.task.variables)
        finally:
            self.seconds += time.monotonic() - began

    def grade(self) -> tuple[float, dict[str, float]]:
        """Runs the verifier, and removes all. Returns (reward, metrics). Raises VerifierError, SandboxError."""
        began = time.monotonic()
        try:
            shared = self.task.is_shared if self.task.is_shared is not None else self._mode == "shared"
            if shared:
                self.sandbox.end_processes()
                values = self._verify(self.sandbox)
            else:
                folders = list(dict.fromkeys([str(self.sandbox.folder), *self.task.artifacts]))
                try:
                    most = (self._bounds.disk_mib << 20) + (self._bounds.files << 10)
                    what = f"task {self.task.name}: reading its result"
                    work = try_again(what, lambda: self.sandbox.read_folders(folders, most))
                except SandboxContentError:  # the agent has left too much, or what nobody can read
                    work = b""
                values = try_again(
                    f"task {self.task.name}: its verifier", lambda: self._verify_elsewhere(folders, work)
                )
        finally:
            self.sandbox.stop()
        reward = values.pop("reward", None)
        if reward is None:
            raise VerifierError(
                f"task {self.task.name}: its verifier has written no reward, but {', '.join(values) or 'nothing'}"
            )
        return reward, {**values, "verifier_seconds": time.monotonic() - began}

    def _verify_elsewhere(self, folders: Sequence[str], work: bytes) -> dict[str, float]:
        sandbox = self._new()
        try:
            return self._verify(sandbox, folders, work)
        finally:
            sandbox.stop()

    def _verify(self, sandbox: Sandbox, folders: Sequence[str] = (), work: bytes = b"") -> dict[str, float]:
        task = self.task
        sandbox.write(["/tests", REWARDS, *folders], make_archive(task.tests) + work)
        variables = {**task.variables, **CLEAN, **task.verifier_variables}
        result = sandbox.run(task.verifier, task.verifier_timeout_s, variables=variables)
        said = f"{result.problem or f'exit code {result.exit_code}'}; its last words: {shown(result.text().strip()[-200:])}"
        if result.problem or result.exit_code in (126, 127):  # 126, 127: the shell found no program
            raise VerifierError(f"the verifier has not ended as it should ({said})")
        if not task.writes_reward:
            return {"reward": float(result.exit_code == 0)}
        for name, read in (("reward.txt", float), ("reward.json", json.loads)):
            with contextlib.suppress(FileNotFoundError):
                text = sandbox.read(f"{REWARDS}/{name}", MAX_REWARD_FILE).decode(errors="replace")
                try:
                    return _numbers(read(text))
                except (ValueError, TypeError, RecursionError) as error:
                    raise VerifierError(f"the verifier's {name} is no reward ({error}): {shown(text)}") from None
        raise VerifierError(f"the verifier has written neither reward.txt nor reward.json to {REWARDS} ({said})")


def _numbers(value: Any) -> dict[str, float]:
    values = value if isinstance(value, dict) else {"reward": value}
    numbers = {str(name): float(number) for name, number in values.items() if not isinstance(number, str)}
    if len(numbers) < len(values) or not all(map(math.isfinite, numbers.values())):
        raise ValueError("a value is no finite number")
    return numbers


class _Folders(Environment):
    """The common part of both environments: `finish` grades a trajectory that ends before its agent does."""

    gives_rewards = True
    finishes = True
    work: _Work

    def finish(self) -> Step:
        """See Environment."""
        reward, metrics = self.work.grade()
        return Step([], reward=reward, done=True, metrics={**metrics, "unfinished": 1.0})


@environments.register("folders")
class FolderEnvironment(_Folders, ToolEnvironment):
    """The tool `bash` in the sandbox of a task. `options`: those of `_Work`, SandboxLimits and the backend.

    A turn without a call, or one after the task's time for the agent, is the last. Calls of one turn run in their order.
    `episodes`: trajectories of one process, each in sandboxes of its own.
    """

    def __init__(
        self, format: str = "hermes", max_parallel_calls: int = 4, episodes: int = 100, **options: Any
    ) -> None:
        self.work, self.episodes = _Work(**options), episodes
        self._tools = {"bash": Tool("bash", self._bash, {}, function_schema(bash, "bash"))}
        self._format, self._max_parallel_calls = format, max_parallel_calls
        self._lock = asyncio.Lock()

    @classmethod
    def preload(cls, **kwargs: Any) -> None:
        """See Environment."""
        cls(**kwargs).work.prepare()

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        """Starts the sandbox. Returns the task's messages."""
        self.work.start(row)
        return list(row["messages"])

    async def step(self, completion: str) -> Step:
        """Answers the calls of a turn, or grades after the last one."""
        step = await super().step(completion)
        if not step.done and self.work.time_left > 0:
            return step
        reward, metrics = self.work.grade()
        return dataclasses.replace(step, reward=reward, done=True, metrics={**step.metrics, **metrics})

    async def _answer(self, call: Call | str) -> tuple[str, str, bool, float]:
        async with self._lock:
            return await super()._answer(call)

    def _bash(self, command: str) -> str:
        result = self.work.run(command)
        text = result.text().rstrip("\n")
        end = f"[{result.problem}]" if result.problem else f"[exit code {result.exit_code}]" if result.exit_code else ""
        return "\n".join(filter(None, (text, end)))


def bash(command: str) -> str:
    """Run a command in a shell, and return what it prints. Each call is a new shell in the working folder; files are kept.

    Args:
        command: For bash.
    """
    raise NotImplementedError(command)


@environments.register("folders_command")
class FolderCommandEnvironment(_Folders, CommandEnvironment):
    """An agent of your own, as `command` starts it. Its row has "sandbox": what runs a command there, to be put before it.

    [*row["sandbox"], "ls -l"] prints the output and has the exit code. What the agent itself prints is not the reward.
    """

    def __init__(
        self,
        command: Sequence[str],
        model: str = "policy",
        format: str = "hermes",
        temperature: float = 1.0,
        branches: str = "refuse",
        episodes: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(command, model, format, temperature, branches, episodes)
        self.work = _Work(**options)

    @classmethod
    def preload(cls, **kwargs: Any) -> None:
        """See Environment."""
        CommandEnvironment.preload(**kwargs)
        cls(**kwargs).work.prepare()

    def reset(self, row: Mapping[str, Any], seed: int) -> Step:
        """Starts the sandbox, then the agent."""
        self.work.start(row)
        sandbox, backend = self.work.sandbox, type(self.work.sandbox)
        state = {"class": f"{backend.__module__}:{backend.__name__}", "limits": vars(sandbox.limits)}
        state |= {"chosen": sandbox.chosen, "state": sandbox.state(), "variables": dict(self.work.task.variables)}
        prefix = [sys.executable, "-m", "grpo_megatron.environments.sandboxes", json.dumps(state)]
        return super().reset({**row, "instruction": self.work.task.instruction, "sandbox": prefix}, seed)

    def finish(self) -> Step:
        """See Environment. The agent ends first."""
        end_tree(self._process.pid)
        return super().finish()

    def _last(self) -> Step:
        reward, metrics = self.work.grade()
        return Step([], reward=reward, done=True, metrics=metrics)
