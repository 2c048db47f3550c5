"""KeptProblem: calls of a pool of workers whose first failure is kept for a later, collective moment.

Only the leader of a rollout block has the pool. If it raised in the middle of a draw, the other ranks of its block would
wait for it in the engine. So a problem is kept until all ranks can hear of it, and nothing is asked of the pool any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

PoolType = TypeVar("PoolType")
T = TypeVar("T")


class KeptProblem(Generic[PoolType]):
    """`pool` None: this rank has none, and every call does nothing."""

    def __init__(self, pool: PoolType | None) -> None:
        self.pool = pool
        self.text: str | None = None  # of the first failure

    def attempt(self, call: Callable[[PoolType], T]) -> T | None:
        """`call(pool)`, or None without a pool and after the first RuntimeError."""
        if self.pool is None or self.text is not None:
            return None
        try:
            return call(self.pool)
        except RuntimeError as error:
            self.text = str(error)
            return None
