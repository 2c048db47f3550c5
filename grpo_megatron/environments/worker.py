"""The program of a worker: forks one process per environment, passes messages on, and ends those that break a limit.

`EnvironmentPool` starts it as `python -m grpo_megatron.environments.worker PARENT_PID`; it is not meant to be run by
hand. It imports and preloads the environment's class once, and runs nothing else of the user's, so that it can neither
hang nor die with an environment (session.py). Messages are JSON lines; KEY names a trajectory:

    <- {"sys_path": [...], "name": ..., "kwargs": {...}, "timeout_s": ..., "memory_bytes": ..., "max_characters": ...}
                                                                   -> {"ready": true} or {"error": "ValueError: ..."}
    <- {"key": KEY, "request": {...}} as in session.py             -> {"key": KEY, "answer": {"status": ..., ...}}
    <- {"end": [KEY, ...]}

Requests of one key are answered in order; a key whose process has failed answers the same failure until its end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import selectors
import signal
import sys
from typing import Any

from grpo_megatron.environments.guests import Guests
from grpo_megatron.environments.pool import load_environment
from grpo_megatron.environments.session import Factory, Limits
from grpo_megatron.processes.process import begin, describe, reply


def main() -> None:
    """Serve until stdin ends."""
    buffered, replies = begin()
    requests = buffered.detach()  # `Worker` reads what follows the first line
    settings = json.loads(requests.readline())
    sys.path[:] = settings["sys_path"]  # of the parent, so that a user's module is found
    try:
        make = load_environment(settings["name"], settings["kwargs"])
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything, even SystemExit
        reply(replies, {"error": describe(error)})
        os._exit(1)
    with contextlib.suppress(OSError, ValueError):  # two descriptors per environment
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()  # else a collection in a forked process would copy every page that it looks at
    reply(replies, {"ready": True})
    limits = Limits(settings["timeout_s"], settings["memory_bytes"], settings["max_characters"])
    Worker(make, limits, requests.fileno(), replies.fileno()).serve()
    os._exit(0)


class Worker:
    """The loop of the program: requests of the pool, answers of the environments."""

    def __init__(self, make: Factory, limits: Limits, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._signalled = os.pipe()  # written to at every SIGCHLD
        self._guests = Guests(make, limits, self._selector, self._report, self._leave)

    def serve(self) -> None:
        """Serve until the pool closes its pipe; then kill all."""
        for descriptor in (self._requests, self._replies, self._wakeup, self._signalled, 2):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        self._selector.register(self._requests, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        alive = True
        while alive:
            for key, events in self._selector.select(self._guests.patience()):
                if key.data is not None:
                    self._guests.serve(key.data, key.fileobj, events)
                elif key.fd == self._requests:
                    alive = self._read_requests()
                elif key.fd == self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup, 1 << 16)
            self._guests.tend()
            self._write_replies()
        self._guests.close()

    def _leave(self) -> None:
        """In a new process, which inherits everything."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for descriptor in (self._requests, self._replies, self._wakeup, self._signalled):
            os.close(descriptor)

    def _report(self, key: str, answer: dict[str, Any] | None) -> None:
        message = (
            {"key": key, "answer": answer} if answer else {"progress": key}
        )  # else a long replay looks like a hang
        self._outgoing += json.dumps(message).encode() + b"\n"

    def _read_requests(self) -> bool:
        """Returns False when the pool has closed the pipe."""
        alive = True
        with contextlib.suppress(BlockingIOError):
            while alive:
                chunk = os.read(self._requests, 1 << 16)
                self._incoming += chunk
                alive = bool(chunk)
        *lines, self._incoming = self._incoming.split(b"\n")
        for line in lines:
            message = json.loads(line)
            for key in message.get("end", ()):
                self._guests.remove(key)
            if "key" in message:
                self._guests.accept(message["key"], message["request"])
        return alive

    def _write_replies(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._outgoing:
                del self._outgoing[: os.write(self._replies, self._outgoing[: 1 << 16])]
        registered = self._replies in self._selector.get_map()
        if self._outgoing and not registered:
            self._selector.register(self._replies, selectors.EVENT_WRITE)
        elif registered and not self._outgoing:
            self._selector.unregister(self._replies)


if __name__ == "__main__":
    main()
