"""One grading process: reads one JSON line per item on stdin, writes one JSON line per verdict on stdout.

Started by `RewardPool` as `python -m grpo_megatron.rewards.workers.worker PARENT_PID`; not meant to be run by hand. A user's
reward may print, read stdin, raise, exit or crash: it never sees the two pipes of the protocol.

    <- {"sys_path": [...]}                                                  -> {"ready": true}
    <- {"id": 7, "reward": "gsm8k", "completion": "...", "answer": "72", "kwargs": {}}
            -> {"loaded": "gsm8k"} once a name, then {"id": 7, "score": 1.0, "scores": {"acc": 1.0}, "steps": []}
                                                  or {"id": 7, "error": "ValueError: ..."}
                                                  or {"id": 7, "error": "...", "status": "timeout"}

The rewards of this package may map MEMORY_LIMIT bytes more than they found; a user's own has no limit from here.
A reward that raises TimeoutError has given up on its sample by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from grpo_megatron.rewards import Reward, rewards
from grpo_megatron.rewards.reward import preloads, read_result

MEMORY_LIMIT = 2 << 30
MAX_MESSAGE = 500  # characters of an exception's text
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until stdin ends."""
    _die_with_parent(int(sys.argv[1]))
    requests, replies = _take_pipes()
    sys.path[:] = json.loads(requests.readline())["sys_path"]  # the parent's, so that a user's module is found
    _reply(replies, {"ready": True})
    memory = Memory()
    functions: dict[str, Reward | str] = {}  # a string: why the name cannot be loaded
    for line in requests:
        request = json.loads(line)
        name = request["reward"]
        if name not in functions:
            functions[name] = _load(name)
            _reply(replies, {"loaded": name})  # the item's clock starts here: an import is not the sample's fault
        function = functions[name]
        memory.limit(":" not in name)
        verdict = {"error": function} if isinstance(function, str) else _score(function, request)
        _reply(replies, {"id": request["id"], **verdict})
    os._exit(0)  # a user's threads do not keep the process


def _load(name: str) -> Reward | str:
    try:
        function = rewards.get(name)
        if name in preloads:
            preloads[name]()
        return function
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything, SystemExit too
        return _describe(error)


def _score(function: Reward, request: dict[str, Any]) -> dict[str, Any]:
    completion: str = request["completion"]
    try:
        returned = function(completion, request["answer"], **request["kwargs"])
        score, scores, steps = read_result(returned, len(completion))
        return {"score": score, "scores": scores, "steps": steps}
    except TimeoutError as error:
        return {"error": _describe(error), "status": "timeout"}
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a reward costs its sample, not the worker
        return {"error": _describe(error)}


class Memory:
    """The soft limit on address space, lifted again for a user's reward in the same process."""

    def __init__(self) -> None:
        self._limited = False

    def limit(self, limited: bool) -> None:
        """MEMORY_LIMIT above what is mapped now, or none."""
        if limited == self._limited:
            return
        self._limited = limited
        with contextlib.suppress(OSError, ValueError):  # a platform that does not know it
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            with open("/proc/self/statm") as file:
                ceiling = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_LIMIT
            if hard != resource.RLIM_INFINITY:
                ceiling = min(ceiling, hard)
            resource.setrlimit(resource.RLIMIT_AS, (ceiling if limited else hard, hard))


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
