"""A server that is started by the command that a run prints, and its answers."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

START_S = 420.0  # ends a server that hangs, and one whose test was killed; an idle machine needs 20 s
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}


def argv_of(line: str) -> list[str]:
    """The words of a printed command, with the programs of the tests' environment."""
    program, *arguments = shlex.split(line)
    found = Path(sys.executable).with_name(program)
    return [str(found) if found.exists() else program, *arguments]


@contextmanager
def served(line: str, cwd: Path, log: Path) -> Iterator[httpx.Client]:
    """A client of the server that the command starts. It listens on a Unix socket: no port can be taken meanwhile."""
    with tempfile.TemporaryDirectory(prefix="serve") as folder, log.open("w") as file:
        socket = str(Path(folder) / "socket")  # at most 107 characters, which pytest's own folders may exceed
        server = subprocess.Popen(
            ["timeout", "--kill-after=5", str(START_S), *argv_of(line), "--uds", socket],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env=os.environ | QUIET,
            start_new_session=True,
        )
        try:
            client = httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url="http://server", timeout=120)
            with client:
                _wait_until_ready(server, client, log)
                yield client
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # the engine's processes too
            server.wait()


def _wait_until_ready(server: subprocess.Popen[bytes], client: httpx.Client, log: Path) -> None:
    while True:
        try:
            server.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            pass
        else:
            raise AssertionError(f"the server has ended:\n{log.read_text()[-3000:]}")
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            continue


def ask(client: httpx.Client, **request: Any) -> dict[str, Any]:
    """The server's completion of a prompt: its "text" and "finish_reason"."""
    answer = client.post("/v1/completions", json=request)
    assert answer.is_success, answer.text
    [choice] = answer.json()["choices"]
    return dict(choice)
