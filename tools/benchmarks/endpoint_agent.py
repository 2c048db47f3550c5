"""The agent of `tools.benchmarks endpoint`, a function or a script: four questions by OpenAI's client."""

from __future__ import annotations

import os
import sys
from typing import Any

from openai import OpenAI

CLIENT = OpenAI(base_url="http://set.by.main", api_key="set by main")
COMPLETIONS = CLIENT.chat.completions  # the library imports it at its first use


def main() -> None:
    """Asks until the fourth answer."""
    sys.stdin.readline()
    client = CLIENT.with_options(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    messages: list[Any] = []
    for _ in range(4):
        messages.append({"role": "user", "content": "Say a number."})
        messages.append(client.chat.completions.create(model="policy", messages=messages).choices[0].message)
    print(1.0)


if __name__ == "__main__":
    main()
