"""Environment: what answers the model's turns. The model writes, `step` answers, until a step is `done`.

To add one, write a subclass and name it in the config: `rollout.multi_turn.environment: my.module:MyEnvironment`. It runs
in a process of its own, so it may block, and one that fails ends its own trajectory only. State is never saved: a
trajectory is continued elsewhere by its seed and the completions so far, which must lead to the same state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

ChatMessage = dict[str, Any]  # {"role": ..., "content": ...} as chat templates read it


@dataclass(frozen=True)
class Step:
    """An environment's answer. `reward` is that of the turn; None: the turn has none. `metrics` are plain numbers."""

    messages: list[ChatMessage]
    reward: float | None = None
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


class Environment(ABC):
    """One trajectory's environment. `reset` and `step` may be coroutines.

    Every trajectory has a process of its own, so module-level state, the working directory and the generators of `random`
    and numpy (seeded with `seed`) belong to it alone.
    """

    gives_rewards: ClassVar[bool] = (
        False  # True: `Step.reward` is all the reward there is; no reward function is called
    )

    @classmethod  # noqa: B027 - optional
    def preload(cls, **kwargs: Any) -> None:
        """Load what all trajectories read, such as an index: called once per worker, before it forks their processes.

        It must start no thread and open no connection: neither survives a fork.
        """

    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools that the chat template shows to the model."""
        return []

    @abstractmethod
    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage] | Awaitable[list[ChatMessage]]:
        """The first messages. `row` is the data file's. Equal `row` and `seed` must give an equal start."""

    @abstractmethod
    def step(self, completion: str) -> Step | Awaitable[Step]:
        """The answer to what the model wrote in its turn, special tokens included, as text."""
