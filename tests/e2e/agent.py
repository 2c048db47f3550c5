"""An agent with OpenAI's API and nothing but the standard library: three requests, of which one limits its answer."""

import json
import os
import sys
import urllib.request
from typing import Any


def ask(messages: list[dict[str, Any]], **options: Any) -> tuple[dict[str, Any], int]:
    """The message that the model answers, and its tokens."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, **options}).encode()
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
        found = json.load(answer)
    return found["choices"][0]["message"], found["usage"]["completion_tokens"]


row = json.loads(sys.stdin.readline())["row"]
said: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
lengths = []
for options in ({"max_tokens": 3}, {}, {"stop": ["8"]}):
    message, length = ask(said, **options)
    lengths.append(length)
    said += [message, {"role": "user", "content": "1+1="}]
print(json.dumps({"reward": lengths[0] / 3, "metrics": {"first": lengths[0], "eights": said[5]["content"].count("8")}}))
