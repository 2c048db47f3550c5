"""ProcessPool: the user's code in processes that can be killed, named by keys. One that fails costs its own key only.

The pool starts hosts (host.py) with `subprocess`: they are never forked from a process with threads or CUDA, and they do not
import `__main__`. A host forks one process per key, counts its time and ends it where it breaks a limit. The caller may
come back late: hosts read, write and count time on their own. Hosts die with this process, and with the *thread* that made
the pool (PR_SET_PDEATHSIG). What a process has started ends with it (family.py), or, after a run that was killed as a whole,
when the next pool is made.

User code could still kill its host. Then all keys of that host go to a new one, one after the other: the key in execution
when a host dies for the second time has killed it, and gets the status "died".
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo_megatron.processes.family import MARK, end_family, end_orphans, new_mark
from grpo_megatron.processes.host import GuestAnswer, Limits
from grpo_megatron.processes.process import PIPE_CHUNK, JsonLines, describe_exit, last_line, printable

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
MAX_FAILED_STARTS = 3  # of a pool's hosts, in a row; then the pool raises RuntimeError
STARTUP_TIMEOUT_S = 120.0  # for the interpreter to start, and for the import of a user's module
GRACE_S = 60.0  # beyond the longest time limit of a request, after which a silent host is lost
MAX_CONSOLE = 1 << 16  # characters of the processes' output that a pool prints, until `show_again`

TimedRequest = tuple[dict[str, Any], float]  # body, seconds


@dataclass(eq=False)
class Record:
    """One key. `number` is its name in messages: a key may be used again after its end."""

    key: str
    number: int
    host: HostLink
    pending: deque[TimedRequest] = field(default_factory=deque)  # not answered, in order
    num_sent: int = 0  # of `pending`
    replay: TimedRequest | None = None  # leads a new process to the state after all requests so far
    is_silent: bool = False  # the first of `pending` is a replay that nobody waits for
    is_lost: bool = False  # with its host, and not yet sent to the new one
    failure: str = ""  # why its process is gone and is not replayed


class HostLink:
    """The pool's side of one host; the constructor starts it. In one that replaces a lost one, `recover` comes first."""

    def __init__(self, setup: dict[str, Any], variables: dict[str, str]) -> None:
        paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._mark = new_mark()
        own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", MARK: self._mark}
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "grpo_megatron.processes.host", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | variables | own,
            start_new_session=True,  # a process group, so that `kill` reaches what the host has started
            bufsize=0,
        )
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self.stdin, self.stdout, self.stderr = self._process.stdin, self._process.stdout, self._process.stderr
        os.set_blocking(self.stderr.fileno(), False)
        with contextlib.suppress(
            OSError, AttributeError
        ):  # else the rest of a burst would wait for the pool's next call
            fcntl.fcntl(self.stdin, fcntl.F_SETPIPE_SZ, 1 << 20)
        self.lines = JsonLines(self.stdout.fileno(), self.stdin.fileno(), 2 * setup["limits"]["max_line"])
        self.is_ready = False
        self.records: dict[int, Record] = {}
        self.tail = b""  # of what it has printed
        self._in_work: set[int] = set()  # numbers of records with a request that was sent and is not answered
        self._recovering: deque[Record] = deque()  # sent one at a time
        self._is_recovering = False
        self._patience = 0.0  # the longest time limit of what is in work
        self._clock = time.monotonic()
        self.lines.send(setup)

    def submit(self, record: Record, request: TimedRequest) -> None:
        """Send a request, or queue it while keys are replayed."""
        record.pending.append(request)
        if not self._is_recovering:
            self._send(record)
        elif record not in self._recovering:
            self._recovering.append(record)

    def recover(self, records: Iterable[Record]) -> None:
        """Take the records of a lost host, one by one, so that one that kills this host too is known."""
        self._is_recovering = True
        for record in records:
            record.host, record.is_lost, record.num_sent = self, True, 0
            self.records[record.number] = record
            if not record.failure and (record.pending or record.replay):
                self._recovering.append(record)
        self._next()

    def answered(self, number: int) -> Record | None:
        """The record whose first request has been answered. None: it has ended, or nobody waits for the answer."""
        record = self.records.get(number)
        if record is None or not record.num_sent:
            return None
        record.pending.popleft()
        record.num_sent -= 1
        is_silent, record.is_silent = record.is_silent, False
        if not record.num_sent:
            self._in_work.discard(number)
        if self._is_recovering:
            self._next()
        return None if is_silent else record

    def forget(self, record: Record) -> None:
        """End it in the host. An answer that is under way is dropped."""
        del self.records[record.number]
        self._in_work.discard(record.number)
        self.lines.send({"end": [record.number]})
        if self._is_recovering:
            self._next()

    def culprit(self) -> Record | None:
        """The record that was alone in execution while others waited for it."""
        is_known = self.is_ready and self._is_recovering and self._in_work
        return self.records[next(iter(self._in_work))] if is_known else None

    def heard(self) -> None:
        """A message has arrived."""
        self._clock = time.monotonic()

    def excuse(self, seconds: float) -> None:
        """Time in which the pool did not listen does not count as silence."""
        self._clock += seconds

    def deadline(self) -> float:
        """The time (time.monotonic) after which a silent host is lost; infinity when nothing is expected of it."""
        if self.is_ready and not self._in_work:
            return float("inf")
        return self._clock + (self._patience + GRACE_S if self.is_ready else STARTUP_TIMEOUT_S)

    def read_log(self) -> tuple[str, bool]:
        """(what has been printed, at most 64 KiB per call; whether more can come)."""
        try:
            chunk = os.read(self.stderr.fileno(), PIPE_CHUNK)
        except BlockingIOError:
            return "", True
        self.tail = (self.tail + chunk)[-1000:]
        return printable(chunk.decode(errors="replace")), bool(chunk)

    def kill(self) -> str:
        """Send SIGKILL to it and to all that it has started, and close the pipes; returns how it ended."""
        if self._process.returncode is None:
            end_family(self._process.pid, self._mark)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        ending = describe_exit(self._process.wait())
        self.lines.close()
        for pipe in (self.stdin, self.stdout, self.stderr):
            pipe.close()
        return ending

    def _next(self) -> None:
        while self._recovering and not self._in_work:
            record = self._recovering.popleft()
            if record.number not in self.records:
                continue
            if record.is_lost and record.replay:
                record.is_silent = len(record.pending) == record.is_silent  # nobody waits for it
                record.pending = deque([record.replay])
            record.is_lost = False
            self._send(record)
        if not self._recovering and not self._in_work:
            self._is_recovering = False

    def _send(self, record: Record) -> None:
        """Send the requests of a record that are not sent."""
        if not self._in_work:
            self._clock, self._patience = time.monotonic(), 0.0
        self._in_work.add(record.number)
        for body, seconds in list(record.pending)[record.num_sent :]:
            self._patience = max(self._patience, seconds)
            self.lines.send({"key": record.number, "request": body, "timeout_s": seconds})
        record.num_sent = len(record.pending)


