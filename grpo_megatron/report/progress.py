"""Progress within a step: the phase, its seconds, and the time that is left if the step is like the last ones."""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

LIKE = 5  # the last steps, whose median is the time of the next one
COUNT_PERIOD_S = 1.0  # of the line that counts, on a terminal
STEP_PHASE = "step"  # the outermost phase of a training step
FIRST_LINE_S = 60.0  # of a long step, in a log; the next ones after twice the time, each


class StepProgress:
    """The phase of a step, and the time that it will take. `enter` is called in the main thread, `text` in another one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state: tuple[int | None, tuple[str, ...], float, float] = (None, (), clock(), clock())
        self._seconds: deque[float] = deque(maxlen=LIKE)

    def enter(self, step: int | None, phases: Sequence[str]) -> None:
        """Notes the nested phases that the run is now in; in none, it is between two steps."""
        _, before, began, _ = self._state
        now = self._clock()
        self._state = (step, tuple(phases), began if before else now, now)

    def finished(self, seconds: float | None) -> None:
        """Records the seconds of a step that ended."""
        if seconds is not None:
            self._seconds.append(seconds)

    def step_seconds(self) -> float:
        """Seconds since the step began; 0 between two steps."""
        _, phases, began, _ = self._state
        return self._clock() - began if phases else 0.0

    def text(self, steps_left: int | None = None) -> str:
        """Writes "gen 34 s, about 2 min of the step and 3 h 5 min of the run left"; empty between two steps.

        `steps_left` with this one; None: they are not known.
        """
        _, phases, began, entered = self._state
        if not phases:
            return ""
        now, is_step = self._clock(), phases[0] == STEP_PHASE
        outer = f"{phases[0]}: " if len(phases) > 1 and not is_step else ""
        inner = phases[-1] if phases[-1] != STEP_PHASE else "between phases"
        return f"{outer}{inner} {duration(now - entered)}" + (self._left(now - began, steps_left) if is_step else "")

    def line(self) -> str:
        """Writes the text as a line for a log."""
        return f"step {self._state[0]}: {self.text()}; {duration(self.step_seconds())} of it are over"

    def _left(self, passed: float, steps_left: int | None) -> str:
        if not self._seconds:
            return ""
        each = statistics.median(self._seconds)
        if passed >= each:
            return ", longer than the last steps"
        of_run = f" and {duration(each * steps_left - passed)} of the run" if steps_left and steps_left > 1 else ""
        return f", about {duration(each - passed)} of the step{of_run} left"


def duration(seconds: float) -> str:
    """Formats seconds as "34 s", "2 min 5 s" or "3 h 12 min"."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextlib.contextmanager
def awaited(
    what: str, is_shown: bool, first_s: float = 20.0, is_over: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Shows that `what` is being done, until the block ends or `is_over()`. On a terminal a line counts the seconds.

    Elsewhere a line is printed once it takes longer than `first_s`, and then after twice the time, each.
    """
    stop = threading.Event()
    follow = _count if sys.stdout.isatty() else functools.partial(_remind, first_s=first_s)
    thread = threading.Thread(target=follow, args=(what, stop, is_over), name="awaited", daemon=True)
    if is_shown:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if is_shown:
            thread.join()


def _count(what: str, stop: threading.Event, is_over: Callable[[], bool]) -> None:
    began, erase = time.monotonic(), ""
    while not (stop.wait(COUNT_PERIOD_S) or is_over()):
        erase = "\r\x1b[K"
        print(f"{erase}  {what}: {duration(time.monotonic() - began)}\r", end="", flush=True)  # other texts replace it
    print(erase, end="", flush=True)


def _remind(what: str, stop: threading.Event, is_over: Callable[[], bool], first_s: float) -> None:
    passed, next_s = 0.0, first_s
    while not (stop.wait(next_s - passed) or is_over()):
        passed, next_s = next_s, 2 * next_s
        print(f"{what}: {duration(passed)} so far", flush=True)
