"""The parent's side of one worker: a child process with three non-blocking pipes. A message is one line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_megatron.workers.family import MARK, end_family, new_mark

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
MAX_FAILED_STARTS = 3  # of a pool's workers, in a row; then the pool raises RuntimeError
STARTUP_TIMEOUT_S = 120.0  # for the interpreter to start, and for the import of a user's module
ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])|\r(?=\n)")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class PipedProcess:
    """Runs `python -m MODULE PID_OF_THIS_PROCESS`; the constructor starts it. `max_message` is in bytes.

    `problem` says why a process that still runs must be killed; `log_tail` holds the end of what it has printed.
    """

    def __init__(self, module: str, max_message: int, variables: dict[str, str] | None = None) -> None:
        paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._mark = new_mark()
        own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", MARK: self._mark}
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | (variables or {}) | own,
            start_new_session=True,  # a process group, so that `kill` reaches what the worker has started
            bufsize=0,
        )
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self.stdin, self.stdout, self.stderr = self._process.stdin, self._process.stdout, self._process.stderr
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)
        self.log_tail = ""
        self.problem = ""
        self._max_message = max_message
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outgoing)

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message, and write as much of the queue as the pipe takes."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        self.write()

    def write(self) -> None:
        """Write as much as the pipe takes. If the process is dead, `receive` notices it."""
        try:
            del self._outgoing[: os.write(self.stdin.fileno(), bytes(self._outgoing[: 1 << 16]))]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._outgoing.clear()

    def receive(self, accept: Callable[[dict[str, Any]], None]) -> bool:
        """Give each message that has arrived to `accept`; returns whether more can come.

        After bytes that are no message, or one to which `accept` raises ValueError, no more can come.
        """
        alive = True
        with contextlib.suppress(BlockingIOError):
            while alive and len(self._incoming) <= self._max_message:
                chunk = os.read(self.stdout.fileno(), 1 << 16)
                self._incoming += chunk
                alive = bool(chunk)
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = rest
        try:
            for line in lines:
                message = json.loads(line)
                if not isinstance(message, dict):
                    raise ValueError("not an object")
                accept(message)
            if len(rest) > self._max_message:
                raise ValueError("a line is too long")
        except (ValueError, RecursionError) as error:
            self.problem = f"something wrote to its reply pipe ({error})"
            self._incoming.clear()
            alive = False
        return alive

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
        return describe_exit(self._process.wait())

    def close(self) -> None:
        """Close the pipes; to be called after `kill`."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            pipe.close()


def describe_exit(code: int) -> str:
    """How a process ended. `code` is negative for a signal, as in `subprocess`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def printable(text: str) -> str:
    """Without what a terminal would obey: escape sequences and control characters other than tab and newline."""
    return CONTROL.sub("", ESCAPE.sub("", text).replace("\r", "\n"))
