"""StatefulEngine: what an engine refuses in which state, for engines with a queue of their own.

An engine is asleep or awake, has a complete set of weights or none, and is broken for ever once a call has left its queue in
an unknown state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_megatron.rollout.engine import RolloutEngine

BROKEN = "the engine is broken and must be built again"


class StatefulEngine(RolloutEngine):
    """A subclass sets these attributes in its constructor. `_queue` has `len`, `in` for ids, and `cache_statistics`."""

    _queue: Any
    _max_model_len: int
    _version: int | None
    _asleep: set[str]  # of {"weights", "kv_cache"}
    _broken: str | None  # why this engine can never work again

    @property
    def version(self) -> int | None:
        return self._version

    def require(self, version: int) -> None:
        """See RolloutEngine."""
        self._require_ready()
        super().require(version)

    @property
    def num_unfinished(self) -> int:
        """See RolloutEngine. 0 for a broken engine: nothing of it will ever finish."""
        return 0 if self._broken is not None else len(self._queue)

    def _require_new(self, request_id: str) -> None:
        if request_id in self._queue:
            raise ValueError(f"request {request_id!r} is submitted already, and unfinished")

    def _require_known(self, request_ids: Sequence[str]) -> None:
        if unknown := [request_id for request_id in request_ids if request_id not in self._queue]:
            raise ValueError(f"no unfinished request has the id {', '.join(map(repr, unknown))}")

    def _require_idle(self, call: str) -> None:
        if problem := self._unfinished():
            raise RuntimeError(f"{call}: {problem}")

    def _require_length(self, ids: Sequence[int]) -> None:
        if not 1 <= len(ids) < self._max_model_len:
            raise ValueError(f"cannot compute logprobs of {len(ids)} tokens: max_model_len is {self._max_model_len}")

    def _unfinished(self) -> str | None:
        """Why the weights and the cache must stay as they are."""
        count = self.num_unfinished
        return f"{count} submitted requests are unfinished: poll or abort them first" if count else None

    def _unloadable(self) -> str | None:
        """Why weights cannot be loaded now."""
        asleep = "the weights are asleep: call wake_weights" if "weights" in self._asleep else None
        return self._broken or asleep or self._unfinished()

    def _require_ready(self) -> None:
        if self._broken is None and self._asleep:
            raise RuntimeError(f"the engine is asleep ({', '.join(sorted(self._asleep))}): wake it first")
        self._require_weights()

    def _require_unbroken(self) -> None:
        if self._broken is not None:
            raise RuntimeError(self._broken)

    def _require_weights(self) -> None:
        self._require_unbroken()
        if self._version is None:
            raise RuntimeError("the engine has no complete set of weights: call load_weights first")

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Around calls that leave the queue in an unknown state when they fail, or are interrupted."""
        try:
            yield
        except BaseException as error:
            self._version = None
            self._broken = f"{BROKEN}: {type(error).__name__}: {error}"
            raise
