"""Signals that ask a rank to stop: the first SIGINT, SIGTERM or SIGUSR1 is a request, the second ends the process at once.

Python runs a signal's handler in the main thread, and not before the C code there returns: a rank that waits in a
collective for a dead one would never end. So the number of every signal is written to a pipe (signal.set_wakeup_fd), and a
thread reads it. A request is remembered until the step is over (stopping.py).

torchrun's agent sends SIGTERM to the ranks of a machine when one of them has died, and they cannot finish the step any
more: `must_end` recognises that. Under srun a rank cannot know it, and Slurm sends SIGKILL after its KillWait (30 s), also to
the batch script. So there a rank that has received SIGTERM ends itself after TERM_SECONDS (slurm/ranks.sh) if the step is not
over, and the script can still record how the attempt ended. SIGUSR2 shows where a run hangs: it writes the stack of every
thread to standard error, and the run continues.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

REQUESTS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
STOP_FILE = "GRPO_MEGATRON_STOP_FILE"  # set for the ranks of our launcher, which writes the name of its signal there
TERM_SECONDS = "GRPO_MEGATRON_TERM_SECONDS"  # set by slurm/ranks.sh
EXIT_STOPPED, EXIT_INTERRUPTED = 75, 128 + signal.SIGINT  # 75: EX_TEMPFAIL of sysexits.h, it can be started again
ANNOUNCEMENT = "{}: the run stops after this step and saves; a second signal ends it at once\n"


class _Listener:
    """What this process has received. The lock is held while signals are read, by the thread or by `requested`."""

    def __init__(self, must_end: Callable[[], bool], announces: bool) -> None:
        self.must_end, self.announces = must_end, announces
        self.request = ""
        self._lock = threading.Lock()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def start(self) -> None:
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in REQUESTS:
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)  # no EINTR inside a collective
        threading.Thread(target=self._listen, name="stop signals", daemon=True).start()

    def read(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            for number in os.read(self._reader, 1 << 12):
                if number in REQUESTS:
                    self._receive(signal.Signals(number))

    def _listen(self) -> None:
        while True:
            select.select([self._reader], [], [])
            self.read()

    def _receive(self, number: signal.Signals) -> None:
        if self.request or self.must_end():
            sys.stdout.flush()
            os._exit(128 + number)
        self.request = number.name
        if number == signal.SIGTERM and TERM_SECONDS in os.environ:
            timer = threading.Timer(float(os.environ[TERM_SECONDS]), os._exit, [128 + number])
            timer.daemon = True
            timer.start()
        if self.announces:
            os.write(2, ANNOUNCEMENT.format(number.name).encode())


_listener: _Listener | None = None


def listen(must_end: Callable[[], bool] = lambda: False, announces: bool = False) -> None:
    """From now on signals are requests. Call this in the main thread, before anything slow: by default they end a process.

    `must_end` says that the run is lost, so that a signal ends the process at once. `announces`: print the first request.
    """
    global _listener
    _listener = _Listener(must_end, announces)
    _listener.start()
    faulthandler.register(signal.SIGUSR2)


def requested() -> str:
    """The name of the signal that has reached this process, or our launcher; "" if there was none."""
    if _listener is not None:
        _listener.read()
        if _listener.request:
            return _listener.request
    with contextlib.suppress(OSError, KeyError):
        return Path(os.environ[STOP_FILE]).read_text()
    return ""
