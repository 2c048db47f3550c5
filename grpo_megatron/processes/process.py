"""What both ends of a process share: messages as JSON lines, texts about failures, limits that a process sets on itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

MAX_TEXT_OF_ERROR = 500  # characters
PIPE_CHUNK = 1 << 16  # bytes per system call
ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])|\r(?=\n)")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class FloodedError(Exception):
    """An answer that is too large."""


class JsonLines:
    """Messages over two file descriptors that never block. A message is one line of JSON, an object.

    `max_line`: bytes of one incoming line; None: the other side is trusted.
    """

    def __init__(self, incoming: int, outgoing: int, max_line: int | None = None) -> None:
        self._in, self._out, self._max_line = incoming, outgoing, max_line
        self._received, self._queued = bytearray(), bytearray()
        for descriptor in (incoming, outgoing):
            os.set_blocking(descriptor, False)

    @property
    def wants_to_write(self) -> bool:
        """Whether a part of the queue waits for the other side to read."""
        return bool(self._queued)

    def close(self) -> None:
        """Forget the descriptors: their numbers may soon name other files."""
        self._in = self._out = -1

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message, and write as much of the queue as the other side takes."""
        self._queued += json.dumps(message).encode() + b"\n"
        self.write()

    def write(self) -> None:
        """Write as much as the other side takes. If it is gone, `receive` notices it."""
        try:
            while self._queued:
                del self._queued[: os.write(self._out, self._queued[:PIPE_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self._queued.clear()

    def receive(self, accept: Callable[[dict[str, Any]], None]) -> str | None:
        """Give each message that has arrived to `accept`. Returns None, or why no more can come; "" for a normal end.

        A line that is no object, or to which `accept` raises ValueError, is the last one that is read.
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


def describe(error: BaseException) -> str:
    """Type and text of an exception, at most MAX_TEXT_OF_ERROR characters."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_TEXT_OF_ERROR]
    except Exception:  # noqa: BLE001 - an exception whose __str__ raises
        return type(error).__name__


def describe_exit(code: int) -> str:
    """How a process ended. `code` is negative for a signal, as in `subprocess`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def printable(text: str) -> str:
    """The text without what a terminal would obey: escape sequences, control characters other than tab and newline."""
    return CONTROL.sub("", ESCAPE.sub("", text).replace("\r", "\n"))


def last_line(printed: bytes) -> str:
    """The end of what a process has printed, in brackets, for a message; "" if it has printed nothing."""
    line = printable(printed.decode(errors="replace")).strip().rpartition("\n")[2][-200:]
    return f" (last output: {line})" if line else ""


# -- limits ------------------------------------------------------------------------------------------------------------


class MemoryLimit:
    """A limit on this process's address space, in bytes above what is mapped when it is set. It can be removed again."""

    def __init__(self, size: int) -> None:
        self._size, self._is_set = size, False

    def set(self, wanted: bool = True) -> None:
        """Set or remove the limit. Does nothing where the system has no such limit."""
        if wanted == self._is_set:
            return
        self._is_set = wanted
        with contextlib.suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            with open("/proc/self/statm") as file:
                limit = int(file.read().split()[0]) * resource.getpagesize() + self._size
            if hard != resource.RLIM_INFINITY:
                limit = min(limit, hard)
            resource.setrlimit(resource.RLIMIT_AS, (limit if wanted else hard, hard))


class _OutOfTime(BaseException):
    """Not an Exception: libraries such as sympy catch those in many places."""


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raises TimeoutError when the block takes more processor seconds; `what` begins the message.

    Processor time does not depend on how busy the machine is. Works on the main thread only, by SIGVTALRM. On another
    thread, or inside another limit, there is no limit.
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
