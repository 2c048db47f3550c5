"""A real OpenEnv server, `python openenv_guess.py PORT`: guess a number between 0 and 8."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    text: str = ""


class Guesses(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, number: int = 0, **kwargs: Any) -> Hint:
        self.number, self.seed = number, seed
        return Hint(text=f"seed {seed}")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        if action.number == self.number:
            return Hint(done=True, reward=1.0)
        return Hint(text="higher" if action.number < self.number else "lower", reward=-0.25)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Guesses, Guess, Hint, max_concurrent_envs=4)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
