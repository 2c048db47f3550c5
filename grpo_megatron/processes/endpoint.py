"""POST to an HTTP endpoint, or GET without a body, with retries and one deadline. Standard library only.

A request is sent again after a lost connection and after the statuses AGAIN, with pauses of 0.1 s, 0.2 s, 0.4 s, ..., or longer
where the service asks for it (Retry-After). Neither redirects nor proxies are used, so headers reach no other host.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

FIRST_PAUSE_S = 0.1
MAX_RESPONSE = 1 << 20  # bytes
MAX_REASON = 200  # characters of the text that comes with an error status
AGAIN = {408, 429, 500, 502, 503, 504}


class EndpointError(Exception):
    """A request without a reply. `reason`: the beginning of the text that came with an error status."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class EndpointTimeout(EndpointError):
    """The deadline has passed."""


@dataclass(frozen=True)
class ServiceReply:
    """A response of status 200, and the number of attempts."""

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
    """Reads the key in an environment variable. Raises ValueError: it is not set, or no header can hold it."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"{name}={variable!r}: this environment variable is not set; export it before the start")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{name}: the environment variable {variable!r} holds characters that no HTTP header may have")
    return key


def post_json(
    url: str,
    body: bytes | None,
    headers: Mapping[str, str],
    retries: int,
    deadline_s: float,
    key: str | None = None,
    *,
    limit: int = MAX_RESPONSE,
    wait: Callable[[float, float], float] | None = None,
) -> ServiceReply:
    """Sends `body`, which is JSON, and returns the reply. Raises EndpointError after `retries` + 1 attempts or `deadline_s`.

    `key` is sent as a bearer token. It is *** in the reply and in messages, which are stored with samples. `limit`: bytes of
    the reply. `wait(seconds left, least pause)`, before each attempt: the seconds to wait.
    """
    headers = {"Content-Type": "application/json", "Connection": "close", **headers}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    end = time.monotonic() + deadline_s
    problem, reason, least_pause = "no attempt", "", 0.0
    for attempt in range(retries + 1):
        pause = max(FIRST_PAUSE_S * (1 << attempt) / 2, least_pause) if attempt else 0.0
        pause = wait(end - time.monotonic(), pause) if wait is not None else pause
        if time.monotonic() + pause >= end:
            raise EndpointTimeout(f"no answer within {deadline_s:g} s ({problem})", reason)
        time.sleep(pause)
        try:
            status, received, data = _attempt(url, body, headers, max(end - time.monotonic(), 1e-3), limit)
        except (OSError, HTTPException) as error:
            problem, reason, least_pause = f"{type(error).__name__}: {error}".replace(key or "\0", "***"), "", 0.0
            continue
        data = data if key is None else data.replace(key.encode(), b"***")
        if status == 200:
            return ServiceReply(data, received, attempt + 1)
        problem, reason = f"HTTP status {status}", data.decode("utf-8", "replace")[:MAX_REASON]
        pause_s = received.get("Retry-After", "")  # may also hold a date, which is not read
        least_pause = float(pause_s) if pause_s.isascii() and pause_s.isdigit() else 0.0
        if status not in AGAIN:
            break
    raise EndpointError(f"the service does not answer after {attempt + 1} attempts: {problem}", reason)


def _attempt(
    url: str, body: bytes | None, headers: Mapping[str, str], seconds: float, limit: int
) -> tuple[int, Message, bytes]:
    """Returns status, headers and data. A socket's time limit is for each read; the timer ends headers and bodies that drip."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection, is_late = kind(parts.hostname or "", parts.port, timeout=seconds), threading.Event()
    sockets: list[socket.socket] = []

    def stop() -> None:
        is_late.set()
        for opened in sockets:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        connection.connect()
        sockets.append(connection.sock)
        method = "GET" if body is None else "POST"
        connection.request(
            method, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, dict(headers)
        )
        response = connection.getresponse()
        data = response.read(limit + 1)
    except (OSError, HTTPException):
        if not is_late.is_set():
            raise
    finally:
        timer.cancel()
        connection.close()
    if is_late.is_set():
        raise TimeoutError("the response took too long")
    if len(data) > limit:
        raise EndpointError(f"the response has more than {limit} bytes")
    return response.status, response.headers, data
