"""OpenEnv: an environment that a server plays (`reset`, `step`), as an environment of this package.

    rollout:
      multi_turn:
        environment: openenv_client:OpenEnv
        kwargs: {url: "http://localhost:8000", action: message, observation: echoed_message}

Each trajectory has a session of its own. In OpenEnv a session is a WebSocket, `URL/ws` (a plain POST of `/step` meets a new
environment each time), so the server must allow as many sessions as trajectories are played at once (`max_concurrent_envs`).
The client needs nothing of OpenEnv: messages are JSON, and `websockets` comes with vLLM.

The first prompt is the task's, followed by the observation of `reset`. The rewards of all steps are summed up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.environments.environment import Environment, Step

WHERE = "rollout.multi_turn.kwargs"
Json = dict[str, Any]


class OpenEnv(Environment):
    """`url`: of the server. `action`: the field of the action that gets the model's text; without it the model writes the whole
    action as a JSON object.

    `observation`: the field that the model reads; without it, it reads all of them as JSON. `reset`: fields of the row that
    the server's `reset` gets, besides `seed`.
    """

    gives_rewards = True

    def __init__(self, url: str, action: str = "", observation: str = "", reset: Sequence[str] = ()) -> None:
        scheme, separator, address = url.rstrip("/").partition("://")
        if not separator or scheme not in ("http", "https"):
            raise ValueError(f"{WHERE}.url={url!r}: write http://HOST:PORT")
        self._url = f"{'wss' if scheme == 'https' else 'ws'}://{address}/ws"
        self._action, self._observation, self._reset = action, observation, list(reset)

    @classmethod
    def preload(cls, **kwargs: Any) -> None:
        """Import the client."""
        import websockets.sync.client  # noqa: F401

    def reset(self, row: Mapping[str, Any], seed: int) -> Step:
        """Open the session. Raises KeyError for a field of `reset` that the row lacks, and RuntimeError for a server's error."""
        from websockets.sync.client import connect

        self._socket = connect(self._url, max_size=1 << 24, open_timeout=30)
        begun = self._ask("reset", {"seed": seed, **{name: row[name] for name in self._reset}})
        messages = [dict(message) for message in row["messages"]]
        if text := self._read(begun):
            messages[-1]["content"] += f"\n\n{text}"
        return Step(messages)

    def step(self, completion: str) -> Step:
        """The server's observation of the model's action. What is no action is answered as such, without a reward."""
        action: Any = {self._action: completion}
        if not self._action:
            try:
                action = json.loads(completion[completion.index("{") : completion.rindex("}") + 1])
            except ValueError as error:
                return self._said(f"Error: that is no action in JSON: {error}")
        answer = self._ask("step", action)
        if answer["done"]:
            return Step([], reward=answer["reward"], done=True)
        return self._said(self._read(answer), answer["reward"])

    def _said(self, text: str, reward: float | None = None) -> Step:
        return Step([{"role": "user", "content": text}], reward=reward)

    def _ask(self, kind: str, data: Json) -> Json:
        """{"observation", "reward", "done"}."""
        self._socket.send(json.dumps({"type": kind, "data": data}))
        answer: Json = json.loads(self._socket.recv())
        if answer["type"] != "observation":
            raise RuntimeError(f"the server answers to {kind}: {json.dumps(answer.get('data'))[:500]}")
        return {"reward": None, "done": False, **answer["data"]}

    def _read(self, answer: Json) -> str:
        seen: Json = {name: value for name, value in answer["observation"].items() if name != "metadata"}
        if not self._observation:
            return json.dumps(seen, ensure_ascii=False)
        if self._observation not in seen:
            raise KeyError(f"{WHERE}.observation={self._observation!r}: an observation has {sorted(seen)}")
        value = seen[self._observation]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
