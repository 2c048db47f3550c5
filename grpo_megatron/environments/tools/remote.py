"""The tool `remote`: one HTTP endpoint, with retries and a deadline (workers/endpoint.py).

request    POST url, application/json: {"query": "..."}
response   200, text that is shown to the model; of application/json with a text "result", that text
"""

from __future__ import annotations

import json

from grpo_megatron.environments.tool import ToolError, tools
from grpo_megatron.workers.endpoint import EndpointError, HttpResponse, post_json


@tools.register("remote")
def remote(query: str, *, url: str, retries: int = 4, deadline_s: float = 20.0, headers: dict | None = None) -> str:
    """Ask a remote service.

    Args:
        query: The question or command for the service.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the option url={url!r} is no http address")
    body = json.dumps({"query": query}).encode()
    try:
        return _text(post_json(url, body, headers or {}, retries, deadline_s))
    except EndpointError as error:
        raise ToolError(str(error)) from error


def _text(response: HttpResponse) -> str:
    text = response.data.decode("utf-8", "replace")
    if response.headers.get_content_type() == "application/json":
        value = json.loads(text)
        if isinstance(value, dict) and isinstance(value.get("result"), str):
            return str(value["result"])
    return text
