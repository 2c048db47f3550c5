"""Environments of the end-to-end tests. Worker processes import this file, so it has no heavy imports."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from grpo_megatron.environments.environment import ChatMessage, Environment, Step


class Echo(Environment):
    """Answers with the sum of the turn's characters, until that sum is divisible by `patience`.

    `delay_s` > 0: every call takes a random time of up to so many seconds, another one in each run. `is_fragile`: some turns
    make it raise.
    """

    def __init__(self, patience: int = 3, delay_s: float = 0.0, is_fragile: bool = False) -> None:
        self.patience, self.delay_s, self.is_fragile = patience, delay_s, is_fragile

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
        if self.is_fragile and number % 4 == 1:
            raise KeyError("no such answer")
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


class Pictures(Judge):
    """Shows the row's pictures or one, and one in each answer: size and colour follow from the turn's characters."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        [message] = row["messages"]
        return [{"images": [picture(seed)], **message}]

    def step(self, completion: str) -> Step:
        step = super().step(completion)
        return replace(
            step, messages=[{**message, "images": [picture(sum(map(ord, completion)))]} for message in step.messages]
        )


def picture(number: int) -> Any:
    from PIL import Image

    colour = tuple(number * factor % 256 for factor in (37, 59, 83))
    return Image.new("RGB", (28 * (1 + number % 3), 28 * (1 + number // 3 % 2)), colour)


class Long(Judge):
    """One prompt in `one_in` takes five turns, whose calls take `delay_s` each; the others take one turn."""

    def __init__(self, delay_s: float = 0.0, one_in: int = 4) -> None:
        super().__init__(delay_s=delay_s)
        self.one_in = one_in

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        self.num_left = self.num_turns = 5 if seed % self.one_in == 0 else 1
        return super().reset(row, seed)

    def _wait(self) -> None:
        time.sleep(self.delay_s if self.num_turns > 1 else 0.0)

    def step(self, completion: str) -> Step:
        self._wait()
        self.num_left -= 1
        number = sum(map(ord, completion))
        return Step([{"role": "user", "content": " ".join(str(number))}], self.reward(number), done=not self.num_left)
