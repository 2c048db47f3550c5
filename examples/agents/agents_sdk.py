"""OpenAI's Agents SDK, unmodified, in the sandbox of a task folder: one agent with the tool `bash`.

The SDK is an extra: `pip install "openai-agents>=0.24,<0.25"` in the run's Python. What stands at this module's top is
imported once per worker; `main` runs in a fork for each trajectory. The verifier of the folder gives the reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded
from openai import AsyncOpenAI

from grpo_megatron.environments.sandboxes.backend import run_attached

set_tracing_disabled(True)  # it would send traces to OpenAI
CLIENT = AsyncOpenAI(base_url="http://set.by.main", api_key="set by main")
COMPLETIONS = CLIENT.chat.completions  # the library imports it at its first use
SANDBOX: list[str]


@function_tool
def bash(command: str) -> str:
    """Run a command in a shell, and return what it prints."""
    return run_attached(SANDBOX, command, timeout_s=20.0).text().rstrip("\n")


def main() -> None:
    """Runs the agent on the task's instruction, for three turns at most."""
    global SANDBOX
    row = json.loads(sys.stdin.readline())["row"]
    SANDBOX = row["sandbox"]
    client = CLIENT.with_options(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    model = OpenAIChatCompletionsModel(os.environ["OPENAI_MODEL"], client)
    agent = Agent(name="worker", model=model, tools=[bash], model_settings=ModelSettings(max_tokens=48))
    with contextlib.suppress(MaxTurnsExceeded):  # it is graded as it is
        asyncio.run(Runner.run(agent, row["instruction"], max_turns=3))
