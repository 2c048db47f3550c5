"""POST to an HTTP endpoint, with retries and a deadline: for tools and rewards that ask a service. Standard library only.

It tries again after a lost connection and after the statuses 408, 429 and 5xx, and waits 0.1 s, 0.2 s, 0.4 s, ... between,
or longer where the service says so (Retry-After). The deadline is for all attempts together; no attempt begins after
it. Redirects and proxies are not used, so headers reach no other host.
"""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException
from typing import Any

FIRST_PAUSE_S = 0.1
MAX_RESPONSE = 1 << 20  # bytes
MAX_REASON = 200  # characters of the text that comes with an error status
AGAIN = {408, 429, 500, 502, 503, 504}


class EndpointError(Exception):
    """There is no response. `reason`: the beginning of the text that came with an error status."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class EndpointTimeout(EndpointError):
    """The deadline has passed."""


@dataclass(frozen=True)
class HttpResponse:
    """A response of status 200, after so many attempts."""

    data: bytes
    headers: Message
    attempts: int


class _Direct(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None  # the status of the redirect is then an error


OPENER = urllib.request.build_opener(_Direct, urllib.request.ProxyHandler({}))


def post_json(url: str, body: bytes, headers: Mapping[str, str], retries: int, deadline_s: float) -> HttpResponse:
    """The response to `body`, which is JSON, within `deadline_s` seconds and `retries` + 1 attempts. Raises EndpointError."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers}, method="POST")
    end = time.monotonic() + deadline_s
    problem, reason, least_pause = "no attempt", "", 0.0
    for attempt in range(retries + 1):
        pause = max(FIRST_PAUSE_S * (1 << attempt) / 2, least_pause) if attempt else 0.0
        if time.monotonic() + pause >= end:
            raise EndpointTimeout(f"no answer within {deadline_s:g} s ({problem})", reason)
        time.sleep(pause)
        try:
            with OPENER.open(request, timeout=max(end - time.monotonic(), 0.001)) as response:
                return HttpResponse(_read(response, end), response.headers, attempt + 1)
        except urllib.error.HTTPError as error:
            problem, reason = f"HTTP status {error.code}", _reason(error)
            least_pause = _seconds(error.headers.get("Retry-After"))
            error.close()
            if error.code not in AGAIN:
                break
        except (OSError, HTTPException) as error:
            problem, reason, least_pause = f"{type(error).__name__}: {error}", "", 0.0
    raise EndpointError(f"the service does not answer after {attempt + 1} attempts: {problem}", reason)


def _read(response: Any, end: float) -> bytes:
    """All of it. Each read has a time limit of its own, so a service that drips bytes is cut at the deadline here."""
    data = bytearray()
    while chunk := response.read1(1 << 16):
        data += chunk
        if len(data) > MAX_RESPONSE:
            raise EndpointError(f"the response has more than {MAX_RESPONSE} bytes")
        if time.monotonic() > end:
            raise socket.timeout("the response took too long")  # noqa: UP041 - handled as a lost connection
    return bytes(data)


def _reason(error: urllib.error.HTTPError) -> str:
    try:  # read1: one read, so that a service that drips bytes takes no longer
        return str(error.fp.read1(4 * MAX_REASON).decode("utf-8", "replace")[:MAX_REASON])  # type: ignore[attr-defined]
    except (OSError, HTTPException, AttributeError):
        return ""


def _seconds(retry_after: str | None) -> float:
    """The header may also hold a date, which is not read."""
    return float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdigit() else 0.0
