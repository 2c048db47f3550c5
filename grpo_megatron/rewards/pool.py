"""RewardPool: rewards in processes that can be killed. One that raises, hangs, prints or dies costs only its own sample.

Every call has a wall-clock time limit; a process that misses it is killed and replaced (processes/pool.py). A batched or
async reward gets several items in one call: those that are ready when a worker is free, spread over the free workers. One
that `compares` gets all at once. Items of a common call that took too long, or ended its worker, are graded one by one.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from grpo_megatron.processes.pool import STARTUP_TIMEOUT_S, Limits, PoolClient, ProcessAnswer, ProcessPool, printable
from grpo_megatron.rewards.calling import COMPOSITE, Components
from grpo_megatron.rewards.reward import (
    PIXELS,
    ItemFields,
    Kwargs,
    RewardItem,
    RewardResult,
    RewardSignature,
    read_signature,
    rewards,
)

logger = logging.getLogger(__name__)

QUEUED = 2  # calls per worker: one in work, one that waits for it; more would wait behind a slow one
MAX_REPLY = 1 << 24  # bytes of one answer; the result of a sample usually has some hundred
WORKERS_PER_HOST = 16
QUICK_S, QUICK_SIZE = 0.001, 16  # seconds per sample; samples of one message

Item = RewardItem | tuple[str, str, str] | tuple[str, str, str, str]  # (reward name, completion, answer[, prompt])


@dataclass
class Worker:
    """One process, named by `key`. `calls` without an answer, oldest first: (reward, items); without items: an import."""

    key: str
    calls: deque[tuple[str, list[int]]] = field(default_factory=deque)
    loaded: set[str] = field(default_factory=set)  # the rewards whose import was asked for

    @property
    def num_calls(self) -> int:
        """Counts calls with items."""
        return sum(1 for _, numbers in self.calls if numbers)


NO_NUMBERS = ("nan", "inf", "-inf", "none")  # an entry that reads so was meant as a metric


class RewardPool(PoolClient):
    """`num_workers` processes; `timeout_s` wall-clock seconds per item; `kwargs` go to every reward function, but
    `components` to the reward COMPOSITE.

    `grade` waits for the results of a batch. `begin`, `submit`, `serve` and `collect` are its parts, for a busy caller.
    Use the pool in a `with` block, or call `close`, and from one thread. `counts` sums the statuses of all graded
    items. Raises ValueError when `kwargs` are no JSON; `check_reward` checks the names of rewards.
    """

    def __init__(
        self, num_workers: int = 1, timeout_s: float = 10.0, kwargs: Kwargs | None = None, components: Components = ()
    ) -> None:
        if num_workers < 1 or timeout_s <= 0:
            raise ValueError(f"reward.num_workers={num_workers} and reward.timeout_s={timeout_s} must be positive")
        self.num_workers, self.timeout_s = num_workers, timeout_s
        self.kwargs, self._composite = dict(kwargs or {}), {"components": list(components)}
        self.counts: Counter[str] = Counter()
        self._keys = map(str, itertools.count())
        self._workers = [Worker(next(self._keys)) for _ in range(num_workers)]
        self._named: set[tuple[str, str]] = set()  # (reward, entry) that was reported to be no metric
        hosts = -(-num_workers // WORKERS_PER_HOST)
        program = "grpo_megatron.rewards.calling:open_graders"
        settings = {"kwargs": self.kwargs, **self._composite}
        what = "reward", "reward.kwargs"
        self._processes = ProcessPool(*what, program, settings, Limits(MAX_REPLY), self._accept, hosts)
        self._seconds: dict[str, float] = {}  # reward -> per sample, in its last call
        # the batch in progress
        self._queue = CallQueue({}, {}, {})
        self._items: list[RewardItem] = []
        self._results: list[RewardResult | None] = []
        self._unloadable: dict[str, str] = {}

    def grade(self, items: Sequence[Item], *, quiet: bool = False) -> list[RewardResult]:
        """Returns one result per (reward name, completion, answer), in order; NaN where the function failed.

        `quiet`: the caller reports failures. Raises RuntimeError when worker processes cannot start, or when the pool is
        closed.
        """
        self.begin()
        for item in items:
            self.submit(item)
        return self.collect(quiet=quiet)

    def begin(self) -> None:
        """Starts a batch: `submit` each item, `collect` the results. An interrupted batch is dropped. Raises as `grade`."""
        self._drop_batch()
        self._queue = CallQueue(self.kwargs, self._composite, self._seconds)
        self._processes.serve(block=False)  # notices what has ended between two batches; raises in a closed pool

    def submit(self, item: Item) -> None:
        """Adds an item to the batch. Returns at once: the workers grade while the caller does other work."""
        item = item if isinstance(item, RewardItem) else RewardItem(*item)
        self._queue.add(len(self._items), item.name)
        self._items.append(item)
        self._results.append(None)
        if not self._queue.reward(item.name).shares_calls:
            self._hand_out()

    def serve(self) -> None:
        """Takes the results that are there and hands out further items, without waiting. Call it often. Raises as `grade`."""
        if not self._is_complete():
            self._processes.serve(block=False)
            self._hand_out()

    def collect(self, *, quiet: bool = False) -> list[RewardResult]:
        """Waits for the results of the batch, in the order of `submit`. Raises as `grade` does."""
        results = self._wait()
        self.counts.update(result.status for result in results)
        failed = [result for result in results if result.status in ("error", "timeout")]
        if failed and not quiet:
            timeouts = sum(result.status == "timeout" for result in failed)
            message = "%d of %d samples could not be graded (%d timeouts); the first: %s"
            logger.warning(message, len(failed), len(results), timeouts, failed[0].message)
        return results

    def _drop_batch(self) -> None:
        for worker in [worker for worker in self._workers if worker.calls]:  # interrupted: nothing waits for these
            self._replace(worker)
        self._queue.clear()
        self._items, self._results, self._unloadable = [], [], {}

    def _is_complete(self) -> bool:
        return not self._queue and not any(worker.calls for worker in self._workers)

    def _wait(self) -> list[RewardResult]:
        try:
            self._hand_out(all_are_there=True)
            while not self._is_complete():
                self._processes.serve(block=True)
                self._hand_out(all_are_there=True)
            results = [result for result in self._results if result is not None]
            assert len(results) == len(self._items)
            return results
        finally:
            self._drop_batch()

    def _hand_out(self, *, all_are_there: bool = False) -> None:
        """Gives items to idle workers, oldest first, evenly. `all_are_there`: the batch will not grow any more."""
        for queued in range(QUEUED):
            for position, worker in enumerate(self._workers):
                while worker.num_calls <= queued:
                    free = sum(1 for other in self._workers[position:] if not other.num_calls)
                    numbers = self._queue.take(free, all_are_there=all_are_there)
                    if not numbers:
                        break
                    self._call(worker, self._items[numbers[0]].name, numbers)

    def _call(self, worker: Worker, name: str, numbers: list[int]) -> None:
        if name in self._unloadable:
            self._fail(numbers, "error", self._unloadable[name])
            return
        reward = self._queue.reward(name)
        timeout_s = self._limit(name)
        request = {"name": name, "samples": [], "timeout_s": timeout_s}
        if name not in worker.loaded:  # a request of its own: imports have more time than samples
            worker.loaded.add(name)
            worker.calls.append((name, []))
            self._processes.submit(worker.key, request, STARTUP_TIMEOUT_S)
        worker.calls.append((name, numbers))
        samples = [reward.sample(self._items[number]) for number in numbers]
        seconds = timeout_s * (1 if reward.is_quick else len(numbers))
        self._processes.submit(worker.key, {**request, "samples": samples}, seconds)

    def _limit(self, name: str) -> float:
        """Returns the seconds of a sample."""
        return max(self.timeout_s, self._queue.reward(name).least_timeout_s)

    def _accept(self, key: str, answer: ProcessAnswer) -> None:
        """Takes an answer of a process: that to the oldest call of the worker `key`."""
        worker = next((worker for worker in self._workers if worker.key == key), None)
        if worker is None:
            return  # it has been replaced, and answers its later calls
        name, numbers = worker.calls.popleft()
        if answer["status"] == "ok":
            try:  # the user's code runs in the process that sent it, and may change anything
                results = msgspec.convert(answer["value"], list[RewardResult])
                for number, result in zip(numbers, results, strict=True):
                    self._results[number] = self._presented(name, result)
            except (ValueError, KeyError):
                answer = {**answer, "status": "died", "message": "has sent a wrong answer", "output": ""}
            else:
                if results:
                    self._seconds[name] = sum(result.seconds for result in results) / len(results)
                return
        self._lose(worker, name, numbers, answer)

    def _lose(self, worker: Worker, name: str, numbers: list[int], answer: ProcessAnswer) -> None:
        """Handles a process that failed in a call: fails its items, or grades them one by one; puts others back."""
        status: Literal["error", "timeout"] = "timeout" if answer["status"] == "timeout" else "error"
        message = f"the reward's process {answer['message']}"
        if status == "timeout":
            reason = f"{self._limit(name):g} s (reward.timeout_s)" if numbers else f"{STARTUP_TIMEOUT_S:g} s"
            message = f"no result after {reason}; killed"
        message += answer["output"]
        for other, items in reversed(worker.calls):
            self._queue.put_back(other, items, one_by_one=len(items) == 1)
        self._replace(worker)
        if not numbers:  # it died while importing: do not import again in this batch
            self._unloadable[name] = f"its module could not be imported; {message}"
        elif len(numbers) > 1 and not self._queue.reward(name).compares:
            self._queue.put_back(name, numbers, one_by_one=True)
        else:
            self._fail(numbers, status, message)

    def _replace(self, worker: Worker) -> None:
        """Kills the process of a worker. The worker's next call starts another one."""
        self._processes.end(worker.key)
        worker.key = next(self._keys)
        worker.calls.clear()
        worker.loaded.clear()

    def _fail(self, numbers: Sequence[int], status: Literal["error", "timeout"], message: str) -> None:
        for number in numbers:
            result = RewardResult(math.nan, status=status, message=message)
            self._results[number] = self._presented(self._items[number].name, result)

    def _presented(self, name: str, result: RewardResult) -> RewardResult:
        """Makes a result's texts printable. Warns of the entries that were meant as numbers, once for each."""
        for key, text in result.texts.items():
            if text.lower() in NO_NUMBERS and (name, key) not in self._named:
                self._named.add((name, key))
                message = "reward %r: its entry %r is %s, so it is no metric; it is written beside the logged samples"
                logger.warning(message, name, key, text)
        if not (result.message or result.texts):
            return result
        message = printable(f"reward {name!r}: {result.message}") if result.message else ""
        return replace(result, message=message, texts={key: printable(text) for key, text in result.texts.items()})


