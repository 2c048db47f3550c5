"""The tool `remote`: one HTTP endpoint, with retries and a deadline.

    request    POST url, application/json: {"query": "..."}
    response   200, text that is shown to the model; of application/json with a text "result", that text

It tries again after a lost connection and after the statuses 408, 429 and 5xx, and waits 0.1 s, 0.2 s, 0.4 s, ... between. The
deadline is for all attempts together; no attempt begins after it. Redirects and proxies are not used.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from email.message import Message
from http.client import HTTPException
from typing import Any

from grpo_megatron.environments.tool import ToolError, tools

FIRST_PAUSE_S = 0.1
MAX_RESPONSE = 1 << 20  # of a response
AGAIN = {408, 429, 500, 502, 503, 504}


class _Direct(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None  # the status of the redirect is then an error


OPENER = urllib.request.build_opener(_Direct, urllib.request.ProxyHandler({}))


@tools.register("remote")
def remote(query: str, *, url: str, retries: int = 4, deadline_s: float = 20.0, headers: dict | None = None) -> str:
    """Ask a remote service.

    Args:
        query: The question or command for the service.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the option url={url!r} is no http address")
    body = json.dumps({"query": query}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})}, method="POST")
    end = time.monotonic() + deadline_s
    problem = "no attempt"
    for attempt in range(retries + 1):
        pause = FIRST_PAUSE_S * (1 << attempt) / 2 if attempt else 0.0
        if time.monotonic() + pause >= end:
            raise ToolError(f"no answer within {deadline_s:g} s ({problem})")
        time.sleep(pause)
        try:
            with OPENER.open(request, timeout=max(end - time.monotonic(), 0.001)) as response:
                return _text(_read(response, end), response.headers)
        except urllib.error.HTTPError as error:
            problem = f"HTTP status {error.code}"
            error.close()
            if error.code not in AGAIN:
                break
        except (OSError, HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
    raise ToolError(f"the service does not answer after {attempt + 1} attempts: {problem}")


def _read(response: Any, end: float) -> bytes:
    """All of it. Each read has a time limit of its own, so a service that drips bytes is cut at the deadline here."""
    data = bytearray()
    while chunk := response.read1(1 << 16):
        data += chunk
        if len(data) > MAX_RESPONSE:
            raise ToolError(f"the response has more than {MAX_RESPONSE} bytes")
        if time.monotonic() > end:
            raise socket.timeout("the response took too long")  # noqa: UP041 - handled as a lost connection
    return bytes(data)


def _text(data: bytes, headers: Message) -> str:
    text = data.decode("utf-8", "replace")
    if headers.get_content_type() == "application/json":
        value = json.loads(text)
        if isinstance(value, dict) and isinstance(value.get("result"), str):
            return str(value["result"])
    return text
