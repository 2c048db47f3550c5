"""The worker's side of one environment's process: its connection, its output, its requests, its deadline."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections import deque
from typing import Any

from grpo_megatron.processes.family import end_tree
from grpo_megatron.processes.process import printable

MAX_OUTPUT = 1 << 20  # bytes that one call may print
STATUSES = ("ok", "raised", "memory", "flooded")  # that a process reports itself; the worker knows the others


class Guest:
    """One trajectory's process. `attach` gives it the process; until then it has only requests.

    `deadline` is None while nothing is in execution. `failure` is the answer to all requests after a failed one.
    """

    def __init__(self, key: str, max_line: int) -> None:
        self.key = key
        self.requests: deque[dict[str, Any]] = deque()  # the first is in execution if there is a deadline
        self.deadline: float | None = None
        self.failure: dict[str, Any] | None = None
        self.pid: int | None = None
        self.connection: socket.socket | None = None
        self.output = -1
        self.output_ended = False
        self._max_line = max_line
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._began = 0.0
        self._printed = 0
        self._tail = b""

    def attach(self, pid: int, connection: socket.socket, output: int) -> None:
        """`connection` and `output` are the worker's ends, non-blocking."""
        self.pid, self.connection, self.output = pid, connection, output

    @property
    def events(self) -> int:
        """What to wait for on the connection."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)

    def seconds(self) -> float:
        """Wall-clock seconds since the request in execution began."""
        return time.monotonic() - self._began if self.deadline is not None else 0.0

    def begin(self, deadline: float) -> None:
        """Send the oldest request."""
        self.deadline = deadline
        self._began = time.monotonic()
        self._printed = 0
        self._outgoing += json.dumps(self.requests[0]).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much as the connection takes. If the process is dead, `receive` notices it."""
        assert self.connection
        try:
            del self._outgoing[: self.connection.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()

    def receive(self) -> tuple[list[dict[str, Any]], str]:
        """(messages that have arrived, why no more can come or ""). A wrong message ends the connection."""
        assert self.connection
        end = ""
        with contextlib.suppress(BlockingIOError):
            while not end and len(self._incoming) <= self._max_line:
                try:
                    chunk = self.connection.recv(1 << 16)
                except ConnectionError:
                    chunk = b""
                self._incoming += chunk
                end = "" if chunk else "it has closed its connection to the worker"
        *lines, self._incoming = self._incoming.split(b"\n")
        messages: list[dict[str, Any]] = []
        try:
            messages.extend(_checked(json.loads(line)) for line in lines)
        except (ValueError, TypeError, RecursionError) as error:
            end = f"something wrote to its connection to the worker ({error})"
        if len(self._incoming) > self._max_line:
            end = f"its answer has more than {self._max_line} bytes"
        return messages, end

    def read_output(self) -> tuple[bytes, bool]:
        """(what it has printed since the last call, whether that is more than MAX_OUTPUT for this call)."""
        text = bytearray()
        with contextlib.suppress(OSError):  # BlockingIOError: no more at the moment
            while self._printed <= MAX_OUTPUT and not self.output_ended:
                chunk = os.read(self.output, 1 << 16)
                text += chunk
                self._printed += len(chunk)
                self.output_ended = not chunk
        self._tail = (self._tail + text)[-1000:]
        return bytes(text), self._printed > MAX_OUTPUT

    def last_line(self) -> str:
        """The end of what it has printed, in brackets, for a message."""
        line = printable(self._tail.decode(errors="replace")).strip().rpartition("\n")[2][-200:]
        return f" (last output: {line})" if line else ""

    def close(self) -> None:
        """Kill the process with everything below it. Idempotent."""
        if self.pid is not None:
            end_tree(self.pid)
        if self.connection:
            self.connection.close()
            os.close(self.output)
        self.pid = self.connection = self.deadline = None


def _checked(message: Any) -> dict[str, Any]:
    if isinstance(message, dict) and isinstance(message.get("progress"), int):
        return message
    if not isinstance(message, dict) or message.get("status") not in STATUSES:
        raise ValueError("not an answer")
    if not isinstance(message.get("seconds"), float):
        raise ValueError("an answer without its seconds")
    return message
