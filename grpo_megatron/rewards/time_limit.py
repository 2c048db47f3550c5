"""A limit on the processor time of Python code. It does not depend on how busy the machine is."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


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
