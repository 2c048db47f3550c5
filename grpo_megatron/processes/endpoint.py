"""POST to an HTTP endpoint, with retries and a deadline: for tools and rewards that ask a service. Standard library only.

It tries again after a lost connection and after the statuses 408, 429 and 5xx, and waits 0.1 s, 0.2 s, 0.4 s, ... between,
or longer where the service says so (Retry-After). The deadline is for all attempts together, and for headers as for the body;
no attempt begins after it. Redirects and proxies are not used, so headers reach no other host. A key that the service repeats
is masked wherever it appears.
"""

from __future__ import annotations

import functools
import io
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

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
class ServiceReply:
    """A response of status 200, after so many attempts."""

    data: bytes
    headers: Message
    attempts: int


def check_url(url: str, name: str) -> None:
    """Raises ValueError unless `url` is an http address without user and password, which would be logged. `name`: its key."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ValueError(f"{name} holds a user or password, which would be logged; set api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{name}={url!r} is no http address such as http://HOST:8000/v1")


def key_of(variable: str | None, name: str) -> str | None:
    """The key in an environment variable; None without one. Raises ValueError: it is not set, or no header can hold it."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"{name}={variable!r}: this environment variable is not set; export it before the start")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{name}: the environment variable {variable!r} holds characters that no HTTP header may have")
    return key


def post_json(
    url: str, body: bytes, headers: Mapping[str, str], retries: int, deadline_s: float, key: str | None = None
) -> ServiceReply:
    """The reply to `body`, which is JSON, within `deadline_s` seconds and `retries` + 1 attempts. Raises EndpointError.

    `key` is sent as a bearer token. It is *** in the reply and in messages, which are stored with samples.
    """
    headers = {"Content-Type": "application/json", "Connection": "close", **headers}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    end = time.monotonic() + deadline_s
    problem, reason, least_pause = "no attempt", "", 0.0
    for attempt in range(retries + 1):
        pause = max(FIRST_PAUSE_S * (1 << attempt) / 2, least_pause) if attempt else 0.0
        if time.monotonic() + pause >= end:
            raise EndpointTimeout(f"no answer within {deadline_s:g} s ({problem})", reason)
        time.sleep(pause)
        try:
            status, received, data = _attempt(url, body, headers, end)
        except (OSError, HTTPException) as error:
            problem, reason, least_pause = f"{type(error).__name__}: {error}".replace(key or "\0", "***"), "", 0.0
            continue
        data = data if key is None else data.replace(key.encode(), b"***")
        if status == 200:
            return ServiceReply(data, received, attempt + 1)
        problem, reason = f"HTTP status {status}", data.decode("utf-8", "replace")[:MAX_REASON]
        least_pause = _seconds(received.get("Retry-After"))
        if status not in AGAIN:
            break
    raise EndpointError(f"the service does not answer after {attempt + 1} attempts: {problem}", reason)


def _attempt(url: str, body: bytes, headers: Mapping[str, str], end: float) -> tuple[int, Message, bytes]:
    """Status, headers and data."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_left(end))
    connection.response_class = functools.partial(_TimedResponse, end)  # type: ignore[assignment]
    try:
        connection.connect()
        connection.sock.settimeout(_left(end))
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", target, body, dict(headers))
        response = connection.getresponse()
        data = response.read(MAX_RESPONSE + 1)
        if len(data) > MAX_RESPONSE:
            raise EndpointError(f"the response has more than {MAX_RESPONSE} bytes")
        return response.status, response.headers, data
    finally:
        connection.close()


class _TimedResponse(HTTPResponse):
    """A response that is read until `end` at the latest. A time limit of a socket is for each read alone."""

    def __init__(self, end: float, sock: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_TimedReader(end, sock, self.fp))


class _TimedReader(io.RawIOBase):
    def __init__(self, end: float, sock: Any, file: Any) -> None:
        self._end, self._socket, self._file = end, sock, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(_left(self._end))
        return int(self._socket.recv_into(buffer))

    def close(self) -> None:
        self._file.close()
        super().close()


def _left(end: float) -> float:
    """Seconds until `end`. Raises TimeoutError after it."""
    if (left := end - time.monotonic()) <= 0:
        raise TimeoutError("the response took too long")
    return left


def _seconds(retry_after: str | None) -> float:
    """The header may also hold a date, which is not read."""
    return float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdigit() else 0.0
