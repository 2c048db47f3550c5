"""ProcessPool: the user's code in processes that can be killed, named by keys. One that fails costs its own key only.

Hosts (host.py) are started with `subprocess`, never forked from a process with threads or CUDA. They read, write and
count time on their own, so the caller may come back late. They die with this process, and with the *thread* that made
the pool (PR_SET_PDEATHSIG); what a run that was killed as a whole has left ends when the next pool is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from grpo_megatron.processes.process import MARK, describe_exit, end_family, end_orphans, new_mark

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
MAX_FAILED_STARTS = 3  # of a pool's hosts, in a row; then the pool raises RuntimeError
STARTUP_TIMEOUT_S = 120.0  # for the interpreter to start, and for the import of a user's module
GRACE_S = 60.0  # beyond the longest time limit of a request, after which a silent host is lost
PIPE_CHUNK = 1 << 16  # bytes per system call

ProcessAnswer = dict[str, Any]
TimedRequest = tuple[dict[str, Any], float]  # body, seconds


@dataclass(frozen=True)
class Limits:
    """Bounds of one process. None: no bound.

    `max_line`: bytes of one answer. `max_output`: bytes that one request may print. `max_processes`: that run below it.
    `keeps_state`: a process that ends between two requests has failed; otherwise the next request gets a new one.
    """

    max_line: int
    max_output: int | None = None
    max_processes: int | None = None
    keeps_state: bool = False


class FloodedError(Exception):
    """An answer that is too large."""


# -- messages ----------------------------------------------------------------------------------------------------------


class JsonLines:
    """Messages over two file descriptors that never block, each one line of JSON, an object.

    `max_line`: bytes of one incoming line; None: the other side is trusted.
    """

    def __init__(self, incoming: int, outgoing: int, max_line: int | None = None) -> None:
        self._in, self._out, self._max_line = incoming, outgoing, max_line
        self._received, self._queued = bytearray(), bytearray()
        for descriptor in (incoming, outgoing):
            os.set_blocking(descriptor, False)

    @property
    def wants_to_write(self) -> bool:
        """Returns True while a part of the queue waits for the other side to read."""
        return bool(self._queued)

    def close(self) -> None:
        """Forgets the descriptors: their numbers may soon name other files."""
        self._in = self._out = -1

    def send(self, message: dict[str, Any]) -> None:
        """Queues a message, and writes as much of the queue as the other side takes."""
        self._queued += json.dumps(message).encode() + b"\n"
        self.write()

    def write(self) -> None:
        """Writes as much as the other side takes. If it is gone, `receive` notices it."""
        try:
            while self._queued:
                del self._queued[: os.write(self._out, self._queued[:PIPE_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self._queued.clear()

    def receive(self, accept: Callable[[dict[str, Any]], None]) -> str | None:
        """Gives each message that has arrived to `accept`. Returns None, or why no more can come; "" for a normal end.

        A line that is no object is the last one that is read.
        """
        end = None
        with contextlib.suppress(BlockingIOError):
            while end is None and (self._max_line is None or len(self._received) <= self._max_line):
                try:
                    chunk = os.read(self._in, PIPE_CHUNK)
                except ConnectionError:
                    chunk = b""
                self._received += chunk
                end = None if chunk else ""
        *lines, self._received = self._received.split(b"\n")
        try:
            for line in lines:
                message = json.loads(line)
                if not isinstance(message, dict):
                    raise ValueError("not an object")
                accept(message)
        except (ValueError, RecursionError) as error:
            return f"wrote to its connection what is no answer ({error})"
        if self._max_line is not None and len(self._received) > self._max_line:
            return f"wrote an answer of more than {self._max_line} bytes to its connection"
        return end


_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])|\r(?=\n)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Removes what a terminal would obey: escape sequences, control characters other than tab and newline."""
    return _CONTROL.sub("", _ESCAPE.sub("", text).replace("\r", "\n"))


# -- keys and hosts ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Record:
    """One key. `number` is its name in messages: a key may be used again after its end."""

    key: str
    number: int
    host: _HostLink
    pending: deque[TimedRequest] = field(default_factory=deque)  # not answered, in order
    num_sent: int = 0  # of `pending`
    replay: TimedRequest | None = None  # leads a new process to the state after all requests so far
    has_process: bool = False  # in its host
    failure: str = ""  # why its process is gone and is not replaced


