"""One grading process: reads one JSON line per item on stdin, writes one JSON line per verdict on stdout.

Started by `RewardPool` as `python -m grpo_megatron.rewards.worker PARENT_PID`; not meant to be run by hand. A user's
reward may print, read stdin, raise, exit or crash: it never sees the two pipes of the protocol.

    <- {"sys_path": [...]}                                                  -> {"ready": true}
    <- {"id": 7, "reward": "gsm8k", "completion": "...", "answer": "72", "kwargs": {}}
                               -> {"loaded": "gsm8k"} once a name, then {"id": 7, "score": 1.0, "scores": {"acc": 1.0}}
                                                                           or {"id": 7, "error": "ValueError: ..."}
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any, BinaryIO

from grpo_megatron.rewards import Reward, rewards
from grpo_megatron.rewards.reward import read_result

MAX_MESSAGE = 500  # characters of an exception's text
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until stdin ends."""
    _die_with_parent(int(sys.argv[1]))
    requests, replies = _take_pipes()
    sys.path[:] = json.loads(requests.readline())["sys_path"]  # the parent's, so that a user's module is found
    _reply(replies, {"ready": True})
    functions: dict[str, Reward | str] = {}  # a string: why the name cannot be loaded
    for line in requests:
        request = json.loads(line)
        name = request["reward"]
        if name not in functions:
            functions[name] = _load(name)
            _reply(replies, {"loaded": name})  # the item's clock starts here: an import is not the sample's fault
        function = functions[name]
        verdict = {"error": function} if isinstance(function, str) else _score(function, request)
        _reply(replies, {"id": request["id"], **verdict})
    os._exit(0)  # a user's threads do not keep the process


def _load(name: str) -> Reward | str:
    try:
        return rewards.get(name)
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything, SystemExit too
        return _describe(error)


def _score(function: Reward, request: dict[str, Any]) -> dict[str, Any]:
    try:
        score, scores = read_result(function(request["completion"], request["answer"], **request["kwargs"]))
        return {"score": score, "scores": scores}
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a reward costs its sample, not the worker
        return {"error": _describe(error)}


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
    except Exception:  # noqa: BLE001 - an exception whose __str__ raises
        return type(error).__name__


def _reply(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The protocol's two pipes under new numbers; afterwards fd 0 is empty and what is printed goes to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return requests, replies


def _die_with_parent(parent: int) -> None:
    """Also while a reward hangs in C and cannot notice the end of stdin. And first in line when memory runs out."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    if os.getppid() != parent:
        os._exit(1)  # it died before the call above


if __name__ == "__main__":
    main()