class PlannedReward:
    """One reward as its signature describes it, planned once per batch. A user's module is not imported here.

    `check_reward` has imported it where a run was validated. Otherwise the function is called for one item at a time,
    with all that is known of it. `seconds`: per sample, as far as known.
    """

    def __init__(self, name: str, kwargs: Kwargs, seconds: float = math.inf) -> None:
        signature = _signature(name)
        facts = rewards.facts(name) if signature else rewards.defaults
        self.compares = facts.compares
        self.is_quick = seconds < QUICK_S and ":" not in name and name != COMPOSITE  # a message may have several items
        is_shared = signature and (signature.takes_lists or inspect.iscoroutinefunction(rewards.get(name)))
        self.size = facts.batch_size if is_shared else 1  # the most items of one call
        self.shares_calls = self.size > 1 or self.compares
        parts: Components = [{"function": name, "kwargs": kwargs}]
        parts = kwargs["components"] if name == COMPOSITE else parts
        self._columns = [_columns(part["function"], part["kwargs"]) for part in parts]
        known = [part["function"] for part in parts if _signature(part["function"])]
        self.least_timeout_s = max((rewards.facts(one).least_timeout_s for one in known), default=0.0)
        self._reads_pixels = any(PIXELS in one.names for part in parts if (one := _signature(part["function"])))

    def sample(self, item: RewardItem) -> ItemFields:
        """Returns what the worker gets of an item: all but the columns that nothing reads."""
        columns = item.columns
        if None not in self._columns:
            read = set().union(*filter(None, self._columns))
            columns = {name: value for name, value in columns.items() if name in read}
        pixels = {PIXELS: item.columns[PIXELS]} if self._reads_pixels and item.columns.get("images") else {}
        return {**item._asdict(), "columns": {**columns, **pixels}}


