"""The program of a host: forks one process per key, passes messages on, and ends the processes that break a limit.

`ProcessPool` starts it as `python -m grpo_megatron.processes.host PARENT_PID`. It calls `program(settings)` once, for
what all processes share (imports, an index), and runs nothing else of the user's, so that it can neither hang nor die
with the user's code. A process per key keeps keys apart: a hang in C, an exit, a patched module or a seeded generator
concerns its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from grpo_megatron.processes.pool import PIPE_CHUNK, FloodedError, JsonLines, Limits, ProcessAnswer, printable
from grpo_megatron.processes.process import (
    adopt_orphans,
    describe,
    describe_exit,
    describe_raised,
    die_with_parent,
    end_adopted,
    end_tree,
    tree,
)
from grpo_megatron.registry import import_function

MAX_RUNNING = 64  # requests in execution at a time; the others wait, and their time does not run
CHECK_S = 1.0  # seconds between counts of the processes that processes have started
LAST_MOMENT_S = 1.0  # between the closing of a process's connection and its end
MAX_CONSOLE = 1 << 16  # characters a minute of the processes' output that a host prints
OUT_OF_MEMORY = 77  # exit code of a process that has no memory left to report that
STATUSES = ("ok", "raised", "memory", "flooded")  # that a process reports itself

Serve = Callable[
    [dict[str, Any]], Any
]  # request -> value, both JSON; its attribute `reusable` is read, where it has one
OpenSession = Callable[[], Serve]  # called in each new process


class Host:
    """The loop of the program. `requests` and `replies` are the descriptors of the pool's pipes.

    <- {"kind": "reward", "sys_path": [...], "program": "module:function", "settings": {...}, "limits": {...}}
        -> {"ready": true} or {"error": "ValueError: ..."}
    <- {"key": KEY, "request": {...}, "timeout_s": 9.5}, answered in order per key
        -> {"key": KEY, "answer": {"status": "ok", "value": ..., "seconds": 0.1}}
        or {"key": KEY, "answer": {"status": "died", "message": "...", "output": "", "seconds": 0.1}}
    <- {"end": KEY}

    Status: ok, raised, memory, flooded (reported by the process), timeout, died, flooded (seen from here). A key whose
    process has failed answers the same failure until its end. A process that is reusable at its key's end serves another key.
    """

    def __init__(self, kind: str, open_session: OpenSession, limits: Limits, requests: int, replies: int) -> None:
        self.open_session, self.limits = open_session, limits
        self._kind, self._shown, self._minute = kind, 0, 0.0
        self.running = asyncio.Semaphore(MAX_RUNNING)
        self._requests, self._replies = requests, replies
        self._lines = JsonLines(requests, replies)
        self._guests: dict[Any, Guest] = {}  # by key
        self._idle: list[Process] = []  # reusable ones without a key
        self._end = asyncio.Event()

    async def serve(self) -> None:
        """Serves until the pool closes its pipe, then kills all processes."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_crash)
        loop.add_reader(self._requests, self._receive)
        start_task(self._check())
        await self._end.wait()
        for key in list(self._guests):
            self._remove(key)
        for process in self._idle:
            process.close()
        end_adopted(set())

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message to the pool."""
        self._lines.send(message)
        write_rest(self._lines, self._replies)

    def show(self, printed: bytes) -> None:
        """Prints what a process has printed, as far as stderr takes it at once: a host must not wait."""
        if time.monotonic() > self._minute + 60:
            self._shown, self._minute = 0, time.monotonic()
        text = printable(printed.decode(errors="replace"))[: MAX_CONSOLE - self._shown]
        self._shown += len(text)
        if text and self._shown >= MAX_CONSOLE:
            text += f"\n[further output of {self._kind} workers is not shown for a minute]\n"
        data = text.encode()
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        while data and poll.poll(0):
            data = data[os.write(2, data[: select.PIPE_BUF]) :]

    def end_lost(self) -> bool:
        """Ends the orphans of ended processes, which are this process's children now. Returns True for any."""
        return end_adopted({process.pid for process in self._processes()})

    def take_process(self) -> Process:
        """Returns a reusable process, or a new one."""
        while self._idle:
            if (process := self._idle.pop()).pid:
                return process
        return Process(self)

    def _processes(self) -> list[Process]:
        """Lists those that run."""
        running = [guest.process for guest in self._guests.values() if guest.process]
        return [process for process in (*running, *self._idle) if process.pid]

    def _receive(self) -> None:
        if self._lines.receive(self._accept) is not None:
            self._end.set()

    def _accept(self, message: dict[str, Any]) -> None:
        if "end" in message:
            self._remove(message["end"])
            return
        if message["key"] not in self._guests:
            self._guests[message["key"]] = Guest(self, message["key"])
        self._guests[message["key"]].requests.put_nowait((message["request"], message["timeout_s"]))

    def _remove(self, key: Any) -> None:
        if guest := self._guests.pop(key, None):
            guest.task.cancel()
            if guest.process and guest.process.reusable:
                self._idle.append(guest.process)
            elif guest.process:
                guest.process.close()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self.end_lost()
            if (limit := self.limits.max_processes) is None:
                continue
            for process in self._processes():
                if (count := len(tree(process.pid)) - 1) > limit:
                    process.fail("flooded", f"it runs {count} processes; at most {limit}")


