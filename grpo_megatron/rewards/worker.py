"""What a reward worker does: it imports the reward, calls it, and makes a reply of each result.

A host (processes/host.py) runs it. A user's reward may print, read stdin, raise, exit or crash.

    {"load": {"name": "gsm8k", "kwargs": {}}}
        -> null; a problem is the reply to each sample
    {"name": "gsm8k", "samples": [{"completion": "...", "answer": "72"}], "kwargs": {}, "timeout_s": 10.0}
        -> for each sample {"reward": 1.0, "metrics": {"acc": 1.0}, "steps": [], "texts": {}, "seconds": 0.1}
           or {"none": true, ...} or {"error": "ValueError: ...", ...} or {"error": "...", "status": "timeout", ...}

Several samples are one call of a batched reward, or an async reward's samples that wait at the same time. A batched reward
that raises is called again for one sample at a time, so that only the samples fail that it cannot grade.

A reward of this package may map MEMORY_LIMIT bytes more than were mapped before it; a user's own has no such limit.
Status "timeout": the reward has raised TimeoutError, because it limits its own time.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from grpo_megatron.processes.process import MemoryLimit, describe
from grpo_megatron.rewards import rewards
from grpo_megatron.rewards.calling import BoundReward, WrongNumber
from grpo_megatron.rewards.composite import functions_of
from grpo_megatron.rewards.reward import ItemFields, RewardResult, preloads

if TYPE_CHECKING:
    import asyncio

MEMORY_LIMIT = 2 << 30
Reply = dict[str, Any]


def open_graders(settings: dict[str, Any]) -> Callable[[], Callable[[dict[str, Any]], list[Reply] | None]]:
    """The program of the hosts: one process per worker of a RewardPool."""
    return lambda: _Grader().serve


class _Grader:
    def __init__(self) -> None:
        self._memory = MemoryLimit(MEMORY_LIMIT)
        self._problems: dict[str, str | None] = {}  # name -> why it cannot be loaded; None: it can

    def serve(self, request: dict[str, Any]) -> list[Reply] | None:
        """The replies to the samples of one call; None after an import."""
        call = request.get("load", request)
        name, kwargs = call["name"], call["kwargs"]
        if name not in self._problems:
            self._problems[name] = _load(name, kwargs)
        if "load" in request:
            return None
        samples, problem = request["samples"], self._problems[name]
        self._memory.set(not any(":" in part for part in functions_of(name, kwargs)))
        start = time.perf_counter()
        results: Iterator[Reply] = iter([{"error": problem}] * len(samples))
        if problem is None:
            results = _graded(BoundReward(name, kwargs), samples, request["timeout_s"])
        replies: list[Reply] = []
        for result in results:
            end = time.perf_counter()
            replies.append({**result, "seconds": end - start})
            start = end
        return replies


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
        if inspect.iscoroutinefunction(call.function):
            yield from _event_loop().run_until_complete(_graded_together(call, samples, timeout_s))
        else:
            for sample in samples:
                yield from _graded(call, [sample], timeout_s)
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
