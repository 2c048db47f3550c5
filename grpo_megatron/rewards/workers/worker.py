"""The program of one reward worker: reads one JSON line per item from stdin, writes one JSON line per result to stdout.

`RewardPool` starts it as `python -m grpo_megatron.rewards.workers.worker PARENT_PID`; it is not meant to be run by hand.
A user's reward may print, read stdin, raise, exit or crash: it has no access to the two pipes of the protocol.

    <- {"sys_path": [...]}                                                  -> {"ready": true}
    <- {"id": 7, "name": "gsm8k", "completion": "...", "answer": "72", "prompt": "...", "kwargs": {}}
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
import time
from typing import TYPE_CHECKING, Any

from grpo_megatron.rewards import RewardFunction, rewards
from grpo_megatron.rewards.composite import functions_of
from grpo_megatron.rewards.reward import parse_reward, preloads, prompt_argument
from grpo_megatron.workers.program import be_killed_first, begin, describe, reply

if TYPE_CHECKING:
    import asyncio

MEMORY_LIMIT = 2 << 30


def main() -> None:
    """Serve until stdin ends."""
    requests, replies = begin()
    be_killed_first()
    sys.path[:] = json.loads(requests.readline())["sys_path"]  # of the parent, so that a user's module is found
    reply(replies, {"ready": True})
    memory = AddressSpaceLimit()
    functions: dict[str, RewardFunction | str] = {}  # a string says why the name cannot be loaded
    for line in requests:
        request = json.loads(line)
        name = request["name"]
        if name not in functions:
            functions[name] = _load(name, request["kwargs"])
            reply(replies, {"loaded": name})  # the item's time starts here: imports do not count
        function = functions[name]
        memory.enable(not any(":" in part for part in functions_of(name, request["kwargs"])))
        start = time.perf_counter()
        result = {"error": function} if isinstance(function, str) else _grade(function, request)
        reply(replies, {"id": request["id"], "seconds": time.perf_counter() - start, **result})
    os._exit(0)  # does not wait for threads of a user's reward


def _load(name: str, kwargs: dict[str, Any]) -> RewardFunction | str:
    try:
        for part in {name, *functions_of(name, kwargs)}:
            rewards.get(part)
            if part in preloads:
                preloads[part]()
        return rewards.get(name)
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything, even SystemExit
        return describe(error)


def _grade(function: RewardFunction, request: dict[str, Any]) -> dict[str, Any]:
    completion: str = request["completion"]
    try:
        more = prompt_argument(function, request["prompt"])
        returned = function(completion, request["answer"], **request["kwargs"], **more)
        if inspect.isawaitable(returned):
            returned = _event_loop().run_until_complete(returned)
        result = parse_reward(returned, len(completion))
        return {"reward": result.reward, "metrics": result.metrics, "steps": result.steps, "texts": result.texts}
    except TimeoutError as error:
        return {"error": describe(error), "status": "timeout"}
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a reward costs its sample, not the worker
        return {"error": describe(error)}


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


if __name__ == "__main__":
    main()