class Guest:
    """One key: its process, once there is a request, and the task that answers its requests in order."""

    def __init__(self, host: Host, key: Any) -> None:
        self.requests: asyncio.Queue[tuple[dict[str, Any], float]] = asyncio.Queue()
        self.process: Process | None = None
        self.task = start_task(self._serve(host, key))

    async def _serve(self, host: Host, key: Any) -> None:
        while True:
            request, seconds = await self.requests.get()
            async with host.running:
                if self.process is None or (self.process.ended_idle and not host.limits.keeps_state):
                    self.process = host.take_process()
                answer = await self.process.ask(request, seconds)
            host.send({"key": key, "answer": answer})


class Process:
    """A forked process that answers one request at a time. `failure` is its answer to all requests after a failed one."""

    def __init__(self, host: Host) -> None:
        self.failure: ProcessAnswer | None = None
        self.ended_idle = False  # it failed between two requests
        self.reusable = False  # after its last answer
        self._host, self._loop = host, asyncio.get_running_loop()
        self._answer: asyncio.Future[ProcessAnswer] | None = None  # to the request in execution
        self._began, self._printed, self._tail = 0.0, 0, b""
        self._connection, other = socket.socketpair()
        self._output, printed = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()  # 0: it has been killed
        if not self.pid:
            try:
                close_all_but(other.fileno(), printed)
                run_guest(host.open_session, other, printed, parent)
            finally:
                os._exit(1)
        other.close()
        os.close(printed)
        os.set_blocking(self._output, False)
        self._handle = os.pidfd_open(self.pid)
        self._lines = JsonLines(self._connection.fileno(), self._connection.fileno(), host.limits.max_line)
        self._loop.add_reader(self._connection, self._read)
        self._loop.add_reader(self._output, self._read_output)
        self._loop.add_reader(self._handle, self._reap)

    async def ask(self, request: dict[str, Any], seconds: float) -> ProcessAnswer:
        """Returns the answer to a request, within so many seconds. Every failure is an answer, too."""
        if self.failure:
            return self.failure
        self._answer, self.reusable = self._loop.create_future(), False
        self._began, self._printed = time.monotonic(), 0
        timer = self._loop.call_later(seconds, self._expire, seconds)
        self._lines.send(request)
        write_rest(self._lines, self._connection.fileno())
        try:
            return await self._answer
        finally:
            timer.cancel()

    def fail(self, status: str, message: str) -> None:
        """Kills it, and answers the request in execution and all later ones with this status."""
        if self.pid:
            self.close()
            is_asked = self._answer is not None and not self._answer.done()
            seconds = time.monotonic() - self._began if is_asked else 0.0
            line = printable(self._tail.decode(errors="replace")).strip().rpartition("\n")[2][-200:]
            output = f" (last output: {line})" if line else ""
            self.failure = {"status": status, "message": message, "output": output, "seconds": seconds}
            self.ended_idle = not is_asked
            if self._answer is not None and is_asked:
                self._answer.set_result(self.failure)

    def close(self) -> None:
        """Kills it, with everything below it. Idempotent."""
        if not self.pid:
            return
        end_tree(self.pid)
        self.pid = 0
        for descriptor in (self._connection.fileno(), self._output, self._handle):
            self._loop.remove_reader(descriptor)
        self._loop.remove_writer(self._connection)
        self._lines.close()
        self._connection.close()
        os.close(self._output)
        os.close(self._handle)
        self._loop.call_later(LAST_MOMENT_S, self._host.end_lost)  # waits for it, too

    def _expire(self, seconds: float) -> None:
        if self._answer is not None and not self._answer.done():
            self.fail("timeout", f"no answer after {seconds:g} s")

    def _read(self) -> None:
        answers: list[ProcessAnswer] = []
        end = self._lines.receive(answers.append)
        self._read_output()  # what was printed before an answer counts before it: a flood has one outcome
        for answer in answers:
            if answer.get("status") not in STATUSES or not isinstance(answer.get("seconds"), float):
                end = end or "wrote to its connection what is no answer"
            elif self._answer is None or self._answer.done():
                end = end or "has answered without a request"
            elif answer["status"] == "ok":
                self.reusable = answer.pop("reusable", False) is True
                self._answer.set_result(answer)
            else:
                self.fail(answer["status"], str(answer.get("message", "")))
        if end is not None and self.pid:  # it may have closed its connection a moment before its end, which says more
            self._loop.remove_reader(self._connection)
            message = end or "has closed its connection to its worker"
            self._loop.call_later(LAST_MOMENT_S, self.fail, "died", message)

    def _read_output(self) -> None:
        limit = self._host.limits.max_output
        text = bytearray()
        with contextlib.suppress(BlockingIOError):
            while self.pid and len(text) <= (limit or 16 * PIPE_CHUNK):
                chunk = os.read(self._output, PIPE_CHUNK)
                text += chunk
                if not chunk:
                    self._loop.remove_reader(self._output)
                    break
        self._printed += len(text)
        self._tail = (self._tail + text)[-1000:]
        with contextlib.suppress(OSError):
            self._host.show(bytes(text))
        if limit is not None and self._printed > limit:
            self.fail("flooded", f"it has printed more than {limit} bytes in one call")

    def _reap(self) -> None:
        """Handles its end. Something that it has started may still have its connection open."""
        self._read()  # an answer may have arrived before
        if self.pid:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            assert ended
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            if code == OUT_OF_MEMORY:
                self.fail("memory", "MemoryError")
            else:
                self.fail("died", f"has ended: {describe_exit(code)}")
            self._host.end_lost()