class _HostLink:
    """The pool's side of one host; the constructor starts it.

    User code could kill its host. The keys with a request in work are `suspects` then: the new host gets them one after
    the other, and the one in work when that host dies, too, has killed both and gets the status "died".
    """

    def __init__(self, setup: dict[str, Any], variables: dict[str, str]) -> None:
        paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._mark = new_mark()
        local = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", MARK: self._mark}
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "grpo_megatron.processes.host", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | variables | local,
            start_new_session=True,  # a process group, so that `kill` reaches what the host has started
            bufsize=0,
        )
        assert self._process.stdin and self._process.stdout
        self.stdin, self.stdout = self._process.stdin, self._process.stdout
        with contextlib.suppress(OSError, AttributeError):  # else the rest of a burst would wait for the next `serve`
            fcntl.fcntl(self.stdin, fcntl.F_SETPIPE_SZ, 1 << 20)
        self.lines = JsonLines(self.stdout.fileno(), self.stdin.fileno(), 2 * setup["limits"]["max_line"])
        self.is_ready = False
        self.records: dict[int, _Record] = {}
        self.suspects: deque[_Record] = deque()
        self.silence = 0.0  # seconds for which the pool has listened to it in vain
        self._patience = 0.0  # the longest time limit of what is in work
        self.lines.send(setup)

    @property
    def is_lost(self) -> bool:
        """Returns True after too long a silence."""
        is_busy = any(record.num_sent for record in self.records.values())
        if self.is_ready and not is_busy:
            self.silence = self._patience = 0.0
        return self.silence > (self._patience + GRACE_S if self.is_ready else STARTUP_TIMEOUT_S)

    def send(self, record: _Record) -> None:
        """Sends the requests of a record that are not sent; while suspects are tried, only those of the first suspect."""
        if self.suspects and record is not self.suspects[0]:
            if record not in self.suspects:
                self.suspects.append(record)
            return
        if record.replay and not record.has_process:
            record.pending = deque([record.replay])
        record.has_process = True
        for body, seconds in itertools.islice(record.pending, record.num_sent, None):
            self._patience = max(self._patience, seconds)
            self.lines.send({"key": record.number, "request": body, "timeout_s": seconds})
        record.num_sent = len(record.pending)

    def try_next(self) -> None:
        """Goes on with the next suspect once the one in work has been answered or has ended."""
        while self.suspects and not (self.suspects[0].number in self.records and self.suspects[0].pending):
            self.suspects.popleft()
            if self.suspects:
                self.send(self.suspects[0])

    def kill(self) -> str:
        """Sends SIGKILL to it and to all that it has started, and closes the pipes; returns how it ended."""
        if self._process.returncode is None:
            end_family(self._process.pid, self._mark)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        ending = describe_exit(self._process.wait())
        self.lines.close()
        self.stdin.close()
        self.stdout.close()
        return ending


