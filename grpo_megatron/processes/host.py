"""The program of a host: forks one process per key, passes messages on, and ends the processes that break a limit.

`ProcessPool` starts it as `python -m grpo_megatron.processes.host PARENT_PID`; it is not meant to be run by hand. It calls
`program(settings)` once, for what all processes share (imports, an index), and runs nothing else of the user's, so that it
can neither hang nor die with the user's code. `program` returns a function that each new process calls to get its own
function from request to value. A process per key keeps keys apart: a hang in C, an exit, a changed working directory, a
patched module or a seeded generator concerns its own. Memory is shared, and copied by the kernel where it is written to.

    <- {"sys_path": [...], "program": "module:function", "settings": {...}, "limits": {...}}
                                                     -> {"ready": true} or {"error": "ValueError: ..."}
    <- {"key": KEY, "request": {...}, "timeout_s": 9.5}
                                                     -> {"key": KEY, "answer": {"status": "ok", "value": ..., "seconds": 0.1}}
                                       or {..., "answer": {"status": "died", "message": "...", "output": "", "seconds": 0.1}}
    <- {"end": [KEY, ...]}

Status: ok, raised, memory, flooded (reported by the process), timeout, died, flooded (seen from here). Requests of a key are
answered in order. A key whose process has failed answers the same failure until its end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_megatron.importing import import_function
from grpo_megatron.processes.family import adopt_orphans, count_below, die_with_parent, end_adopted, end_tree
from grpo_megatron.processes.process import PIPE_CHUNK, FloodedError, JsonLines, describe, describe_exit, last_line

MAX_RUNNING = 64  # requests in execution at a time; the others wait, and their time does not run
CHECK_S = 1.0  # seconds between counts of the processes that processes have started
LAST_MOMENT_MS = 1000  # between the closing of a process's connection and its end
OUT_OF_MEMORY = 77  # exit code of a process that has no memory left to report that
STATUSES = ("ok", "raised", "memory", "flooded")  # that a process reports itself

GuestAnswer = dict[str, Any]
Serve = Callable[[dict[str, Any]], Any]  # request -> value, both JSON
OpenSession = Callable[[], Serve]  # called in each new process


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


class Guest:
    """One key's process, once it is forked, and its requests.

    `deadline` is None while nothing is in execution. `failure` is the answer to all requests after a failed one.
    """

    def __init__(self, key: Any) -> None:
        self.key = key
        self.requests: deque[tuple[dict[str, Any], float]] = (
            deque()
        )  # (request, seconds); the first may be in execution
        self.deadline: float | None = None
        self.failure: GuestAnswer | None = None
        self.pid: int | None = None
        self.connection: socket.socket
        self.lines: JsonLines
        self.output = -1
        self.output_ended = False
        self.printed = 0  # bytes, by the request in execution
        self._began = 0.0
        self._tail = b""

    def attach(self, pid: int, connection: socket.socket, output: int, max_line: int) -> None:
        """Give it a process; `connection` and `output` are the host's ends."""
        self.pid, self.connection, self.output, self.output_ended = pid, connection, output, False
        self.lines = JsonLines(connection.fileno(), connection.fileno(), max_line)
        os.set_blocking(output, False)

    def begin(self) -> None:
        """Send the oldest request to the process."""
        request, seconds = self.requests[0]
        self._began = time.monotonic()
        self.deadline, self.printed = self._began + seconds, 0
        self.lines.send(request)

    def read_output(self, limit: int | None) -> bytes:
        """What it has printed since the last call; stops reading soon after `limit` bytes of one request."""
        text = bytearray()
        with contextlib.suppress(OSError):  # BlockingIOError: no more at the moment
            while not self.output_ended and len(text) <= (limit or 16 * PIPE_CHUNK):
                chunk = os.read(self.output, PIPE_CHUNK)
                text += chunk
                self.output_ended = not chunk
        self.printed += len(text)
        self._tail = (self._tail + text)[-1000:]
        return bytes(text)

    def failed(self, status: str, message: str) -> GuestAnswer:
        """The answer that says so."""
        seconds = time.monotonic() - self._began if self.deadline is not None else 0.0
        return {"status": status, "message": message, "output": last_line(self._tail), "seconds": seconds}

    def close(self) -> None:
        """Kill the process, if there is one, with everything below it."""
        if self.pid is not None:
            end_tree(self.pid)
        self.forget()

    def forget(self) -> None:
        """Close the connection to a process that has ended."""
        if self.output >= 0:
            self.lines.close()
            self.connection.close()
            os.close(self.output)
        self.pid, self.output, self.deadline = None, -1, None


