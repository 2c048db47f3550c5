"""RewardPool: rewards run in worker processes. One that raises, hangs, prints or dies costs only its own sample.

Workers are started with `subprocess`: they are never forked from a process with threads or CUDA, and they do not import
`__main__`. Every item has a wall-clock deadline; a worker that misses it is killed and replaced. What a reward has started
ends with its worker (family.py), or, after a run that was killed as a whole, when the next pool is made. One thread serves
all pipes (`selectors`), so that no worker can block the parent. Workers die with the parent, and with the *thread* that
started them (PR_SET_PDEATHSIG). A worker that was lost between two calls is replaced silently.

A batched or async reward gets several items in one call: those that are ready when a worker is free, spread over the free
workers. Which items share a call depends on time, so their rewards must not depend on each other. A reward that `compares`
gets all items at once. Items whose common call took too long, or ended its worker, are graded one by one.
"""

from __future__ import annotations

import inspect
import logging
import os
import selectors
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Literal

from grpo_megatron.processes.family import end_orphans
from grpo_megatron.processes.process import MAX_FAILED_STARTS, STARTUP_TIMEOUT_S, PipedProcess, printable
from grpo_megatron.rewards.composite import COMPOSITE, Components, functions_of
from grpo_megatron.rewards.reward import (
    ITEM_FIELDS,
    ItemFields,
    Kwargs,
    Reads,
    RewardItem,
    RewardResult,
    RewardSignature,
    as_item,
    check_json,
    read_signature,
    rewards,
)

# -- Completions whose reward is known, per reward function: the self-test of the reward workers -----------------------
# A grader that calls everything right, or everything wrong, then stops the run. `RewardPool` grades these completions
# before the first sample of each reward, in the same worker processes.

KnownReward = tuple[str, str, float]  # completion, answer, reward

_GSM8K: list[KnownReward] = [
    ("6 * 7 = 42\n#### 42", "42", 1.0),
    ("<answer> $1,234.50 </answer>", "2469/2", 1.0),
    ("so \\boxed{42}", "42", 1.0),
    ("6 * 7 = 42\n#### 43", "42", 0.0),
    ("The answer is 42.", "42", 0.0),
    ("", "42", 0.0),
]

KNOWN_REWARDS: dict[str, list[KnownReward]] = {
    "gsm8k": _GSM8K,
    "arithmetic_steps": _GSM8K,
    "gsm8k_cot_strict": [("The answer is 42.", "42", 1.0), ("The answer is 43.", "42", 0.0), ("it is 42", "42", 0.0)],
    "gsm8k_strict": [("#### 42", "42", 1.0), ("#### 43", "42", 0.0), ("it is 42", "42", 0.0)],
    "gsm8k_flexible": [("it is 42.", "42", 1.0), ("it is 43.", "42", 0.0), ("", "42", 0.0)],
    "graded": [
        ("#### 42", "42", 1.0),
        ("it is 42", "42", 0.5),
        ("#### 43", "42", 0.01),
        ("<answer>Paris.</answer>", "Paris", 1.0),
        ("<answer>Rome</answer>", "Paris", 0.01),
    ],
    "graded_answer": [
        ("<think>6 * 7</think><answer>42.0</answer>", "42", 1.0),
        ("<answer>I think it is 42</answer>", "42", 0.5),
        ("42 <answer>43</answer>", "42", 0.01),
        ("<answer>paris</answer>", "Paris", 1.0),
        ("#### 42", "42", 0.0),
    ],
    "arithmetic": [
        ("<think>8+3=11,1+7+1=9</think><answer>91</answer>", "91", 1.0),
        ("<answer>92</answer>", "91", 0.0),
        ("91", "91", 0.0),
    ],
    "format": [("#### 42", "", 1.0), ("42", "", 0.0)],
    "tag_count": [("<think>a</think><answer>b</answer>", "", 1.0), ("<think>a</think>", "", 0.5), ("42", "", 0.0)],
    "language": [("All in English.", "", 1.0), ("\u4f60\u597d", "", 0.0), ("hello \u4f60", "", 0.5)],
    "repetition": [("a b c d e", "", 0.0), ("go on and on " * 5, "", 4 / 17 - 1)],
    "math": [
        (r"so \boxed{42}.", "42", 1.0),
        (r"so $\boxed{\tfrac{1}{2}}$", "0.5", 1.0),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1.0),
        (r"\boxed{(1+x)^2}", "x^2+2x+1", 1.0),  # this one and the next need math-verify
        (r"\boxed{(1+x)^2}", "x^2+2x+2", 0.0),
        (r"\boxed{43}", "42", 0.0),
        ("The answer is 42.", "42", 0.0),
        ("", "42", 0.0),
    ],
}


