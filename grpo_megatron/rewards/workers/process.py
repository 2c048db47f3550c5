"""The parent's side of one worker process: three non-blocking pipes, the items that are not answered yet, one clock."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from grpo_megatron.rewards.workers.family import MARK, end_family, new_mark

PACKAGE_ROOT = Path(__file__).resolve().parents[3]
STARTUP_TIMEOUT_S = 120.0  # for the interpreter to start, and for the import of a user's module
ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])|\r(?=\n)")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
MAX_REPLY = 1 << 20  # bytes of one line; a usual result has some hundred


class WorkerProcess:
    """The constructor starts the process. `pending` holds (item number, reward name), oldest first; the first is in work."""

    def __init__(self) -> None:
        paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._mark = new_mark()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", MARK: self._mark}
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "grpo_megatron.rewards.workers.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a process group, so that `kill` reaches what a reward has started
            bufsize=0,
        )
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self.stdin, self.stdout, self.stderr = self._process.stdin, self._process.stdout, self._process.stderr
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)
        self.ready = False
        self.loaded: set[str] = set()  # names of the rewards that it has imported
        self.pending: deque[tuple[int, str]] = deque()
        self.log_tail = ""
        self.problem = ""  # why a process that still runs must be killed
        self._clock = time.monotonic()
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._send({"sys_path": [os.path.abspath(entry) for entry in sys.path]})

    def submit(self, number: int, name: str, completion: str, answer: str, kwargs: dict[str, Any]) -> None:
        """Queue one item."""
        if not self.pending:
            self._clock = time.monotonic()
        self.pending.append((number, name))
        self._send({"id": number, "name": name, "completion": completion, "answer": answer, "kwargs": kwargs})

    def deadline(self, timeout_s: float) -> float:
        """The time (time.monotonic) at which its current start, import or item times out; infinity when it is idle."""
        if self.ready and not self.pending:
            return float("inf")
        loading = not self.ready or self.pending[0][1] not in self.loaded
        return self._clock + (STARTUP_TIMEOUT_S if loading else timeout_s)

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outgoing)

    def write(self) -> None:
        """Write as much as the pipe takes. If the process is dead, `read` notices it."""
        try:
            del self._outgoing[: os.write(self.stdin.fileno(), bytes(self._outgoing[: 1 << 16]))]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._outgoing.clear()

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """(results that have arrived, whether more can come). After bytes that are no result, no more can come."""
        alive = True
        with contextlib.suppress(BlockingIOError):
            while alive and len(self._incoming) <= MAX_REPLY:
                chunk = os.read(self.stdout.fileno(), 1 << 16)
                self._incoming += chunk
                alive = bool(chunk)
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = rest
        results: list[dict[str, Any]] = []
        try:
            for line in lines:
                self._accept(json.loads(line), results)
            if len(rest) > MAX_REPLY:
                raise ValueError("a line is too long")
        except (ValueError, RecursionError) as error:
            self.problem = f"something wrote to its reply pipe ({error})"
            self._incoming.clear()
            alive = False
        return results, alive

    def _accept(self, message: Any, results: list[dict[str, Any]]) -> None:
        if not isinstance(message, dict):
            raise ValueError("not an object")
        self._clock = time.monotonic()
        if "ready" in message:
            self.ready = True
        elif "loaded" in message:
            self.loaded.add(str(message["loaded"]))
        elif self.pending and message.get("id") == self.pending[0][0] and _is_result(message):
            self.pending.popleft()
            results.append(message)
        else:
            raise ValueError("not the expected result")

    def read_log(self) -> tuple[str, bool]:
        """(what the worker has printed, at most 64 KiB per call; whether more can come)."""
        try:
            chunk = os.read(self.stderr.fileno(), 1 << 16)
        except BlockingIOError:
            return "", True
        text = printable(chunk.decode(errors="replace"))
        self.log_tail = (self.log_tail + text)[-500:]
        return text, bool(chunk)

    def is_running(self) -> bool:
        # WNOWAIT: does not reap the process, so the system cannot give its group id to another one before `kill`
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def kill(self) -> str:
        """Send SIGKILL to all that it has started; returns how the process ended. The pipes stay readable until `close`."""
        if self._process.returncode is None:
            end_family(self._process.pid, self._mark)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"

    def close(self) -> None:
        """Close the pipes; to be called after `kill`."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            pipe.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._outgoing += json.dumps(message).encode() + b"\n"
        self.write()


def printable(text: str) -> str:
    """Without what a terminal would obey: escape sequences and control characters other than tab and newline."""
    return CONTROL.sub("", ESCAPE.sub("", text).replace("\r", "\n"))


def _is_result(message: dict[str, Any]) -> bool:
    if "error" in message:
        return isinstance(message["error"], str)
    steps, texts = message.get("steps"), message.get("texts")
    return (
        isinstance(message.get("reward"), float)
        and isinstance(message.get("metrics"), dict)
        and isinstance(texts, dict)
        and all(isinstance(text, str) for text in texts.values())
        and isinstance(steps, list)
        and all(isinstance(step, list) and list(map(type, step)) == [int, float] for step in steps)
    )
