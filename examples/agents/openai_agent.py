"""An agent that knows nothing of training: it asks a model by OpenAI's client, lets it call a calculator, and prints its reward.

OPENAI_BASE_URL=... OPENAI_API_KEY=... OPENAI_MODEL=... python openai_agent.py <<< '{"row": {"prompt": ..., "answer": ...}}'
A client costs 0.05 s and the first use of one 0.1 s, so this one is made where the module is imported: once for all trajectories.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

from openai import OpenAI

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute a product.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
CLIENT = OpenAI(base_url="http://set.by.main", api_key="set by main")
COMPLETIONS = CLIENT.chat.completions  # the library imports it at its first use


def compute(arguments: str) -> str:
    """Returns the tool's answer to {"expression": "45*97"}."""
    try:
        a, b = json.loads(arguments)["expression"].split("*")
        return str(int(a) * int(b))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "Error"


def main() -> None:
    """Two turns at most; right is the number in <answer>."""
    row = json.loads(sys.stdin.readline())["row"]
    client = CLIENT.with_options(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    calls = 0
    for _ in range(2):
        answer: Any = client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=messages, tools=[CALCULATOR]
        )  # type: ignore[list-item]
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            calls += 1
            messages.append({"role": "tool", "tool_call_id": call.id, "content": compute(call.function.arguments)})
    found = re.search(r"<answer>(\d+)</answer>", message.content or "")
    right = found is not None and found[1] == row["answer"]
    print(json.dumps({"reward": float(right), "metrics": {"calls": calls}}))


if __name__ == "__main__":
    main()
