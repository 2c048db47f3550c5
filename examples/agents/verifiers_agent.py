"""verifiers v1: a taskset with its harness plays the row, asks the model at the run's endpoint, and scores its own trace.

    python verifiers_agent.py rows '{"taskset": {"id": "my-taskset"}}' > train.jsonl       # its tasks as rows

    rollout:
      multi_turn:
        environment: command
        kwargs: {command: [VERIFIERS/bin/python, examples/agents/verifiers_agent.py, '{"taskset": {"id": "my-taskset"}}']}

The text is verifiers' `[env]` block as JSON: taskset, and for the seat `agent` its harness, runtime and limits. The runtime is
`subprocess` unless it names another; one in a container must reach this machine's loopback. verifiers 0.4 pins an older `openai`
and `mcp` than vLLM, so it has an environment of its own: VERIFIERS (`python -m venv`, `pip install "verifiers>=0.4,<0.5"`).

One agent plays: its conversation is the trajectory, its rewards are summed up as verifiers does. A harness that rewrites its
history gets a 400, as every client of the endpoint.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

Json = dict[str, Any]


def make_environment(text: str) -> Any:
    """verifiers' environment of the `[env]` block."""
    block: Json = json.loads(text)
    block["agent"] = {"runtime": {"type": "subprocess"}, **block.get("agent", {})}
    return load_environment(resolve_env_config(block))


def write_rows(environment: Any) -> None:
    """One row per task: its place in the taskset, and its prompt for the logs."""
    for task in environment.taskset:
        prompt = task.data.prompt
        text = prompt if isinstance(prompt, str) else "\n\n".join(str(part.content) for part in prompt or [])
        print(json.dumps({"prompt": text or "-", "answer": "", "idx": task.data.idx}))


async def play(environment: Any, number: int) -> vf.Trace:
    """The trace of the task at this place. Raises RuntimeError with what verifiers says of a failure."""
    task = next(iter(environment.taskset.include(idx=[number])), None)
    if task is None:
        raise RuntimeError(f"idx={number}: the taskset has no such task; write the rows anew")
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(task, ModelContext(model=os.environ["OPENAI_MODEL"], client=client))
    errors = [error for one in (episode, *episode.traces) for error in one.errors]
    if not episode.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok")
    if len(episode.traces) != 1:
        raise RuntimeError(f"{len(episode.traces)} agents have played; a trajectory is the conversation of one")
    return episode.traces[0]


def main() -> None:
    """One trajectory, or with `rows` a data file."""
    if sys.argv[1] == "rows":
        return write_rows(make_environment(sys.argv[2]))
    row = json.loads(sys.stdin.readline())["row"]
    trace = asyncio.run(play(make_environment(sys.argv[1]), row["idx"]))
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in {**trace.metrics, **scores}.items() if value is not None}
    return print(json.dumps({"reward": trace.reward, "metrics": metrics}))


if __name__ == "__main__":
    main()
