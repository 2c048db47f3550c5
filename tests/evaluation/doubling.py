"""An environment that gives the rewards itself, and a reward. Their processes import this file, which imports nothing large."""

from __future__ import annotations

from typing import Any

from grpo_megatron.environments.environment import Environment, Step


def nearness(completion: str, answer: str) -> dict[str, float]:
    """From 1 for the answer itself to -1 for an error of 2 or more."""
    return {"score": max(-1.0, 1.0 - abs(int(completion) - int(answer)))}


class Doubling(Environment):
    """Gives the rewards itself: half a point for each of two turns that write the row's number."""

    gives_rewards = True

    def reset(self, row: Any, seed: int) -> list[dict[str, Any]]:
        self.number, self.turns = str(row["answer"]), 0
        return [{"role": "user", "content": f"Write {self.number} twice."}]

    def step(self, completion: str) -> Step:
        self.turns += 1
        again = [] if self.turns == 2 else [{"role": "user", "content": "again"}]
        return Step(again, reward=0.5 * (self.number in completion), done=self.turns == 2)
