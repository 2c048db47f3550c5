"""Harnesses of others, unmodified, on one task: find the word in word.txt. `python harnesses.py NAME` is the `command`.

mini-swe-agent and the Agents SDK of OpenAI are called as their pages say; Qwen Code is its program, without a screen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MODEL, URL = os.environ["OPENAI_MODEL"], os.environ["OPENAI_BASE_URL"]


def mini_swe_agent(prompt: str) -> str:
    os.environ |= {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    texts = {"observation_template": "{{output.output}}", "format_error_template": "{{error}}"}
    options = {"model_kwargs": {"api_base": URL}, "cost_tracking": "ignore_errors", **texts}
    templates = {"system_template": "You use bash.", "instance_template": "{{task}}"}
    model = LitellmModel(model_name=f"openai/{MODEL}", **options)
    agent = DefaultAgent(model, LocalEnvironment(), **templates, step_limit=4, cost_limit=0)
    return str(agent.run(prompt)["submission"])


def agents_sdk(prompt: str, api: str) -> str:
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_tracing_disabled(True)
    set_default_openai_api(api)

    @function_tool
    def bash(command: str) -> str:
        """Run a command."""
        return subprocess.run(command, shell=True, capture_output=True, text=True).stdout

    agent = Agent(name="reader", instructions="You use bash.", tools=[bash], model=MODEL)
    return str(Runner.run_sync(agent, prompt, max_turns=4).final_output)


def qwen_code(prompt: str) -> str:
    """It streams. Its home is the folder, so that no settings of a user's are read."""
    command = ["qwen", "--auth-type", "openai", "--yolo", "-p", prompt]
    variables = {**os.environ, "HOME": os.getcwd()}
    return subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout


HARNESSES: dict[str, Callable[[str], str]] = {
    "mini_swe_agent": mini_swe_agent,
    "agents_sdk_chat": lambda prompt: agents_sdk(prompt, "chat_completions"),
    "agents_sdk_responses": lambda prompt: agents_sdk(prompt, "responses"),
    "qwen_code": qwen_code,
}

if __name__ == "__main__":
    row = json.loads(sys.stdin.readline())["row"]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("word.txt").write_text(row["answer"])
        found = HARNESSES[sys.argv[1]](row["prompt"])
    print(float(found.strip() == row["answer"]))
