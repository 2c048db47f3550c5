"""The processes of all environments of one worker: begin, watch, end. One that breaks a limit is killed."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from grpo_megatron.environments.guest import MAX_OUTPUT, Guest
from grpo_megatron.environments.session import OUT_OF_MEMORY, Factory, Limits, run_session
from grpo_megatron.processes.family import count_below, end_adopted
from grpo_megatron.processes.process import describe_exit

MAX_RUNNING = 64  # environments in execution at a time; the others wait, and their time does not run
CHECK_S = 1.0  # seconds between counts of the processes that environments have started
LAST_MOMENT_MS = 1000  # between the closing of a process's connection and its end
MAX_PROCESSES = 64  # that one environment may run at a time


class Guests:
    """By key. `report(key, answer)` is called with every answer, and with None when a long replay makes progress.

    The caller waits with `selector` and calls `serve` for its events that carry a Guest, and `tend` after each wait.
    `prepare` is called in a new process before the environment's code.
    """

    def __init__(
        self,
        make: Factory,
        limits: Limits,
        selector: selectors.BaseSelector,
        report: Callable[[str, dict[str, Any] | None], None],
        prepare: Callable[[], None],
    ) -> None:
        self._make, self._limits, self._selector = make, limits, selector
        self._report, self._prepare = report, prepare
        self._guests: dict[str, Guest] = {}
        self._waiting: deque[Guest] = deque()  # guests with a request that is not in execution
        self._running: set[Guest] = set()  # guests with a request in execution
        self._next_count = 0.0

    def patience(self) -> float | None:
        """Seconds until the next deadline or count of processes. None: there is nothing to wait for."""
        times = [guest.deadline for guest in self._running if guest.deadline is not None]
        if self._guests:
            times.append(self._next_count)
        return max(min(times) - time.monotonic(), 0) if times else None

    def accept(self, key: str, request: dict[str, Any]) -> None:
        """Queue a request. Requests of one key are answered in order."""
        guest = self._guests.setdefault(key, Guest(key, self._limits.max_line))
        if guest.failure:
            self._report(key, guest.failure)
            return
        guest.requests.append(request)
        if len(guest.requests) == 1:
            self._waiting.append(guest)

    def remove(self, key: str) -> None:
        """Kill the process, if there is one, and forget the key."""
        if guest := self._guests.pop(key, None):
            self._stop(guest)

    def close(self) -> None:
        """Remove all."""
        for key in list(self._guests):
            self.remove(key)

    def tend(self) -> None:
        """Notice ends, check limits, begin what waits."""
        self._reap()
        self._check_limits()
        self._begin_waiting()

    def serve(self, guest: Guest, source: Any, events: int) -> None:
        """Handle an event of the selector."""
        if guest.pid is None:
            return  # an earlier event of this round has ended it
        if source is guest.connection and events & selectors.EVENT_WRITE:
            guest.flush()
        self._read_output(guest)
        if guest.pid is not None and source is guest.connection and events & selectors.EVENT_READ:
            self._read_answers(guest)
        if guest.pid is not None:
            self._watch(guest.connection, guest.events, guest)

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._running) < MAX_RUNNING:
            guest = self._waiting.popleft()
            if guest.pid is None:
                self._fork(guest)
            self._running.add(guest)
            guest.begin(time.monotonic() + self._limits.timeout_s)
            self._watch(guest.connection, guest.events, guest)

    def _fork(self, guest: Guest) -> None:
        own, other = socket.socketpair()
        output, printed = os.pipe()
        worker = os.getpid()
        pid = os.fork()
        if not pid:
            try:
                self._forget_all()
                own.close()
                os.close(output)
                run_session(self._make, self._limits, other, printed, worker)
            finally:
                os._exit(1)
        other.close()
        os.close(printed)
        own.setblocking(False)
        os.set_blocking(output, False)
        guest.attach(pid, own, output)
        self._watch(output, selectors.EVENT_READ, guest)

    def _forget_all(self) -> None:
        """In a new process: close what belongs to the worker and to other environments."""
        self._prepare()
        for guest in self._guests.values():
            if guest.connection:
                guest.connection.close()
                os.close(guest.output)

    def _read_output(self, guest: Guest) -> None:
        text, flooded = guest.read_output()
        with contextlib.suppress(OSError):
            os.write(2, text)  # to the pool; what it does not read in time is lost
        if flooded:
            self._fail(guest, "flooded", f"it has printed more than {MAX_OUTPUT} bytes in one call")
        elif guest.output_ended:
            self._watch(guest.output, 0)

    def _read_answers(self, guest: Guest) -> None:
        messages, end = guest.receive()
        self._read_output(guest)  # what was printed before an answer counts before it: a flood has one outcome
        for message in messages:
            if guest.pid is None:
                return
            if guest.deadline is None:
                end = end or "it has answered without a request"
            elif "progress" in message:
                guest.deadline = time.monotonic() + self._limits.timeout_s
                self._report(guest.key, None)
            elif message["status"] != "ok":
                self._fail(guest, message["status"], str(message.get("message", "")))
            else:
                self._report(guest.key, message)
                self._finish(guest)
        if end and guest.pid is not None:
            self._lose(guest, end)

    def _finish(self, guest: Guest) -> None:
        """The request in execution has been answered."""
        guest.requests.popleft()
        guest.deadline = None
        self._running.remove(guest)
        if guest.requests:
            self._waiting.append(guest)

    def _reap(self) -> None:
        """Notice processes that have ended, also if something that they have started holds their connection open."""
        ended = None
        while found := _ended_child():
            ended = found
            guest = next((guest for guest in self._guests.values() if guest.pid == ended), None)
            if guest:
                self._read_answers(guest)  # one may have arrived before
            if guest and guest.pid:
                self._lose(guest, "")
            elif not guest:
                os.waitpid(ended, 0)
        if ended:
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
            guest.pid = None
            message = f"its process has ended: {describe_exit(code)}"
            if code == OUT_OF_MEMORY:
                status, message = "memory", "MemoryError"
        os.close(descriptor)
        self._fail(guest, status, message)

    def _fail(self, guest: Guest, status: str, message: str) -> None:
        """Kill the process and answer all requests, also later ones, with its status."""
        guest.failure = {"status": status, "message": message + guest.last_line(), "seconds": guest.seconds()}
        self._stop(guest)
        for _ in guest.requests:
            self._report(guest.key, guest.failure)
        guest.requests.clear()

    def _stop(self, guest: Guest) -> None:
        """Kill the process, if there is one. Its requests wait no more."""
        if guest in self._running:
            self._running.remove(guest)
        elif guest.requests:
            self._waiting.remove(guest)
        if guest.connection:
            self._watch(guest.connection, 0)
            self._watch(guest.output, 0)
        guest.close()

    def _check_limits(self) -> None:
        now = time.monotonic()
        for guest in [guest for guest in self._running if guest.deadline is not None and guest.deadline <= now]:
            self._fail(guest, "timeout", f"no answer after {self._limits.timeout_s:g} s (rollout.multi_turn.timeout_s)")
        if self._next_count <= now:
            self._next_count = now + CHECK_S
            for guest in list(self._guests.values()):
                if guest.pid and (count := count_below(guest.pid)) > MAX_PROCESSES:
                    self._fail(guest, "flooded", f"it runs {count} processes; at most {MAX_PROCESSES}")

    def _watch(self, source: Any, events: int, guest: Guest | None = None) -> None:
        known = source in self._selector.get_map()
        if events and known:
            self._selector.modify(source, events, guest)
        elif events:
            self._selector.register(source, events, guest)
        elif known:
            self._selector.unregister(source)


def _ended_child() -> int | None:
    """The number of a child that has ended and has not been waited for."""
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended.si_pid if ended else None
    return None
