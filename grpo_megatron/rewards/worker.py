"""The program of one reward worker: reads one JSON line per item from stdin, writes one JSON line per result to stdout.

`RewardPool` starts it as `python -m grpo_megatron.rewards.worker PARENT_PID`; it is not meant to be run by hand.
A user's reward may print, read stdin, raise, exit or crash: it has no access to the two pipes of the protocol.

    <- {"sys_path": [...]}                                                  -> {"ready": true}
    <- {"ids": [7], "name": "gsm8k", "samples": [{"completion": "...", "answer": "72"}], "kwargs": {}, "timeout_s": 10.0}
            -> {"loaded": "gsm8k"} once per name, then for each id, in order,
               {"id": 7, "reward": 1.0, "metrics": {"acc": 1.0}, "steps": [], "texts": {"prediction": "72"}}
                                                    or {"id": 7, "none": true}
                                                    or {"id": 7, "error": "ValueError: ..."}
                                                    or {"id": 7, "error": "...", "status": "timeout"}

Several ids are one call of a batched reward, or an async reward's samples that wait at the same time. A batched reward that
raises is called again for one sample at a time, so that only the samples fail that it cannot grade.

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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from grpo_megatron.processes.process import be_killed_first, begin, describe, reply
from grpo_megatron.rewards import rewards
from grpo_megatron.rewards.calling import BoundReward, WrongNumber
from grpo_megatron.rewards.composite import functions_of
from grpo_megatron.rewards.reward import ItemFields, RewardResult, preloads

if TYPE_CHECKING:
    import asyncio


MEMORY_LIMIT = 2 << 30
Reply = dict[str, Any]


def main() -> None:
    """Serve until stdin ends."""
    requests, replies = begin()
    be_killed_first()
    sys.path[:] = json.loads(requests.readline())["sys_path"]  # of the parent, so that a user's module is found
    reply(replies, {"ready": True})
    memory = AddressSpaceLimit()
    problems: dict[str, str | None] = {}  # name -> why it cannot be loaded; None: it can
    for line in requests:
        request = json.loads(line)
        name, kwargs = request["name"], request["kwargs"]
        if name not in problems:
            problems[name] = _load(name, kwargs)
            reply(replies, {"loaded": name})  # the time of the items starts here: imports do not count
        problem = problems[name]
        memory.enable(not any(":" in part for part in functions_of(name, kwargs)))
        start = time.perf_counter()
        count = len(request["ids"])
        results: Iterator[Reply] = iter([{"error": problem}] * count)
        if problem is None:
            results = _graded(BoundReward(name, kwargs), request["samples"], request["timeout_s"])
        for number, result in zip(request["ids"], results, strict=True):
            end = time.perf_counter()
            reply(replies, {"id": number, "seconds": end - start, **result})
            start = end
    os._exit(0)  # does not wait for threads of a user's reward


def _load(name: str, kwargs: dict[str, Any]) -> str | None:
    try:
        for part in {name, *functions_of(name, kwargs)}:
            rewards.get(part)
            if part in preloads:
                preloads[part]()
        BoundReward(name, kwargs)
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything, even SystemExit
        return describe(error)
    return None


def _graded(call: BoundReward, samples: Sequence[ItemFields], timeout_s: float) -> Iterator[Reply]:
    """One reply per sample."""
    if len(samples) > 1 and not call.signature.takes_lists:
        yield from _event_loop().run_until_complete(_graded_together(call, samples, timeout_s))
        return
    try:
        returned = call.start(samples)
        if inspect.isawaitable(returned):
            returned = _event_loop().run_until_complete(returned)
        entries = call.entries(returned, samples)
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a reward costs its sample, not the worker
        if len(samples) == 1 or call.facts.compares or isinstance(error, WrongNumber):
            yield from [_failure(error)] * len(samples)
            return
        for sample in samples:
            yield from _graded(call, [sample], timeout_s)
        return
    for entry, sample in zip(entries, samples, strict=True):
        yield _parsed(call, entry, sample)


async def _graded_together(call: BoundReward, samples: Sequence[ItemFields], timeout_s: float) -> list[Reply]:
    """The replies of samples whose async calls wait at the same time."""
    import asyncio

    async def grade(sample: ItemFields) -> Reply:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return _reply(await call.grade(sample))
        except BaseException as error:  # noqa: BLE001 - as in `_graded`
            if isinstance(error, TimeoutError) and limit.expired():
                return {"error": f"no result after {timeout_s:g} s (reward.timeout_s)", "status": "timeout"}
            return _failure(error)

    return await asyncio.gather(*map(grade, samples))


def _parsed(call: BoundReward, entry: object, sample: ItemFields) -> Reply:
    try:
        return _reply(call.parse(entry, sample))
    except BaseException as error:  # noqa: BLE001 - whatever an object of the user raises when it is read
        return _failure(error)


def _reply(result: RewardResult) -> Reply:
    if result.status == "none":
        return {"none": True}
    return {"reward": result.reward, "metrics": result.metrics, "steps": result.steps, "texts": result.texts}


def _failure(error: BaseException) -> Reply:
    return {"error": describe(error), **({"status": "timeout"} if isinstance(error, TimeoutError) else {})}


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
