"""An environment that gives the rewards itself. Its worker process imports this file, which imports nothing large."""

from __future__ import annotations

from typing import Any

from grpo_megatron.environments.environment import Environment, Step


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
