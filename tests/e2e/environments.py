"""Environments of the end-to-end tests. Worker processes import this file, so it has no heavy imports."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

from grpo_megatron.environments.environment import ChatMessage, Environment, Step


class Echo(Environment):
    """Answers with digits of a hash of the turn, until that hash is divisible by `patience`; never twice in one tempo.

    `delay_s` > 0: every call takes a random time of up to so many seconds, another one in each run.
    """

    def __init__(self, patience: int = 3, delay_s: float = 0.0) -> None:
        self.patience, self.delay_s = patience, delay_s

    def _wait(self) -> None:
        if self.delay_s:
            time.sleep(random.SystemRandom().random() * self.delay_s)

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        self._wait()
        *others, last = row["messages"]
        return [*others, {**last, "content": f"{last['content']} {seed % 100}"}]

    def step(self, completion: str) -> Step:
        self._wait()
        number = sum(map(ord, completion))
        if number % self.patience == 0:
            return Step([], reward=self.reward(number), done=True, metrics={"echoes": 0})
        message = {"role": "user", "content": " ".join(str(number))}
        return Step([message], reward=self.reward(number), metrics={"echoes": 1})

    def reward(self, number: int) -> float | None:
        return None


class Judge(Echo):
    """The same, with a reward of 0 to 4 for every turn."""

    gives_rewards = True

    def reward(self, number: int) -> float:
        return float(number % 5)


class Fragile(Echo):
    """Raises on some turns."""

    def step(self, completion: str) -> Step:
        if sum(map(ord, completion)) % 4 == 1:
            raise KeyError("no such answer")
        return super().step(completion)
