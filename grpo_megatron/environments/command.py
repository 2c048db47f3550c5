"""CommandEnvironment, `rollout.multi_turn.environment: command`: any program that speaks OpenAI's API is the environment.

The program is started once per trajectory, with OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment (and
the same of ANTHROPIC), and on stdin one line of JSON: {"row": the data file's, "seed": 7}. It asks the model as any
service (openai_api.py), and prints its reward: the last line of stdout is a number, or {"reward": 0.5, "metrics":
{"tests_passed": 3}}. Its stderr is shown. Its exit code must be 0. It is trusted code, with the limits of every
environment (docs/agents.md). A trajectory that goes on elsewhere starts it again and gives it the same answers, so it
should be deterministic.

A command `[my_agent:main, ARGUMENTS]` is a function of Python. It is called in a fork of a process that has imported its
module, so what stands at the module's top (libraries, clients, indices) costs once per host and not once per trajectory.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.environments.environment import Environment, Step, environments
from grpo_megatron.processes.pool import FloodedError
from grpo_megatron.processes.process import describe_exit
from grpo_megatron.registry import import_function

MAX_STDOUT = 1 << 20  # bytes of stdout
CALL_ENDED = b"\x04"  # the line after a call of a function
WHERE = "rollout.multi_turn.kwargs"


@dataclass(frozen=True)
class _Program:
    """A process with the ends of its pipes; `wait` returns its exit code, negative for a signal."""

    pid: int
    stdin: int
    stdout: int
    wait: Callable[[], int]


def _run(command: Sequence[str], variables: Mapping[str, str]) -> _Program:
    process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin as row, process.stdout as printed:
        return _Program(process.pid, os.dup(row.fileno()), os.dup(printed.fileno()), process.wait)


def _fork(command: Sequence[str], variables: Mapping[str, str]) -> _Program:
    """Calls the function ["my_agent:main", ...] in a copy of this process, once for each line that it gets."""
    (read_row, write_row), (read_printed, write_printed) = os.pipe(), os.pipe()
    if pid := os.fork():
        os.close(read_row)
        os.close(write_printed)
        return _Program(pid, write_row, read_printed, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    code = 0
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a command of the agent must not read the next row
        os.dup2(write_printed, 1)
        rows = os.dup(read_row)
        os.closerange(3, rows)  # the endpoint's socket, and the connection to the worker
        os.closerange(rows + 1, 1024)
        os.environ.update(variables)
        sys.stdout, sys.argv = open(1, "w", closefd=False), list(command)  # noqa: SIM115
        main: Any = import_function(command[0])
        for line in open(rows, "rb"):  # noqa: SIM115
            sys.stdin = io.TextIOWrapper(io.BytesIO(line))
            if code := int(main() or 0):
                break
            print(f"\n{CALL_ENDED.decode()}", flush=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        code = 1
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _is_function(name: str) -> bool:
    return ":" in name and os.sep not in name


@environments.register("command")
class CommandEnvironment(Environment):
    """A program as the environment. `command`: program or function, and arguments. `model`: the name that requests must use.

    `format`: how the model writes tool calls. `temperature`: the only one that a request may name, `rollout.temperature`.
    `branches`: a request that does not continue the one before gets a 400 (refuse), or begins another sequence, which is
    a sample of its own (samples). `episodes`: trajectories that one start serves, at one address: it
    gets a line for each, and ends each by a line that begins with {"reward". A function is called for each.
    """

    gives_rewards = True
    reads_turns = True

    def __init__(
        self,
        command: Sequence[str] = (),
        model: str = "policy",
        format: str = "hermes",
        temperature: float = 1.0,
        branches: str = "refuse",
        episodes: int = 1,
    ) -> None:
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise ValueError(f'{WHERE}.command={command or None!r} is no list of texts; write ["python", "agent.py"]')
        self._is_forked = _is_function(command[0])
        if not self._is_forked and shutil.which(command[0]) is None:
            raise ValueError(
                f"{WHERE}.command: there is no program {command[0]!r}; name one that can be run, or a function as my_agent:main"
            )
        if branches not in ("refuse", "samples"):
            raise ValueError(f"{WHERE}.branches={branches!r}: write refuse or samples")
        if isinstance(episodes, bool) or not isinstance(episodes, int) or episodes < 1:
            raise ValueError(f"{WHERE}.episodes={episodes!r}: write a whole number of at least 1")
        self._command, self._model, self.episodes = list(command), model, episodes
        self._endpoint: Any = None  # openai_api.Endpoint
        self._exit_code: int | None = None  # None: it runs
        self._is_idle = False  # between two trajectories
        self._settings = model, float(temperature), format, branches == "samples"

    @classmethod
    def preload(cls, **kwargs: Any) -> None:
        """Imports the server, and the module of a function. Rehearses a request where that has OpenAI's client."""
        from grpo_megatron.environments.openai_api import Endpoint

        if _is_function(str([*kwargs.get("command", ()), ""][0])):
            import_function(kwargs["command"][0])
            http = sys.modules.get("httpx2") or sys.modules.get("httpx")  # openai 3, 2
            if openai := sys.modules.get("openai"):
                with contextlib.suppress(Exception):  # of a client of another version; it saves time only
                    asyncio.run(Endpoint("policy", 1.0, "hermes").rehearse(openai, http))

    def reset(self, row: Mapping[str, Any], seed: int) -> Step:
        """Starts the program if none runs, gives it the row, and waits for its first request."""
        self._printed, self._is_idle = b"", False
        if self._endpoint is None:
            self._start()
        else:
            self._endpoint.begin_conversation()
        line = json.dumps({"row": dict(row), "seed": seed}).encode() + b"\n"
        threading.Thread(target=self._give, args=(line,), daemon=True).start()
        step = self._next()
        if step.done:
            raise RuntimeError("the program has ended without a request to the model")
        return step

    def _start(self) -> None:
        from grpo_megatron.environments.openai_api import Endpoint

        self._endpoint = Endpoint(*self._settings)
        url = self._endpoint.url
        client: dict[str, str] = {}
        for name, base in (("OPENAI", url), ("ANTHROPIC", url.removesuffix("/v1"))):
            client |= {f"{name}_BASE_URL": base, f"{name}_API_KEY": self._endpoint.key, f"{name}_MODEL": self._model}
        quiet = {name: f"{os.environ.get(name, '')},127.0.0.1".lstrip(",") for name in ("NO_PROXY", "no_proxy")}
        start = _fork if self._is_forked else _run
        self._process = start(self._command, {**os.environ, **quiet, **client})
        self._stdin = os.fdopen(self._process.stdin, "wb")
        self._endpoint.serve()  # a thread, and a process is forked from one thread only
        threading.Thread(target=self._watch, args=(self._process, self._endpoint), daemon=True).start()

    def step(self, completion: str) -> Step:
        """Answers the waiting request, and waits for the next one or for the end of the program."""
        self._endpoint.answer(json.loads(completion))
        return self._next()

    def _give(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(line)
            self._stdin.flush()
            if self.episodes == 1:
                self._stdin.close()

    def _ends_episode(self, line: bytes) -> bool:
        return line == CALL_ENDED if self._is_forked else self.episodes > 1 and line.startswith(b'{"reward"')

    def _watch(self, process: _Program, endpoint: Any) -> None:
        """Reads what it prints until it has ended, also where a child of it still has the pipe open."""
        ended, poll, pipe = os.pidfd_open(process.pid), select.poll(), process.stdout
        for descriptor in (pipe, ended):
            poll.register(descriptor, select.POLLIN)
        # looks twice: it may print and end between the looks of one poll at the pipe and at the process
        while any(pipe in dict(poll.poll(ms)) for ms in (None, 0)) and (chunk := os.read(pipe, 1 << 16)):
            self._printed += chunk
            if len(self._printed) > MAX_STDOUT:
                endpoint.questions.put(FloodedError(f"it has printed more than {MAX_STDOUT} bytes"))
                return
            if self._printed.endswith(b"\n") and self._ends_episode(self._printed[:-1].rpartition(b"\n")[2]):
                endpoint.questions.put(None)
        self._exit_code = process.wait()
        if self._is_idle:
            os._exit(0)  # the next trajectory gets another process
        endpoint.questions.put(None)

    def _next(self) -> Step:
        question = self._endpoint.questions.get()
        if isinstance(question, Exception):
            raise question
        if question is not None:
            return Step(question[0], request=question[1])
        if self._exit_code:
            raise RuntimeError(f"the program has failed: {describe_exit(self._exit_code)}")
        step, self._is_idle = self._last(), True
        self.episodes = self.episodes if self._exit_code is None else 1
        return step

    def _last(self) -> Step:
        """Reads the printed reward at the end. Raises ValueError for what is none."""
        last = self._printed.removesuffix(CALL_ENDED + b"\n").decode(errors="replace").strip().rpartition("\n")[2]
        try:
            value = json.loads(last)
            value = value if isinstance(value, dict) else {"reward": value}
            return Step([], reward=float(value["reward"]), done=True, metrics=dict(value.get("metrics") or {}))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"the last line that the program has printed is no reward: {last[-200:]!r}") from None
