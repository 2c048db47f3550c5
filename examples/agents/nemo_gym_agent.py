"""NeMo-Gym: an agent server plays the row (`POST /run`), asks the model at `policy_base_url`, and says the reward.

    python nemo_gym_agent.py rows GYM.jsonl > train.jsonl        # its rows, with what `data.task: jsonl` reads

    rollout:
      multi_turn:
        environment: command
        kwargs: {command: [python, examples/agents/nemo_gym_agent.py, "http://127.0.0.1:8001"], model: MODEL}

`policy_base_url` in the body of `/run` is read by the agents that let a trainer route each episode by itself (mini_swe_agent and
mini_swe_agent_2 in Gym 0.5.1). An agent that asks Gym's own model server has one address for all episodes, which cannot be
recorded per trajectory; it is refused, because its trajectory has no request. MODEL is Gym's `policy_model_name`. The agent must
run on this machine. Gym's client is not needed: the body is the row, the answer has `reward`.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any

TEMPERATURE = 1.0  # `rollout.temperature`; an agent may have another default, which would be refused
Json = dict[str, Any]


def to_row(gym: Json) -> Json:
    """A row of this package: the prompt, for the logs and its length, and Gym's row as a text."""
    asked = gym["responses_create_params"]["input"]
    text = asked if isinstance(asked, str) else "\n\n".join(str(item.get("content", "")) for item in asked)
    return {"prompt": text or "-", "answer": "", "gym": json.dumps(gym)}


def to_body(row: Json, url: str, key: str) -> Json:
    """The body of `/run`: Gym's row, with the samples as the run makes them, and the address of this trajectory's model."""
    gym: Json = json.loads(row["gym"])
    parameters = {**gym["responses_create_params"], "temperature": TEMPERATURE, "top_p": 1.0}
    return {**gym, "responses_create_params": parameters, "policy_base_url": url, "policy_api_key": key}


def run(address: str, body: Json) -> Json:
    """The agent's answer. Raises RuntimeError with what it says of a failure."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{address.rstrip('/')}/run", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            found: Json = json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{address}/run: {error}: {error.read(500).decode(errors='replace')}") from None
    if not isinstance(found.get("reward"), int | float):
        raise RuntimeError(f"{address}/run: its answer has no reward: {json.dumps(found)[:500]}")
    return found


def numbers(found: Json) -> dict[str, float]:
    """The metrics: the numbers beside the reward. Gym's own bookkeeping begins with an underscore."""
    known = ((name, value) for name, value in found.items() if name != "reward" and not name.startswith("_"))
    return {name: float(value) for name, value in known if isinstance(value, int | float)}


def write_rows(lines: Iterable[str]) -> None:
    """Gym's data file as one of this package."""
    for line in lines:
        print(json.dumps(to_row(json.loads(line))))


def main() -> None:
    """One trajectory, or with `rows` a data file."""
    if sys.argv[1] == "rows":
        with open(sys.argv[2]) as file:
            return write_rows(file)
    row = json.loads(sys.stdin.readline())["row"]
    found = run(sys.argv[1], to_body(row, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
    return print(json.dumps({"reward": found["reward"], "metrics": numbers(found)}))


if __name__ == "__main__":
    main()
