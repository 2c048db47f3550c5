"""The parent's side of one worker: a child process with three non-blocking pipes. A message is one line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo_megatron.processes.family import MARK, adopt_orphans, die_with_parent, end_family, new_mark

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


# -- What every program of a worker does first: it ends with its parent, and keeps the pipes of the protocol to itself -

MAX_MESSAGE = 500  # characters of an exception's text


def begin() -> tuple[BufferedReader, BufferedWriter]:
    """(requests, replies): binary streams of JSON lines. The number of the parent is the program's only argument."""
    die_with_parent(int(sys.argv[1]))  # also while the user's code hangs in C and cannot notice the end of stdin
    adopt_orphans()
    return take_pipes()


def take_pipes() -> tuple[BufferedReader, BufferedWriter]:
    """Move the two pipes of the protocol to new file descriptors. Then stdin is empty, and prints go to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return requests, replies


def be_killed_first() -> None:
    """When memory runs out, the kernel kills this process rather than the parent."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def reply(replies: BufferedWriter, message: dict[str, Any]) -> None:
    """Write one message."""
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


def describe(error: BaseException) -> str:
    """Type and text of an exception, at most MAX_MESSAGE characters."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
    except Exception:  # noqa: BLE001 - an exception whose __str__ raises
        return type(error).__name__


# -- KeptProblem: calls of a pool of workers whose first failure is kept for a later, collective moment ----------------
# Only the leader of a rollout block has the pool. If it raised in the middle of a draw, the other ranks of its block would
# wait for it in the engine. So a problem is kept until all ranks can hear of it, and nothing is asked of the pool any more.

PoolType = TypeVar("PoolType")
T = TypeVar("T")


class KeptProblem(Generic[PoolType]):
    """`pool` None: this rank has none, and every call does nothing."""

    def __init__(self, pool: PoolType | None) -> None:
        self.pool = pool
        self.text: str | None = None  # of the first failure

    def attempt(self, call: Callable[[PoolType], T]) -> T | None:
        """`call(pool)`, or None without a pool and after the first RuntimeError."""
        if self.pool is None or self.text is not None:
            return None
        try:
            return call(self.pool)
        except RuntimeError as error:
            self.text = str(error)
            return None


# -- A limit on the processor time of Python code. It does not depend on how busy the machine is -----------------------


class _OutOfTime(BaseException):
    """Not an Exception: libraries such as sympy catch those in many places."""


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raises TimeoutError when the block takes more processor seconds; `what` begins the message.

    Works on the main thread only, by SIGVTALRM. On another thread, or inside another limit, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(*_: object) -> None:
        raise _OutOfTime

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.5)  # repeated, because an exception in a destructor is lost
    try:
        yield
    except _OutOfTime:
        raise TimeoutError(f"{what} took more than {seconds:g} s of processor time") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
