"""Progress within a step: the phase, its seconds, and the time that is left if the step is like the last ones."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

LIKE = 5  # the last steps, whose median is the time of the next one
FIRST_LINE_S = 60.0  # of a long step, in a log; the next ones after twice the time, each


class StepProgress:
    """`enter` is called in the main thread, `text` in another one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state: tuple[int | None, tuple[str, ...], float, float] = (None, (), clock(), clock())
        self._seconds: deque[float] = deque(maxlen=LIKE)

    def enter(self, step: int | None, phases: Sequence[str]) -> None:
        """The run is now in these nested phases; in none, it is between two steps."""
        _, before, began, _ = self._state
        now = self._clock()
        self._state = (step, tuple(phases), began if before else now, now)

    def finished(self, seconds: float | None) -> None:
        """A step took so long."""
        if seconds is not None:
            self._seconds.append(seconds)

    def step_seconds(self) -> float:
        """Since the step began; 0 between two steps."""
        _, phases, began, _ = self._state
        return self._clock() - began if phases else 0.0

    def text(self) -> str:
        """ "gen 34 s, about 2 min of the step left"; empty between two steps."""
        _, phases, began, entered = self._state
        if not phases:
            return ""
        now = self._clock()
        inner = phases[-1] if len(phases) > 1 else "step"
        return f"{inner} {duration(now - entered)}" + self._left(now - began)

    def line(self) -> str:
        """The same for a log."""
        return f"step {self._state[0]}: {self.text()}; {duration(self.step_seconds())} of it are over"

    def _left(self, passed: float) -> str:
        if not self._seconds:
            return ""
        left = statistics.median(self._seconds) - passed
        return f", about {duration(left)} of the step left" if left > 0 else ", longer than the last steps"


def duration(seconds: float) -> str:
    """ "34 s", "2 min 5 s", "3 h 12 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextlib.contextmanager
def awaited(what: str, is_shown: bool, first_s: float = 20.0) -> Iterator[None]:
    """Prints that `what` is being done, if that takes longer than `first_s`; then after twice the time, each."""
    stop = threading.Event()

    def remind() -> None:
        passed = 0.0
        next_s = first_s
        while not stop.wait(next_s - passed):
            passed, next_s = next_s, 2 * next_s
            print(f"{what}: {duration(passed)} so far", flush=True)

    thread = threading.Thread(target=remind, name="awaited", daemon=True)
    if is_shown:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if is_shown:
            thread.join()
