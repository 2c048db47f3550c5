"""The program of one environment's process: a worker forks it, it serves one trajectory, and it never returns.

A process per trajectory keeps trajectories apart: a hang in C, an exit, a changed working directory, a patched module,
a closed file or a seeded generator can only concern its own. What an environment's class has loaded before the fork
(`Environment.preload`) is shared, and copied by the kernel only where it is written to.

    <- {"start": ROW, "seed": 7, "completions": [...]}    -> {"progress": 0}, ... per replayed call but the last
    <- {"step": COMPLETION}                               -> {"status": "ok", "step": {...}, "seconds": 0.1}
                                                          or {"status": "raised", "message": "...", "seconds": 0.1}
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import random
import resource
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_megatron.environments.environment import Environment, FloodedError, plain_messages, plain_step
from grpo_megatron.processes.family import adopt_orphans, die_with_parent
from grpo_megatron.processes.process import be_killed_first, describe

OUT_OF_MEMORY = 77  # exit code of a process that has no memory left to report that
Factory = Callable[[], Environment]


@dataclass(frozen=True)
class Limits:
    """Of one environment: seconds of a call, bytes of memory beyond what it inherits, characters of an answer's messages."""

    timeout_s: float
    memory_bytes: int
    max_characters: int

    @property
    def max_line(self) -> int:
        """Bytes of one message. JSON writes a character in at most 12."""
        return 12 * self.max_characters + (1 << 16)


def run_session(make: Factory, limits: Limits, connection: socket.socket, output: int, parent: int) -> None:
    """Serve requests from `connection` until it closes, then exit. What is printed goes to the descriptor `output`."""
    code = 0
    try:
        os.setsid()
        die_with_parent(parent)
        adopt_orphans()
        be_killed_first()
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
        _limit_memory(limits.memory_bytes)
        Session(make, limits.max_characters).serve(connection)
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:  # noqa: BLE001 - the connection is lost: nobody could be told
        code = 1
    finally:
        os._exit(code)  # does not wait for threads that the environment has started


class Session:
    """One environment and its answers. `make` constructs it."""

    def __init__(self, make: Factory, max_characters: int) -> None:
        self._make = make
        self._max_characters = max_characters
        self._environment: Environment | None = None
        self._runner: asyncio.Runner | None = None

    def serve(self, connection: socket.socket) -> None:
        """Answer requests until the connection closes."""
        dumps = json.dumps  # the environment might replace them

        def send(message: dict[str, Any]) -> None:
            connection.sendall(dumps(message).encode() + b"\n")

        for line in connection.makefile("rb"):
            send(self.answer(json.loads(line), send))

    def answer(self, request: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """The answer to one request. Every exception of the environment becomes a status."""
        began = time.monotonic()
        try:
            step = self._step(request["step"]) if "step" in request else self._replay(request, send)
            answer = {"status": "ok", "step": step}
        except MemoryError as error:
            answer = {"status": "memory", "message": describe(error)}
        except FloodedError as error:
            answer = {"status": "flooded", "message": str(error)}
        except BaseException as error:  # noqa: BLE001 - also sys.exit() in an environment
            answer = {"status": "raised", "message": describe(error)}
        return {**answer, "seconds": time.monotonic() - began}

    def _replay(self, request: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Construct and reset the environment, and repeat its steps; the answer of the last call."""
        _seed(request["seed"])
        self._environment = self._make()
        messages = self._call(self._environment.reset(request["start"], request["seed"]))
        step = {"messages": plain_messages(messages, self._max_characters)}
        for number, completion in enumerate(request["completions"]):
            send({"progress": number})
            step = self._step(completion)
        return step

    def _step(self, completion: str) -> dict[str, Any]:
        assert self._environment is not None
        return plain_step(self._call(self._environment.step(completion)), self._max_characters)

    def _call(self, returned: Any) -> Any:
        """What a method returned, after it has run if it is a coroutine. All run in one event loop."""
        if not inspect.isawaitable(returned):
            return returned
        self._runner = self._runner or asyncio.Runner()

        async def run() -> Any:
            return await returned

        return self._runner.run(run())


def _seed(seed: int) -> None:
    """Python's and numpy's generators: two runs of one trajectory draw the same numbers."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % (1 << 32))


def _limit_memory(memory_bytes: int) -> None:
    """At most so many bytes more than are mapped now."""
    with contextlib.suppress(OSError, ValueError):  # not every platform has such a limit
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + memory_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
