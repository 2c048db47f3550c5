"""A user's own environment, as an example. Workers import this file, so it imports nothing large."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.environments.environment import ChatMessage, Environment, Step


class Guess(Environment):
    """Guess a number from 1 to `most`. A hint answers each wrong guess; a turn earns 1 for the number, 0.1 for a guess that
    the hints allow, else 0. `row` may hold "secret"; otherwise the seed samples it.
    """

    def __init__(self, most: int = 9) -> None:
        self.low, self.high = 1, most
        self.guesses = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        self.secret = row.get("secret") or random.Random(seed).randint(self.low, self.high)
        return [{"role": "user", "content": f"Guess my number from {self.low} to {self.high}."}]

    def step(self, completion: str) -> Step:
        self.guesses += 1
        metrics = {"guesses": float(self.guesses)}
        match = re.search(r"\d+", completion)
        if not match:
            return Step([{"role": "user", "content": "Write a number."}], reward=0.0, metrics=metrics)
        guess = int(match[0])
        reward = 0.1 if self.low <= guess <= self.high else 0.0
        if guess == self.secret:
            return Step([], reward=1.0, done=True, metrics=metrics)
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        hint = "higher" if guess < self.secret else "lower"
        return Step([{"role": "user", "content": f"My number is {hint}."}], reward=reward, metrics=metrics)


class Strict(Guess):
    """Reads only what it expects."""

    def step(self, completion: str) -> Step:
        return Step([], reward={"a guess": 1.0}[completion])


class AsyncGuess(Guess):
    """The same game, in coroutines."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(row, seed)

    async def step(self, completion: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(completion)


class Flaky(Guess):
    """Fails at the second guess as often as its row says, counted in a file, for all processes."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        self.row, self.calls = row, 0
        return super().reset(row, seed)

    def step(self, completion: str) -> Step:
        self.calls += 1
        file = Path(self.row["file"])
        failures = len(file.read_text()) if file.exists() else 0
        if self.calls == 2 and failures < self.row["times"]:
            file.write_text("x" * (failures + 1))
            if self.row["act"] == "exit":
                os._exit(3)
            raise OSError("the service is away")
        return super().step(completion)


class Slow(Environment):
    """Three turns with a reward of 1 each. Every turn takes the row's seconds; with `fails`, the second one raises."""

    gives_rewards = True

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        self.row, self.turns, self.file = row, 0, Path(os.devnull).open()  # noqa: SIM115 - held until its process ends
        return [{"role": "user", "content": f"I am {row['name']}."}]

    def step(self, completion: str) -> Step:
        time.sleep(self.row["sleeps"])
        self.turns += 1
        if self.turns == 2 and self.row.get("fails"):
            raise KeyError("the second turn")
        return Step([{"role": "user", "content": "Go on."}], reward=1.0, done=self.turns == 3)
