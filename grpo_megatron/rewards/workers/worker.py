"""The program of one reward worker: reads one JSON line per item from stdin, writes one JSON line per result to stdout.

`RewardPool` starts it as `python -m grpo_megatron.rewards.workers.worker PARENT_PID`; it is not meant to be run by hand.
A user's reward may print, read stdin, raise, exit or crash: it has no access to the two pipes of the protocol.

    <- {"sys_path": [...]}                                                  -> {"ready": true}
    <- {"id": 7, "name": "gsm8k", "completion": "...", "answer": "72", "kwargs": {}}
            -> {"loaded": "gsm8k"} once per name, then
               {"id": 7, "reward": 1.0, "metrics": {"acc": 1.0}, "steps": [], "texts": {"prediction": "72"}}
                                                    or {"id": 7, "error": "ValueError: ..."}
                                                    or {"id": 7, "error": "...", "status": "timeout"}

A reward of this package may map MEMORY_LIMIT bytes more than were mapped before it; a user's own has no such limit.
Status "timeout": the reward has raised TimeoutError, because it limits its own time.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import resource
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

from grpo_megatron.child import die_with_parent
from grpo_megatron.rewards import RewardFunction, rewards
from grpo_megatron.rewards.reward import parse_reward, preloads
from grpo_megatron.rewards.workers.family import adopt_orphans

if TYPE_CHECKING:
    import asyncio

MEMORY_LIMIT = 2 << 30
MAX_MESSAGE = 500  # characters of an exception's text


def main() -> None:
    """Serve until stdin ends."""
    die_with_parent(int(sys.argv[1]))  # also while a reward hangs in C and cannot notice the end of stdin
    adopt_orphans()
    _be_killed_first()
    requests, replies = _take_pipes()
    sys.path[:] = json.loads(requests.readline())["sys_path"]  # of the parent, so that a user's module is found
    _reply(replies, {"ready": True})
    memory = AddressSpaceLimit()
    functions: dict[str, RewardFunction | str] = {}  # a string says why the name cannot be loaded
    for line in requests:
        request = json.loads(line)
        name = request["name"]
        if name not in functions:
            functions[name] = _load(name)
            _reply(replies, {"loaded": name})  # the item's time starts here: imports do not count
        function = functions[name]
        memory.enable(":" not in name)
        result = {"error": function} if isinstance(function, str) else _grade(function, request)
        _reply(replies, {"id": request["id"], **result})
    os._exit(0)  # does not wait for threads of a user's reward


def _load(name: str) -> RewardFunction | str:
    try:
        function = rewards.get(name)
        if name in preloads:
            preloads[name]()
        return function
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything, even SystemExit
        return _describe(error)


def _grade(function: RewardFunction, request: dict[str, Any]) -> dict[str, Any]:
    completion: str = request["completion"]
    try:
        returned = function(completion, request["answer"], **request["kwargs"])
        if inspect.isawaitable(returned):
            returned = _event_loop().run_until_complete(returned)
        result = parse_reward(returned, len(completion))
        return {"reward": result.reward, "metrics": result.metrics, "steps": result.steps, "texts": result.texts}
    except TimeoutError as error:
        return {"error": _describe(error), "status": "timeout"}
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a reward costs its sample, not the worker
        return {"error": _describe(error)}


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all items: a client that an async reward has opened belongs to the loop that it was opened in."""
    import asyncio  # takes as long as the start of the worker

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


class AddressSpaceLimit:
    """A soft limit on this process's address space; it can be removed again for a user's reward."""

    def __init__(self) -> None:
        self._enabled = False

    def enable(self, enabled: bool) -> None:
        """Set the limit to MEMORY_LIMIT above what is mapped now, or remove it."""
        if enabled == self._enabled:
            return
        self._enabled = enabled
        with contextlib.suppress(OSError, ValueError):  # not every platform has such a limit
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            with open("/proc/self/statm") as file:
                limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_LIMIT
            if hard != resource.RLIM_INFINITY:
                limit = min(limit, hard)
            resource.setrlimit(resource.RLIMIT_AS, (limit if enabled else hard, hard))


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
    except Exception:  # noqa: BLE001 - an exception whose __str__ raises
        return type(error).__name__


def _reply(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the two pipes of the protocol to new file descriptors. Then stdin is empty, and prints go to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return requests, replies


def _be_killed_first() -> None:
    """When memory runs out, the kernel kills this process rather than the parent."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


if __name__ == "__main__":
    main()