class ProcessPool:
    """Processes that serve `program(settings)`; see host.py. Use it from one thread, and close it.

    `kind` and `key` name the code and the settings' config key in messages. `answer(key, answer)` is called, within
    `serve`, with each answer: status, "value" or "message" and "output" (the last line printed, in brackets), seconds.
    `num_hosts` share the keys. Raises ValueError for settings that are no JSON. Any method raises RuntimeError when
    hosts cannot start or load the program.
    """

    def __init__(
        self,
        kind: str,
        key: str,
        program: str,
        settings: dict[str, Any],
        limits: Limits,
        answer: Callable[[str, ProcessAnswer], None],
        num_hosts: int = 1,
        variables: dict[str, str] | None = None,
    ) -> None:
        self._kind, self._answer, self._variables = kind, answer, variables or {}
        paths = [os.path.abspath(entry) for entry in sys.path]
        setup = {"kind": kind, "sys_path": paths, "program": program, "settings": settings, "limits": vars(limits)}
        try:
            json.dumps(settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key} cannot be passed to the workers as JSON: {error}") from None
        end_orphans()
        self._setup = setup
        self._records: dict[str, _Record] = {}
        self._numbers = itertools.count()
        self._failed_starts = 0
        self._hosts = [_HostLink(setup, self._variables) for _ in range(num_hosts)]

    def close(self) -> None:
        """Kills all processes. Idempotent."""
        for host in self._hosts:
            host.kill()
        self._hosts, self._records = [], {}

    def submit(self, key: str, body: dict[str, Any], timeout_s: float, replay: TimedRequest | None = None) -> None:
        """Queues a request to the process called `key`, which is started if there is none. Returns at once.

        `replay`: what leads a new process to the state after this request, for processes that keep a state.
        """
        assert self._hosts, "the pool is closed"
        if key not in self._records:
            host = min(self._hosts, key=lambda host: len(host.records))
            record = self._records[key] = _Record(key, next(self._numbers), host)
            host.records[record.number] = record
        record = self._records[key]
        record.pending.append((body, timeout_s))
        record.replay = replay
        if record.failure:
            self._fail(record)
        else:
            record.host.send(record)

    def end(self, key: str) -> None:
        """Forgets a key, whatever its state, and kills its process. An unknown key is ignored."""
        if record := self._records.pop(key, None):
            del record.host.records[record.number]
            record.host.lines.send({"end": record.number})
            record.host.try_next()

    def serve(self, *, block: bool) -> None:
        """Passes messages on. `block`: waits until something has arrived, but not for long."""
        if not self._hosts:
            raise RuntimeError(f"the pool of {self._kind} workers is closed")
        with selectors.DefaultSelector() as selector:
            for host in self._hosts:
                selector.register(host.stdout, selectors.EVENT_READ, host)
                if host.lines.wants_to_write:
                    selector.register(host.stdin, selectors.EVENT_WRITE, host)
            began = time.monotonic()
            events = selector.select(1.0 if block else 0)
            waited = time.monotonic() - began
        for key, _ in events:
            host = key.data
            if host not in self._hosts:
                continue  # an earlier event of this loop has replaced it
            if key.fileobj is host.stdin:
                host.lines.write()
            elif (end := host.lines.receive(lambda message, host=host: self._accept(host, message))) is not None:
                self._replace(host, end)
        for host in list(self._hosts):
            host.silence += waited
            if host.is_lost:
                self._replace(host, "it does not answer")

    def _accept(self, host: _HostLink, message: dict[str, Any]) -> None:
        host.silence = 0.0
        if "error" in message:
            raise RuntimeError(f"the {self._kind} cannot be loaded: {message['error']}")
        if "ready" in message:
            host.is_ready, self._failed_starts = True, 0
            return
        record = host.records.get(message["key"])
        if record and record.num_sent:  # it has not ended
            record.pending.popleft()
            record.num_sent -= 1
            host.try_next()
            self._answer(record.key, message["answer"])

    def _replace(self, host: _HostLink, problem: str) -> None:
        """Gives the keys of a lost host to a new one."""
        ended = host.kill()
        ending = problem or ended
        if not host.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                self._hosts.remove(host)
                raise RuntimeError(f"{self._kind} workers do not start: {ending}")
        new = _HostLink(self._setup, self._variables)
        self._hosts[self._hosts.index(host)] = new
        new.records = host.records
        culprit = host.suspects[0] if host.suspects and host.is_ready else None
        for record in new.records.values():
            record.host, record.has_process, record.num_sent = new, False, 0
        new.suspects = deque(r for r in new.records.values() if r.pending and r is not culprit)
        if new.suspects:
            new.send(new.suspects[0])
        if culprit:
            culprit.failure = f"has ended its worker twice while it was in execution: {ending}"
            self._fail(culprit)

    def _fail(self, record: _Record) -> None:
        answer = {"status": "died", "message": record.failure, "output": "", "seconds": 0.0, "is_final": True}
        num_requests = len(record.pending)
        record.pending.clear()
        for _ in range(num_requests):
            self._answer(record.key, answer)


class PoolClient:
    """The owner of a ProcessPool, `_processes`. Use it in a `with` block, or call `close`."""

    _processes: ProcessPool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the processes. Idempotent."""
        self._processes.close()


# -- failures that all ranks must hear of ------------------------------------------------------------------------------

PoolType = TypeVar("PoolType")
T = TypeVar("T")


class FirstFailure(Generic[PoolType]):
    """Calls of a pool; the first failure is kept for a later, collective moment.

    Only the leader of an engine replica has the pool. If it raised in the middle of a generation, the other ranks of
    its replica would wait for it in the engine. After a failure nothing is asked of the pool any more. `pool` None:
    this rank has none, and every call does nothing.
    """

    def __init__(self, pool: PoolType | None) -> None:
        self.pool = pool
        self.text: str | None = None  # of the first failure

    def attempt(self, call: Callable[[PoolType], T]) -> T | None:
        """Returns `call(pool)`, or None without a pool and after the first RuntimeError."""
        if self.pool is None or self.text is not None:
            return None
        try:
            return call(self.pool)
        except RuntimeError as error:
            self.text = str(error)
            return None