class Host:
    """The loop of the program. `requests` and `replies` are the descriptors of the pool's pipes."""

    def __init__(self, open_session: OpenSession, limits: Limits, requests: int, replies: int) -> None:
        self._open_session, self._limits = open_session, limits
        self._pipes = (requests, replies)
        self._lines = JsonLines(requests, replies)
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._signalled = os.pipe()  # written to at every SIGCHLD
        self._guests: dict[Any, Guest] = {}  # by key
        self._waiting: deque[Guest] = deque()  # with a request that is not in execution
        self._running: set[Guest] = set()  # with a request in execution
        self._next_count = 0.0
        self._has_lost = False  # a child, since `_reap`

    def serve(self) -> None:
        """Serve until the pool closes its pipe; then kill all."""
        for descriptor in (self._wakeup, self._signalled, 2):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        requests, replies = self._pipes
        self._watch(requests, selectors.EVENT_READ)
        self._watch(self._wakeup, selectors.EVENT_READ)
        end = None
        while end is None:
            for key, events in self._selector.select(self._patience()):
                if key.data is not None:
                    self._serve_guest(key.data, key.fileobj, events)
                elif key.fd == requests:
                    end = self._lines.receive(self._accept)
                elif key.fd == self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup, PIPE_CHUNK)
                        self._has_lost = True
            if self._has_lost:
                self._has_lost = False
                self._reap()
            self._check_limits()
            self._begin_waiting()
            self._lines.write()
            self._watch(replies, selectors.EVENT_WRITE if self._lines.wants_to_write else 0)
        for key in list(self._guests):
            self._remove(key)

    # -- requests and answers ------------------------------------------------------------------------------------------

    def _accept(self, message: dict[str, Any]) -> None:
        for key in message.get("end", ()):
            self._remove(key)
        if "key" not in message:
            return
        guest = self._guests.setdefault(message["key"], Guest(message["key"]))
        if guest.failure:
            self._report(guest, guest.failure)
            return
        guest.requests.append((message["request"], message["timeout_s"]))
        if len(guest.requests) == 1:
            self._waiting.append(guest)

    def _report(self, guest: Guest, answer: GuestAnswer) -> None:
        self._lines.send({"key": guest.key, "answer": answer})

    def _remove(self, key: Any) -> None:
        if guest := self._guests.pop(key, None):
            self._stop(guest)

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._running) < MAX_RUNNING:
            guest = self._waiting.popleft()
            if guest.pid is None:
                self._fork(guest)
            self._running.add(guest)
            guest.begin()
            self._watch_connection(guest)

    def _serve_guest(self, guest: Guest, source: Any, events: int) -> None:
        if guest.pid is None:
            return  # an earlier event of this round has ended it
        if source is guest.connection and events & selectors.EVENT_WRITE:
            guest.lines.write()
        self._read_output(guest)
        if guest.pid is not None and source is guest.connection and events & selectors.EVENT_READ:
            self._read_answers(guest)
        if guest.pid is not None:
            self._watch_connection(guest)

    def _read_output(self, guest: Guest) -> None:
        limit = self._limits.max_output
        text = guest.read_output(limit)
        with contextlib.suppress(OSError):
            os.write(2, text)  # to the pool; what it does not read in time is lost
        if limit is not None and guest.printed > limit:
            self._fail(guest, "flooded", f"it has printed more than {limit} bytes in one call")
        elif guest.output_ended:
            self._watch(guest.output, 0)

    def _read_answers(self, guest: Guest) -> None:
        answers: list[GuestAnswer] = []
        end = guest.lines.receive(lambda message: answers.append(_checked(message)))
        self._read_output(guest)  # what was printed before an answer counts before it: a flood has one outcome
        for answer in answers:
            if guest.pid is None:
                return
            if guest.deadline is None:
                end = end or "has answered without a request"
            elif answer["status"] == "ok":
                self._report(guest, answer)
                self._finish(guest)
            else:
                self._fail(guest, answer["status"], str(answer.get("message", "")))
        if end is not None and guest.pid is not None:
            self._lose(guest, end or "has closed its connection to its worker")

    def _finish(self, guest: Guest) -> None:
        """The request in execution has been answered."""
        guest.requests.popleft()
        guest.deadline = None
        self._running.remove(guest)
        if guest.requests:
            self._waiting.append(guest)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _fork(self, guest: Guest) -> None:
        own, other = socket.socketpair()
        output, printed = os.pipe()
        host = os.getpid()
        pid = os.fork()
        if not pid:
            try:
                own.close()
                os.close(output)
                self._forget_all()
                run_guest(self._open_session, other, printed, host)
            finally:
                os._exit(1)
        other.close()
        os.close(printed)
        guest.attach(pid, own, output, self._limits.max_line)
        self._watch(output, selectors.EVENT_READ, guest)

    def _forget_all(self) -> None:
        """In a new process: close what belongs to the host and to other processes."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for descriptor in (*self._pipes, self._wakeup, self._signalled):
            os.close(descriptor)
        for guest in self._guests.values():
            guest.pid = None
            guest.forget()

    def _reap(self) -> None:
        """Notice processes that have ended, also if something that they have started holds their connection open."""
        while ended := _ended_child():
            guest = next((guest for guest in self._guests.values() if guest.pid == ended), None)
            if guest:
                self._read_answers(guest)  # one may have arrived before
            if guest and guest.pid:
                self._lose(guest, "")
            elif not guest:
                os.waitpid(ended, 0)
        # what an ended process has left is now a child of this one
        end_adopted({guest.pid for guest in self._guests.values() if guest.pid})

    def _lose(self, guest: Guest, end: str) -> None:
        """The process has ended, or has closed its connection, which also happens a moment before its end."""
        assert guest.pid
        status, message = "died", end
        descriptor = os.pidfd_open(guest.pid)
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(descriptor, select.POLLIN)
        if poll.poll(LAST_MOMENT_MS):
            code = os.waitstatus_to_exitcode(os.waitpid(guest.pid, 0)[1])
            guest.pid, self._has_lost = None, True
            message = f"has ended: {describe_exit(code)}"
            if code == OUT_OF_MEMORY:
                status, message = "memory", "MemoryError"
        os.close(descriptor)
        if guest.deadline is not None or self._limits.keeps_state:
            self._fail(guest, status, message)
        else:
            self._drop_process(guest)  # the next request gets a new one

    def _fail(self, guest: Guest, status: str, message: str) -> None:
        """Kill the process and answer all requests, also later ones, with its status."""
        guest.failure = guest.failed(status, message)
        self._stop(guest)
        for _ in guest.requests:
            self._report(guest, guest.failure)
        guest.requests.clear()

    def _stop(self, guest: Guest) -> None:
        """Kill the process, if there is one. Its requests wait no more."""
        if guest in self._running:
            self._running.remove(guest)
        elif guest.requests:
            self._waiting.remove(guest)
        self._drop_process(guest)

    def _drop_process(self, guest: Guest) -> None:
        if guest.output >= 0:
            self._watch(guest.connection, 0)
            self._watch(guest.output, 0)
        guest.close()

    # -- limits --------------------------------------------------------------------------------------------------------

    def _patience(self) -> float | None:
        """Seconds until the next deadline or count of processes. None: there is nothing to wait for."""
        times = [guest.deadline for guest in self._running if guest.deadline is not None]
        if self._guests and self._limits.max_processes is not None:
            times.append(self._next_count)
        return max(min(times) - time.monotonic(), 0) if times else None

    def _check_limits(self) -> None:
        now = time.monotonic()
        for guest in [guest for guest in self._running if guest.deadline is not None and guest.deadline <= now]:
            self._fail(guest, "timeout", f"no answer after {guest.requests[0][1]:g} s")
        limit = self._limits.max_processes
        if limit is not None and now >= self._next_count:
            self._next_count = now + CHECK_S
            for guest in [guest for guest in self._guests.values() if guest.pid]:
                assert guest.pid
                if (count := count_below(guest.pid)) > limit:
                    self._fail(guest, "flooded", f"it runs {count} processes; at most {limit}")

    def _watch(self, source: Any, events: int, guest: Guest | None = None) -> None:
        known = source in self._selector.get_map()
        if events and known and self._selector.get_key(source).events == events:
            return
        if events and known:
            self._selector.modify(source, events, guest)
        elif events:
            self._selector.register(source, events, guest)
        elif known:
            self._selector.unregister(source)

    def _watch_connection(self, guest: Guest) -> None:
        writes = selectors.EVENT_WRITE if guest.lines.wants_to_write else 0
        self._watch(guest.connection, selectors.EVENT_READ | writes, guest)


def _checked(message: dict[str, Any]) -> GuestAnswer:
    if message.get("status") not in STATUSES or not isinstance(message.get("seconds"), float):
        raise ValueError("not an answer")
    return message


def _ended_child() -> int | None:
    """The number of a child that has ended and has not been waited for."""
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended.si_pid if ended else None
    return None


# -- a forked process --------------------------------------------------------------------------------------------------


def run_guest(open_session: OpenSession, connection: socket.socket, output: int, parent: int) -> None:
    """Serve requests from `connection` until it closes, then exit. What is printed goes to the descriptor `output`."""
    code = 0
    try:
        os.setsid()
        die_with_parent(parent)  # also while the user's code hangs in C and cannot notice the end of the connection
        adopt_orphans()
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # when memory runs out, the kernel kills this process rather than the run
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
        dumps = json.dumps  # the user's code might replace it
        serve = open_session()
        for line in connection.makefile("rb"):
            connection.sendall(dumps(_answer(serve, json.loads(line))).encode() + b"\n")
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:  # noqa: BLE001 - the connection is lost: nobody could be told
        code = 1
    finally:
        os._exit(code)  # does not wait for threads of the user


def _answer(serve: Serve, request: dict[str, Any]) -> GuestAnswer:
    """The answer to one request. Every exception of the user's code becomes a status."""
    began = time.monotonic()
    try:
        answer = {"status": "ok", "value": serve(request)}
    except MemoryError as error:
        answer = {"status": "memory", "message": describe(error)}
    except FloodedError as error:
        answer = {"status": "flooded", "message": str(error)}
    except BaseException as error:  # noqa: BLE001 - also sys.exit()
        answer = {"status": "raised", "message": describe(error)}
    return {**answer, "seconds": time.monotonic() - began}


# -- the program -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve until stdin ends."""
    die_with_parent(int(sys.argv[1]))
    adopt_orphans()
    requests, replies = os.dup(0), os.dup(1)  # the user's code gets an empty stdin, and prints to stderr
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    settings = json.loads(_first_line(requests))
    sys.path[:] = settings["sys_path"]  # of the parent, so that a user's module is found
    try:
        program: Any = import_function(settings["program"])
        open_session = program(settings["settings"])
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything, even SystemExit
        os.write(replies, json.dumps({"error": describe(error)}).encode() + b"\n")
        os._exit(1)
    with contextlib.suppress(OSError, ValueError):  # two descriptors per process
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()  # else a collection in a forked process would copy every page that it looks at
    os.write(replies, b'{"ready": true}\n')
    Host(open_session, Limits(**settings["limits"]), requests, replies).serve()
    os._exit(0)


def _first_line(descriptor: int) -> bytes:
    """Up to the first end of line, and no byte more: the rest belongs to the loop."""
    with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
        return file.readline()


if __name__ == "__main__":
    main()