def _signature(name: str) -> RewardSignature | None:
    if ":" in name and name.partition(":")[0] not in sys.modules:
        return None
    try:
        return read_signature(rewards.get(name), batch=rewards.facts(name).batch)
    except ValueError:  # its worker says why it cannot be called
        return None


def _columns(name: str, kwargs: Kwargs) -> set[str] | None:
    """Returns the columns that a function reads; None: all."""
    signature = _signature(name)
    columns = signature.columns(kwargs) if signature else None
    return columns if signature is None or rewards.facts(name).takes_columns else columns or set()


class CallQueue:
    """The items of a batch that no worker has yet; items are numbers. False when it is empty.

    `kwargs` go to every function, `composite` to the sum of components. `seconds`: of each reward, per sample.
    """

    def __init__(self, kwargs: Kwargs, composite: Kwargs, seconds: Mapping[str, float]) -> None:
        self._kwargs, self._composite, self._seconds = kwargs, composite, seconds
        self._rewards: dict[str, PlannedReward] = {}
        self._waiting: dict[str, deque[int]] = {}  # reward -> its items
        self._alone: deque[int] = deque()  # graded one by one, after a call of several that was not finished

    def __bool__(self) -> bool:
        return bool(self._alone) or any(self._waiting.values())

    def clear(self) -> None:
        """Drops all items."""
        self._waiting.clear()
        self._alone.clear()

    def reward(self, name: str) -> PlannedReward:
        """Plans the reward called `name`, once per batch."""
        if name not in self._rewards:
            kwargs = self._composite if name == COMPOSITE else self._kwargs
            self._rewards[name] = PlannedReward(name, kwargs, self._seconds.get(name, math.inf))
        return self._rewards[name]

    def add(self, number: int, name: str) -> None:
        """Puts an item behind all others of its reward."""
        self._waiting.setdefault(name, deque()).append(number)

    def put_back(self, name: str, numbers: Sequence[int], *, one_by_one: bool = False) -> None:
        """Puts items in front of all others, in this order. `one_by_one`: each in a call of its own."""
        queue = self._alone if one_by_one else self._waiting.setdefault(name, deque())
        queue.extendleft(reversed(numbers))

    def take(self, num_free: int, *, all_are_there: bool) -> list[int]:
        """Takes the items of the next call, oldest first; none where nothing is to be called now.

        `num_free`: workers without a call, of which the next one gets this. With none of them, the call waits in a
        worker's pipe: only a single item, or a quick reward, does. `all_are_there`: no more items will be added.
        """
        if self._alone:
            return [self._alone.popleft()]
        for name, queue in sorted(self._waiting.items(), key=lambda entry: entry[1][0] if entry[1] else -1):
            reward = self.reward(name)
            size = QUICK_SIZE if reward.is_quick else 1
            if reward.compares:
                size = len(queue) if num_free and all_are_there else 0
            elif reward.shares_calls:
                size = min(reward.size, -(-len(queue) // num_free)) if num_free else 0
            if queue and size:
                return [queue.popleft() for _ in range(min(size, len(queue)))]
        return []
