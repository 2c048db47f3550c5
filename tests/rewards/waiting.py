"""How the tests of reward workers wait: for a condition, never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 300.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
