"""CommandEnvironment, `rollout.multi_turn.environment: command`: any program that speaks OpenAI's API is the environment.

The program is started once per trajectory. It finds OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment, and on
stdin one line of JSON: {"row": the data file's, "seed": 7}. It asks the model as it would ask any service (endpoint.py), and
prints its reward: the last line of stdout is a number, or {"reward": 0.5, "metrics": {"tests_passed": 3}}. What it prints to
stderr is shown. Its exit code must be 0. It is trusted code, with the limits of every environment (docs/agents.md).

A trajectory that goes on elsewhere starts the program again and gives it the same answers, so it should be deterministic. One
that is not is recorded exactly all the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.environments.environment import Environment, Step, environments
from grpo_megatron.processes.pool import FloodedError
from grpo_megatron.processes.process import describe_exit

MAX_PRINTED = 1 << 20  # bytes of stdout
WHERE = "rollout.multi_turn.kwargs"


@environments.register("command")
class CommandEnvironment(Environment):
    """`command`: program and arguments. `model`: the name that requests must use. `format`: how the model writes tool calls.

    `temperature`: the only one that a request may name, `rollout.temperature`.
    """

    gives_rewards = True
    reads_turns = True

    def __init__(
        self, command: Sequence[str], model: str = "policy", format: str = "hermes", temperature: float = 1.0
    ) -> None:
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise ValueError(f'{WHERE}.command={command!r} is no list of texts; write ["python", "agent.py"]')
        if shutil.which(command[0]) is None:
            raise ValueError(f"{WHERE}.command: there is no program {command[0]!r}; name one that can be run")
        self._command, self._model = list(command), model
        self._settings = model, float(temperature), format

    @classmethod
    def preload(cls, **kwargs: Any) -> None:
        """Import the server."""
        import uvicorn  # noqa: F401

        import grpo_megatron.environments.endpoint  # noqa: F401

    def reset(self, row: Mapping[str, Any], seed: int) -> Step:
        """Start the program, and wait for its first request."""
        from grpo_megatron.environments.endpoint import Endpoint

        self._endpoint = Endpoint(*self._settings)
        own = {"OPENAI_BASE_URL": self._endpoint.url, "OPENAI_API_KEY": self._endpoint.key, "OPENAI_MODEL": self._model}
        quiet = {name: f"{os.environ.get(name, '')},127.0.0.1".lstrip(",") for name in ("NO_PROXY", "no_proxy")}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(self._command, env={**os.environ, **quiet, **own}, **pipes)
        self._printed = b""
        line = json.dumps({"row": dict(row), "seed": seed}).encode() + b"\n"
        threading.Thread(target=self._watch, args=(line,), daemon=True).start()
        step = self._next()
        if step.done:
            raise RuntimeError("the program has ended without a request to the model")
        return step

    def step(self, completion: str) -> Step:
        """Answer the request that waits, and wait for the next one or for the end of the program."""
        self._endpoint.answer(json.loads(completion))
        return self._next()

    def _watch(self, line: bytes) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it reads no row
        while chunk := self._process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
            self._printed += chunk
            if len(self._printed) > MAX_PRINTED:
                self._endpoint.questions.put(f"it has printed more than {MAX_PRINTED} bytes")
                return
        self._process.wait()
        self._endpoint.questions.put("")

    def _next(self) -> Step:
        found = self._endpoint.questions.get()
        if isinstance(found, tuple):
            return Step(found[0], asked=found[1])
        if found:
            raise FloodedError(found)
        if self._process.returncode:
            raise RuntimeError(f"the program has failed: {describe_exit(self._process.returncode)}")
        return self._last()

    def _last(self) -> Step:
        """The end, with the printed reward. Raises ValueError for what is none."""
        last = self._printed.decode(errors="replace").strip().rpartition("\n")[2]
        try:
            value = json.loads(last)
            value = value if isinstance(value, dict) else {"reward": value}
            return Step([], reward=float(value["reward"]), done=True, metrics=dict(value.get("metrics") or {}))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"the last line that the program has printed is no reward: {last[-200:]!r}") from None