class ProcessPool:
    """Processes that serve `program(settings)`; see host.py. Use it from one thread, and `close` it.

    `kind` names the code in messages ("reward"). `answer(key, answer)` is called, within `serve`, with each answer: status,
    "value" or "message" and "output" (the last line printed, in brackets), seconds. `num_hosts` share the keys. Raises
    ValueError for settings that are no JSON. Any method raises RuntimeError when hosts cannot start or load the program.
    """

    def __init__(
        self,
        kind: str,
        program: str,
        settings: dict[str, Any],
        limits: Limits,
        answer: Callable[[str, GuestAnswer], None],
        num_hosts: int = 1,
        variables: dict[str, str] | None = None,
    ) -> None:
        self._kind, self._answer, self._variables = kind, answer, variables or {}
        paths = [os.path.abspath(entry) for entry in sys.path]
        self._setup = {
            "sys_path": paths,
            "program": program,
            "settings": settings,
            "limits": dataclasses.asdict(limits),
        }
        try:
            json.dumps(self._setup)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cannot be passed to the workers as JSON: {error}") from None
        end_orphans()
        self._records: dict[str, Record] = {}
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._shown = 0
        self._served_at = time.monotonic()
        self._hosts = [self._new_host() for _ in range(num_hosts)]

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def close(self) -> None:
        """Kill all processes. Idempotent."""
        for host in self._hosts:
            self._discard(host)
        self._hosts, self._records = [], {}
        self._selector.close()

    def submit(self, key: str, body: dict[str, Any], timeout_s: float, replay: TimedRequest | None = None) -> None:
        """Queue a request to the process called `key`, which is started if there is none. Returns at once.

        `replay`: what leads a new process to the state after this request, for processes that keep a state.
        """
        record = self._records.get(key) or self._add(key)
        record.replay = replay
        if record.failure:
            self._answer(key, _died(record))
        else:
            record.host.submit(record, (body, timeout_s))

    def end(self, keys: Iterable[str]) -> None:
        """Forget these keys, whatever their state, and kill their processes. Unknown keys are ignored."""
        for key in keys:
            if record := self._records.pop(key, None):
                record.host.forget(record)

    def show_again(self) -> None:
        """Print MAX_CONSOLE further characters of what processes print."""
        self._shown = 0

    def serve(self, *, block: bool) -> None:
        """Pass messages on. `block`: wait until something has arrived, or a host has been silent for too long."""
        if not self._hosts:
            raise RuntimeError(f"the pool of {self._kind} workers is closed")
        for host in self._hosts:
            host.excuse(time.monotonic() - self._served_at)
            self._watch(host.stdin, selectors.EVENT_WRITE if host.lines.wants_to_write else 0, host)
        patience = min(host.deadline() for host in self._hosts) - time.monotonic()
        for key, _ in self._selector.select(min(max(patience, 0.0), 60.0) if block else 0):
            host = key.data
            if host not in self._hosts:
                continue  # an earlier event of this loop has replaced it
            if key.fileobj is host.stdin:
                host.lines.write()
            elif key.fileobj is host.stderr:
                self._show(host)
            elif (end := host.lines.receive(lambda message, host=host: self._accept(host, message))) is not None:
                self._replace(host, end)
        now = time.monotonic()
        for host in [host for host in self._hosts if host.deadline() <= now]:
            self._replace(host, "it does not answer")
        self._served_at = now

    # -- hosts ---------------------------------------------------------------------------------------------------------

    def _add(self, key: str) -> Record:
        """In the host that has the fewest."""
        assert self._hosts, "the pool is closed"
        host = min(self._hosts, key=lambda host: len(host.records))
        record = self._records[key] = Record(key, next(self._numbers), host)
        host.records[record.number] = record
        return record

    def _new_host(self) -> HostLink:
        host = HostLink(self._setup, self._variables)
        for pipe in (host.stdout, host.stderr):
            self._watch(pipe, selectors.EVENT_READ, host)
        return host

    def _discard(self, host: HostLink) -> str:
        for pipe in (host.stdin, host.stdout, host.stderr):
            self._watch(pipe, 0, host)
        return host.kill()

    def _watch(self, pipe: Any, events: int, host: HostLink) -> None:
        is_watched = pipe in self._selector.get_map()
        if events and not is_watched:
            self._selector.register(pipe, events, host)
        elif is_watched and not events:
            self._selector.unregister(pipe)

    def _accept(self, host: HostLink, message: dict[str, Any]) -> None:
        host.heard()
        if "error" in message:
            raise RuntimeError(f"the {self._kind} cannot be loaded: {message['error']}")
        if "ready" in message:
            host.is_ready, self._failed_starts = True, 0
        elif record := host.answered(message["key"]):
            self._answer(record.key, message["answer"])

    def _replace(self, host: HostLink, problem: str) -> None:
        """Give the keys of a host that is lost to a new one."""
        self._show(host)
        ending = self._discard(host)
        ending = (problem or ending) + last_line(host.tail)
        if not host.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                self._hosts.remove(host)
                raise RuntimeError(f"{self._kind} workers do not start: {ending}")
        culprit = host.culprit()
        new = self._new_host()
        self._hosts[self._hosts.index(host)] = new
        unanswered = 0
        if culprit:
            culprit.failure = f"has ended its worker twice while it was in execution: {ending}"
            unanswered = len(culprit.pending) - culprit.is_silent
            culprit.pending.clear()
        new.recover(host.records.values())
        for _ in range(unanswered):
            assert culprit
            self._answer(culprit.key, _died(culprit))

    def _show(self, host: HostLink) -> None:
        """Print what processes print, up to MAX_CONSOLE characters."""
        text, more = host.read_log()
        if not more:
            self._watch(host.stderr, 0, host)
        if text and self._shown < MAX_CONSOLE:
            sys.stderr.write(text[: MAX_CONSOLE - self._shown])
            self._shown += len(text)
            if self._shown >= MAX_CONSOLE:
                sys.stderr.write(f"\n[further output of {self._kind} workers is not shown]\n")


def _died(record: Record) -> GuestAnswer:
    return {"status": "died", "message": record.failure, "output": "", "seconds": 0.0}


# -- failures that all ranks must hear of ------------------------------------------------------------------------------

PoolType = TypeVar("PoolType")
T = TypeVar("T")


class KeptProblem(Generic[PoolType]):
    """Calls of a pool whose first failure is kept for a later, collective moment.

    Only the leader of a rollout block has the pool. If it raised in the middle of a draw, the other ranks of its block
    would wait for it in the engine. So a problem is kept until all ranks can hear of it, and nothing is asked of the pool
    any more. `pool` None: this rank has none, and every call does nothing.
    """

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