# -- CallPlan: which items of a batch share one call of their reward, and what of them a worker gets -------------------


class CallPlan:
    """For the rewards of one batch: `kwargs` go to every function, `composite` to the sum of components."""

    def __init__(self, kwargs: Kwargs, composite: Kwargs) -> None:
        self._kwargs, self._composite = kwargs, composite
        self._rewards: dict[str, PlannedReward] = {}

    def kwargs(self, name: str) -> Kwargs:
        """The keyword arguments of a reward."""
        return self._composite if name == COMPOSITE else self._kwargs

    def shares_calls(self, name: str) -> bool:
        """Whether a call may have several items."""
        return self._of(name).size > 1 or self.compares(name)

    def compares(self, name: str) -> bool:
        """Whether one call has all items."""
        return self._of(name).facts.compares

    def call_size(self, name: str, num_items: int, num_free: int) -> int:
        """How many of `num_items` items the next of `num_free` free workers gets in one call."""
        if self.compares(name):
            return num_items
        return min(self._of(name).size, -(-num_items // max(1, num_free)))

    def sample(self, item: RewardItem) -> ItemFields:
        """What the worker gets of an item: completion, answer, and what the function reads."""
        reads = self._of(item.name).reads
        sample: ItemFields = {"completion": item.completion, "answer": item.answer}
        sample |= {name: getattr(item, name) for name in sorted(reads.fields)}
        columns = item.columns
        if reads.columns is not None:
            columns = {name: columns[name] for name in sorted(reads.columns) if name in columns}
        if columns:
            sample["columns"] = dict(columns)
        return sample

    def _of(self, name: str) -> PlannedReward:
        if name not in self._rewards:
            self._rewards[name] = PlannedReward(name, self.kwargs(name))
        return self._rewards[name]


class PlannedReward:
    """One reward, as its signature tells. This process imports no module for it, since an import may do anything.

    `check_reward` has imported it where a run was validated. Otherwise the function is called for one item at a time, with
    all that is known of it.
    """

    def __init__(self, name: str, kwargs: Kwargs) -> None:
        self.name, self.kwargs = name, kwargs
        self.facts = rewards.facts(name) if _is_imported(name) else rewards.defaults

    @cached_property
    def size(self) -> int:
        """The most items of one call."""
        signature = _signature(self.name)
        if signature is None:
            return 1
        is_shared = signature.takes_lists or inspect.iscoroutinefunction(rewards.get(self.name))
        return self.facts.batch_size if is_shared else 1

    @cached_property
    def reads(self) -> Reads:
        """What the function, or those of the components, read."""
        if self.name != COMPOSITE:
            return _reads(self.name, self.kwargs)
        parts: list[Mapping[str, Any]] = self.kwargs["components"]
        return reduce(Reads.joined, (_reads(part["function"], part["kwargs"]) for part in parts), Reads())


def _is_imported(name: str) -> bool:
    return ":" not in name or name.partition(":")[0] in sys.modules


def _signature(name: str) -> RewardSignature | None:
    try:
        return read_signature(rewards.get(name), batch=rewards.facts(name).batch) if _is_imported(name) else None
    except ValueError:  # its worker says why it cannot be called
        return None


def _reads(name: str, kwargs: Kwargs) -> Reads:
    signature = _signature(name)
    if signature is None:
        return Reads(frozenset(ITEM_FIELDS) - {"columns"}, None)
    facts = rewards.facts(name)
    reads = signature.reads(kwargs)
    fields = reads.fields | ({"prompt"} if facts.reads_prompt else set())
    return Reads(fields, reads.columns if facts.takes_columns else reads.columns or frozenset())


# -- The parent's side of one reward worker: the calls that are not answered yet, and one clock ------------------------

MAX_REPLY = 1 << 20  # bytes of one line; a usual result has some hundred


@dataclass
class PendingCall:
    """One call of a reward for some items: those that are not answered, in the order of their answers."""

    name: str
    numbers: deque[int]
    size: int  # how many it had


class WorkerProcess(PipedProcess):
    """The constructor starts the process. `pending` holds calls, oldest first; the first is in work."""

    def __init__(self) -> None:
        super().__init__("grpo_megatron.rewards.worker", MAX_REPLY)
        self.ready = False
        self.loaded: set[str] = set()  # names of the rewards that it has imported
        self.pending: deque[PendingCall] = deque()
        self._clock = time.monotonic()
        self.send({"sys_path": [os.path.abspath(entry) for entry in sys.path]})

    def submit(
        self,
        numbers: Sequence[int],
        name: str,
        samples: Sequence[ItemFields],
        kwargs: Mapping[str, Any],
        timeout_s: float,
    ) -> None:
        """Queue one call for the items `numbers`."""
        if not self.pending:
            self._clock = time.monotonic()
        self.pending.append(PendingCall(name, deque(numbers), len(numbers)))
        call = {"name": name, "samples": list(samples), "kwargs": kwargs, "timeout_s": timeout_s}
        self.send({"ids": list(numbers), **call})

    def deadline(self, timeout_s: float) -> float:
        """The time (time.monotonic) at which its current start, import or call times out; infinity when it is idle.

        A call has `timeout_s` for each of its items that is not answered.
        """
        if self.ready and not self.pending:
            return float("inf")
        loading = not self.ready or self.pending[0].name not in self.loaded
        return self._clock + (STARTUP_TIMEOUT_S if loading else timeout_s * len(self.pending[0].numbers))

    def extend_deadline(self, seconds: float) -> None:
        """Of the current start, import or item."""
        self._clock += seconds

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """(results that have arrived, whether more can come). After bytes that are no result, no more can come."""
        results: list[dict[str, Any]] = []
        alive = self.receive(lambda message: self._accept(message, results))
        return results, alive

    def _accept(self, message: dict[str, Any], results: list[dict[str, Any]]) -> None:
        self._clock = time.monotonic()
        if "ready" in message:
            self.ready = True
        elif "loaded" in message:
            self.loaded.add(str(message["loaded"]))
        elif self.pending and message.get("id") == self.pending[0].numbers[0] and _is_result(message):
            self.pending[0].numbers.popleft()
            if not self.pending[0].numbers:
                self.pending.popleft()
            results.append(message)
        else:
            raise ValueError("not the expected result")


def _is_result(message: dict[str, Any]) -> bool:
    if "error" in message:
        return isinstance(message["error"], str)
    if "none" in message:
        return True
    steps, texts = message.get("steps"), message.get("texts")
    return (
        isinstance(message.get("reward"), float)
        and isinstance(message.get("metrics"), dict)
        and isinstance(texts, dict)
        and all(isinstance(text, str) for text in texts.values())
        and isinstance(steps, list)
        and all(isinstance(step, list) and list(map(type, step)) == [int, float] for step in steps)
    )


# -- ItemQueue: the items of a batch that no worker has, in order, and which of them are next --------------------------


class ItemQueue:
    """Items are numbers. False when it is empty."""

    def __init__(self, plan: CallPlan) -> None:
        self._plan = plan
        self._waiting: deque[int] = deque()
        self._names: dict[int, str] = {}  # item -> its reward
        self._alone: set[int] = set()  # graded one by one, after a call of several that was not finished

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, number: int, name: str) -> None:
        """Behind all others."""
        self._waiting.append(number)
        self._names[number] = name

    def put_back(self, numbers: Sequence[int], *, one_by_one: bool = False) -> None:
        """In front of all others, in this order. `one_by_one`: each in a call of its own."""
        self._waiting.extendleft(reversed(numbers))
        if one_by_one:
            self._alone.update(numbers)

    def take(self, num_free: int, *, all_are_there: bool) -> list[int]:
        """The items of the next call; none where nothing is to be called now.

        `num_free`: workers without a call, of which the next one gets this. With none of them, the call is to wait in a
        worker's pipe: only one of a single item does. `all_are_there`: no more items will be added.
        """
        for place, number in enumerate(self._waiting):
            name = self._names[number]
            if number in self._alone or not self._plan.shares_calls(name):
                del self._waiting[place]
                return [number]
            if num_free and (all_are_there or not self._plan.compares(name)):
                return self._take_several(name, num_free)
        return []

    def _take_several(self, name: str, num_free: int) -> list[int]:
        same = [number for number in self._waiting if self._names[number] == name and number not in self._alone]
        taken = same[: self._plan.call_size(name, len(same), num_free)]
        gone = set(taken)
        self._waiting = deque(number for number in self._waiting if number not in gone)
        return taken


# -- Reports: what the user hears of the results of a pool; and results made of the workers' replies -------------------

logger = logging.getLogger(__name__)


def result_of(reply: Mapping[str, Any], name: str) -> RewardResult:
    """The result that a reply of a worker tells (worker.py), of the reward `name`."""
    seconds = reply.get("seconds", 0.0)
    if "error" in reply:
        status = "timeout" if reply.get("status") == "timeout" else "error"
        message = printable(f"reward {name!r}: {reply['error']}")
        return RewardResult(float("nan"), {}, status, message, seconds=seconds)  # type: ignore[arg-type]
    if "none" in reply:
        return RewardResult(float("nan"), status="none", seconds=seconds)
    texts = {key: printable(text) for key, text in reply["texts"].items()}
    steps = tuple((end, value) for end, value in reply["steps"])
    return RewardResult(reply["reward"], reply["metrics"], steps=steps, texts=texts, seconds=seconds)


class Reports:
    """Warnings; that an entry is no metric is told once."""

    def __init__(self) -> None:
        self._named: set[tuple[str, str]] = set()  # reward, entry

    def report_failures(self, results: Sequence[RewardResult]) -> None:
        """How many items of a batch could not be graded, and why the first one."""
        failed = [result for result in results if result.status in ("error", "timeout")]
        if failed:
            logger.warning(
                "%d of %d samples could not be graded (%d timeouts); the first: %s",
                len(failed),
                len(results),
                sum(result.status == "timeout" for result in failed),
                failed[0].message,
            )

    def name_texts(self, name: str, texts: Mapping[str, str]) -> None:
        """The entries of a result that are no metrics."""
        for key in [key for key in texts if (name, key) not in self._named]:
            self._named.add((name, key))
            logger.warning(
                "reward %r: its entry %r is no finite number, so it is no metric; it is written beside the logged samples",
                name,
                key,
            )


QUEUED = 2  # calls per worker: one in work, one in its pipe; more would wait behind a slow one
MAX_LOG = 1 << 16  # characters of the workers' output that are shown per batch

Item = RewardItem | tuple[str, str, str] | tuple[str, str, str, str]  # (reward name, completion, answer[, prompt])


class RewardPool:
    """`num_workers` processes; `timeout_s` wall-clock seconds per item; `kwargs` go to every reward function, but
    `components` to the reward COMPOSITE.

    `grade` waits for the results of a batch. `begin`, `submit`, `serve` and `collect` are its parts, for a busy caller.
    Use the pool in a `with` block, or call `close`, and from one thread. `counts` sums the statuses of
    all items that were graded. Raises ValueError when `kwargs` cannot be written as JSON; `check_reward` checks the names
    of rewards.
    """

    def __init__(
        self, num_workers: int = 1, timeout_s: float = 10.0, kwargs: Kwargs | None = None, components: Components = ()
    ) -> None:
        if num_workers < 1 or timeout_s <= 0:
            raise ValueError(f"reward.num_workers={num_workers} and reward.timeout_s={timeout_s} must be positive")
        self.num_workers, self.timeout_s = num_workers, timeout_s
        self.kwargs, self._composite = dict(kwargs or {}), {"components": list(components)}
        check_json([self.kwargs, self._composite])
        end_orphans()
        self.counts: Counter[str] = Counter()
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._tested: set[str] = set()
        self._reports = Reports()
        self._closed, self._failed_starts = False, 0
        self._log_left = MAX_LOG
        self._served_at = time.monotonic()
        # the batch in progress
        self._plan = CallPlan({}, {})
        self._queue = ItemQueue(self._plan)
        self._items: list[RewardItem] = []
        self._results: list[RewardResult | None] = []
        self._unloadable: dict[str, str] = {}

    def __enter__(self) -> RewardPool:
        self._start_missing()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. Idempotent."""
        self._closed = True
        while self._workers:
            self._remove(self._workers[0])
        self._selector.close()

    def grade(self, items: Sequence[Item], *, quiet: bool = False) -> list[RewardResult]:
        """One result per (reward name, completion, answer), in order. The reward is NaN where the function failed.

        `quiet`: the caller reports failures. Raises RuntimeError when worker processes cannot start, when a reward of this
        package fails its self-test, or when the pool is closed.
        """
        self.begin(sorted({item[0] for item in items}))
        for item in items:
            self.submit(item)
        return self.collect(quiet=quiet)

    def begin(self, names: Sequence[str]) -> None:
        """Start a batch of items with these rewards: `submit` each item, `collect` the results. Raises as `grade` does.

        What an earlier batch has left, because it was interrupted, is dropped.
        """
        self.self_test([name for name in names if name not in self._tested])
        self._begin(self.kwargs)

    def submit(self, item: Item) -> None:
        """Add an item to the batch. Returns at once: the workers grade while the caller does other work."""
        item = as_item(item)
        self._queue.add(len(self._items), item.name)
        self._items.append(item)
        self._results.append(None)
        if not self._plan.shares_calls(item.name):
            self._hand_out()

    def serve(self) -> None:
        """Take the results that are there and hand out further items, without waiting. Raises as `grade` does.

        To be called often between `begin` and `collect`: workers run out of items, and deadlines are checked here. Time
        during which the rest of an item waited in this process for the next call does not count.
        """
        if not self._is_complete():
            absence = time.monotonic() - self._served_at
            for worker in self._workers:
                if worker.wants_to_write:
                    worker.extend_deadline(absence)
            self._serve(wait=False)
            self._hand_out()
        self._served_at = time.monotonic()

    def collect(self, *, quiet: bool = False) -> list[RewardResult]:
        """Wait for the results of the batch, in the order of `submit`. Raises as `grade` does."""
        results = self._wait()
        self.counts.update(result.status for result in results)
        if not quiet:
            self._reports.report_failures(results)
        return results

    def self_test(self, names: Sequence[str] = ("gsm8k",)) -> None:
        """Grade completions whose reward is known (`rewards/known.py`). Raises RuntimeError for a wrong reward.

        `begin` calls this for each name that is new to the pool.
        """
        for name in [part for reward in names for part in functions_of(reward, self._composite)]:
            known = KNOWN_REWARDS.get(name, [])
            self._begin({})
            for completion, answer, _ in known:
                self.submit((name, completion, answer))
            for (completion, answer, reward), result in zip(known, self._wait(), strict=True):
                if result.reward != reward:
                    raise RuntimeError(
                        f"the reward workers fail their self-test: {name!r} gave {result.reward} ({result.status}"
                        f" {result.message}) instead of {reward} for completion {completion!r}, answer {answer!r}"
                    )
        self._tested.update(names)

    def _begin(self, kwargs: dict[str, Any]) -> None:
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        self._plan, self._log_left = CallPlan(kwargs, self._composite), MAX_LOG
        self._drop_batch()
        for worker in [w for w in self._workers if not w.is_running()]:
            self._remove(worker)  # it died between two batches
        self._start_missing()
        self._served_at = time.monotonic()

    def _drop_batch(self) -> None:
        for worker in [w for w in self._workers if w.pending]:  # the batch was interrupted: nothing waits for these
            self._remove(worker)
        self._queue = ItemQueue(self._plan)
        self._items, self._results, self._unloadable = [], [], {}

    def _is_complete(self) -> bool:
        return not self._queue and not any(worker.pending for worker in self._workers)

    def _wait(self) -> list[RewardResult]:
        try:
            while not self._is_complete():
                self._hand_out(all_are_there=True)
                self._serve(wait=True)
            results = [result for result in self._results if result is not None]
            assert len(results) == len(self._items)
            return results
        finally:
            self._drop_batch()

    def _hand_out(self, *, all_are_there: bool = False) -> None:
        """Give items to idle workers, oldest first, evenly. `all_are_there`: the batch will not grow any more."""
        for queued in range(QUEUED):
            for position, worker in enumerate(self._workers):
                while worker.ready and len(worker.pending) <= queued:
                    free = sum(1 for other in self._workers[position:] if other.ready and not other.pending)
                    numbers = self._queue.take(free, all_are_there=all_are_there)
                    if not numbers:
                        break
                    name = self._items[numbers[0]].name
                    if name in self._unloadable:
                        for number in numbers:
                            self._fail(number, "error", self._unloadable[name])
                    else:
                        samples = [self._plan.sample(self._items[number]) for number in numbers]
                        worker.submit(numbers, name, samples, self._plan.kwargs(name), self.timeout_s)

    def _serve(self, *, wait: bool) -> None:
        """Handle the events on the pipes, and the deadlines that have passed. `wait`: for the first of either."""
        for worker in self._workers:
            events = selectors.EVENT_WRITE if worker.wants_to_write else 0
            self._watch(worker.stdin, events, worker)
        now = time.monotonic()
        deadline = min(worker.deadline(self.timeout_s) for worker in self._workers)
        for key, _ in self._selector.select(min(max(deadline - now, 0), 60) if wait else 0):
            worker = key.data
            if worker not in self._workers:
                continue  # an earlier event of this loop replaced it
            if key.fileobj is worker.stdin:
                worker.write()
            elif key.fileobj is worker.stderr:
                self._show(worker)
            elif not self._collect(worker):
                ending = worker.kill()
                self._replace(worker, "error", f"the reward's process died: {worker.problem or ending}")
        now = time.monotonic()
        for worker in [w for w in self._workers if w.deadline(self.timeout_s) <= now]:
            worker.kill()
            self._replace(worker, "timeout", f"no result after {self.timeout_s:g} s (reward.timeout_s); killed")

    def _collect(self, worker: WorkerProcess) -> bool:
        """Take the results that have arrived. Returns False when the worker is gone or has broken the protocol."""
        replies, alive = worker.read()
        self._failed_starts = 0 if worker.ready else self._failed_starts
        for reply in replies:
            number = reply["id"]
            result = result_of(reply, self._items[number].name)
            self._reports.name_texts(self._items[number].name, result.texts)
            self._results[number] = result
        return alive

    def _fail(self, number: int, status: Literal["error", "timeout"], message: str) -> None:
        reply = {"error": message, "status": status}
        self._results[number] = result_of(reply, self._items[number].name)

    def _replace(self, worker: WorkerProcess, status: Literal["error", "timeout"], message: str) -> None:
        """Fail the item that a dead worker was working on, return its other items to the queue, start another worker."""
        current = worker.pending[0] if worker.pending else None
        self._collect(worker)  # a result may have arrived before it was killed
        self._show(worker)
        tail = worker.log_tail.strip().rpartition("\n")[2][-200:]
        message += f" (last output: {tail})" if tail else ""
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise RuntimeError(f"reward workers do not start; {message}")
        if current and worker.pending and worker.pending[0] is current:  # otherwise its last result has just arrived
            self._end_call(worker.pending.popleft(), status, message)
            if current.name not in worker.loaded:  # it died while importing: do not import again in this call
                self._unloadable[current.name] = "its module could not be imported; " + message
        for call in reversed(worker.pending):
            self._queue.put_back(call.numbers)
        worker.pending.clear()
        self._remove(worker)
        self._start_missing()

    def _end_call(self, call: PendingCall, status: Literal["error", "timeout"], message: str) -> None:
        """The worker has not finished this call: its items have failed, or, of several, are graded one by one."""
        if call.size > 1 and not self._plan.compares(call.name):
            self._queue.put_back(call.numbers, one_by_one=True)
            return
        for number in call.numbers:
            self._fail(number, status, message)

    def _start_missing(self) -> None:
        while len(self._workers) < self.num_workers:
            worker = WorkerProcess()
            self._workers.append(worker)
            self._watch(worker.stdout, selectors.EVENT_READ, worker)
            self._watch(worker.stderr, selectors.EVENT_READ, worker)

    def _remove(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        for pipe in (worker.stdin, worker.stdout, worker.stderr):
            self._watch(pipe, 0, worker)
        worker.kill()
        worker.close()

    def _watch(self, pipe: Any, events: int, worker: WorkerProcess) -> None:
        is_watched = pipe in self._selector.get_map()
        if events and not is_watched:
            self._selector.register(pipe, events, worker)
        elif is_watched and not events:
            self._selector.unregister(pipe)

    def _show(self, worker: WorkerProcess) -> None:
        """Print what a worker printed, up to MAX_LOG characters per batch."""
        text, more = worker.read_log()
        if not more:
            self._watch(worker.stderr, 0, worker)  # the reward closed it; stdout tells whether the process lives
        if text and self._log_left > 0:
            ending = "" if len(text) < self._log_left else "\n[further output of reward workers is not shown]\n"
            sys.stderr.write(text[: self._log_left] + ending)
            self._log_left -= len(text)
