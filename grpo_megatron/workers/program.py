"""What every program of a worker does first: it ends with its parent, and keeps the pipes of the protocol to itself."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from io import BufferedReader, BufferedWriter
from typing import Any

from grpo_megatron.child import die_with_parent
from grpo_megatron.workers.family import adopt_orphans

MAX_MESSAGE = 500  # characters of an exception's text


def begin() -> tuple[BufferedReader, BufferedWriter]:
    """(requests, replies): binary streams of JSON lines. The number of the parent is the program's only argument."""
    die_with_parent(int(sys.argv[1]))  # also while the user's code hangs in C and cannot notice the end of stdin
    adopt_orphans()
    return take_pipes()


def take_pipes() -> tuple[BufferedReader, BufferedWriter]:
    """Move the two pipes of the protocol to new file descriptors. Then stdin is empty, and prints go to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return requests, replies


def be_killed_first() -> None:
    """When memory runs out, the kernel kills this process rather than the parent."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def reply(replies: BufferedWriter, message: dict[str, Any]) -> None:
    """Write one message."""
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


def describe(error: BaseException) -> str:
    """Type and text of an exception, at most MAX_MESSAGE characters."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
    except Exception:  # noqa: BLE001 - an exception whose __str__ raises
        return type(error).__name__