def start_task(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Starts a task whose exception ends the host; the pool then starts another one."""
    task = asyncio.create_task(coroutine)
    task.add_done_callback(lambda done: None if done.cancelled() else done.result())
    return task


def _crash(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ends the host, for example when there is no memory or no descriptor for another process."""
    loop.default_exception_handler(context)
    os._exit(1)


def write_rest(lines: JsonLines, descriptor: int) -> None:
    """Writes what `lines` has queued for `descriptor` as soon as the other side reads."""
    loop = asyncio.get_running_loop()
    lines.write()
    if lines.wants_to_write:
        loop.add_writer(descriptor, write_rest, lines, descriptor)
    else:
        loop.remove_writer(descriptor)


# -- a forked process --------------------------------------------------------------------------------------------------

_inherited: set[str] = set()  # descriptors that were open before the host served: what the program has opened


def close_all_but(*descriptors: int) -> None:
    """Closes in a new process what belongs to the host and to other processes.

    A range is one call of the kernel: a call per descriptor made the start of n processes cost n * n.
    """
    kept = [*sorted({*map(int, _inherited), *descriptors}), 1 << 30]  # 0, 1 and 2 are among the inherited
    for before, after in itertools.pairwise(kept):
        os.closerange(before + 1, after)


def run_guest(open_session: OpenSession, connection: socket.socket, output: int, parent: int) -> None:
    """Serves requests from `connection` until it closes, then exits. What is printed goes to the descriptor `output`."""
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
    except BaseException:  # noqa: BLE001 - the connection is lost
        code = 1
    finally:
        os._exit(code)  # does not wait for threads of the user


def _answer(serve: Serve, request: dict[str, Any]) -> ProcessAnswer:
    """Answers one request. Every exception of the user's code becomes a status."""
    began = time.monotonic()
    try:
        answer = {"status": "ok", "value": serve(request), "reusable": getattr(serve, "reusable", False)}
    except MemoryError as error:
        answer = {"status": "memory", "message": describe(error)}
    except FloodedError as error:
        answer = {"status": "flooded", "message": str(error)}
    except BaseException as error:  # noqa: BLE001 - also sys.exit()
        answer = {"status": "raised", "message": describe_raised(error)}
    return {**answer, "seconds": time.monotonic() - began}


# -- the program -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Serves until stdin ends."""
    for request in (signal.SIGINT, signal.SIGUSR1):  # Slurm sends them to all processes, and the ranks alone obey
        signal.signal(request, signal.SIG_IGN)
    die_with_parent(int(sys.argv[1]))
    adopt_orphans()
    requests, replies = os.dup(0), os.dup(1)  # the user's code gets an empty stdin, and prints to stderr
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    with os.fdopen(os.dup(requests), "rb", buffering=0) as file:
        settings = json.loads(file.readline())  # and no byte more: the rest belongs to the loop
    sys.path[:] = settings["sys_path"]  # of the parent, so that a user's module is found
    try:
        program: Any = import_function(settings["program"])
        open_session = program(settings["settings"])
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything, even SystemExit
        os.write(replies, json.dumps({"error": describe(error)}).encode() + b"\n")
        os._exit(1)
    with contextlib.suppress(OSError, ValueError):  # three descriptors per process
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _inherited.update(set(os.listdir("/proc/self/fd")) - {str(requests), str(replies)})
    gc.collect()
    gc.freeze()  # else a collection in a forked process would copy every page that it looks at
    os.write(replies, b'{"ready": true}\n')
    host = Host(settings["kind"], open_session, Limits(**settings["limits"]), requests, replies)
    asyncio.new_event_loop().run_until_complete(host.serve())
    os._exit(0)


if __name__ == "__main__":
    main()
