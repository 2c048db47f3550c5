"""The parent's side of one reward worker: the calls that are not answered yet, and one clock."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.rewards.item import ItemFields
from grpo_megatron.workers.process import STARTUP_TIMEOUT_S, PipedProcess

MAX_REPLY = 1 << 20  # bytes of one line; a usual result has some hundred


@dataclass
class PendingCall:
    """One call of a reward for some items: those that are not answered, in the order of their answers."""

    name: str
    numbers: deque[int]
    size: int  # how many it had


class WorkerProcess(PipedProcess):
    """The constructor starts the process. `pending` holds calls, oldest first; the first is in work."""

    def __init__(self) -> None:
        super().__init__("grpo_megatron.rewards.workers.worker", MAX_REPLY)
        self.ready = False
        self.loaded: set[str] = set()  # names of the rewards that it has imported
        self.pending: deque[PendingCall] = deque()
        self._clock = time.monotonic()
        self.send({"sys_path": [os.path.abspath(entry) for entry in sys.path]})

    def submit(
        self,
        numbers: Sequence[int],
        name: str,
        samples: Sequence[ItemFields],
        kwargs: Mapping[str, Any],
        timeout_s: float,
    ) -> None:
        """Queue one call for the items `numbers`."""
        if not self.pending:
            self._clock = time.monotonic()
        self.pending.append(PendingCall(name, deque(numbers), len(numbers)))
        call = {"name": name, "samples": list(samples), "kwargs": kwargs, "timeout_s": timeout_s}
        self.send({"ids": list(numbers), **call})

    def deadline(self, timeout_s: float) -> float:
        """The time (time.monotonic) at which its current start, import or call times out; infinity when it is idle.

        A call has `timeout_s` for each of its items that is not answered.
        """
        if self.ready and not self.pending:
            return float("inf")
        loading = not self.ready or self.pending[0].name not in self.loaded
        return self._clock + (STARTUP_TIMEOUT_S if loading else timeout_s * len(self.pending[0].numbers))

    def extend_deadline(self, seconds: float) -> None:
        """Of the current start, import or item."""
        self._clock += seconds

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """(results that have arrived, whether more can come). After bytes that are no result, no more can come."""
        results: list[dict[str, Any]] = []
        alive = self.receive(lambda message: self._accept(message, results))
        return results, alive

    def _accept(self, message: dict[str, Any], results: list[dict[str, Any]]) -> None:
        self._clock = time.monotonic()
        if "ready" in message:
            self.ready = True
        elif "loaded" in message:
            self.loaded.add(str(message["loaded"]))
        elif self.pending and message.get("id") == self.pending[0].numbers[0] and _is_result(message):
            self.pending[0].numbers.popleft()
            if not self.pending[0].numbers:
                self.pending.popleft()
            results.append(message)
        else:
            raise ValueError("not the expected result")


def _is_result(message: dict[str, Any]) -> bool:
    if "error" in message:
        return isinstance(message["error"], str)
    if "none" in message:
        return True
    steps, texts = message.get("steps"), message.get("texts")
    return (
        isinstance(message.get("reward"), float)
        and isinstance(message.get("metrics"), dict)
        and isinstance(texts, dict)
        and all(isinstance(text, str) for text in texts.values())
        and isinstance(steps, list)
        and all(isinstance(step, list) and list(map(type, step)) == [int, float] for step in steps)
    )
