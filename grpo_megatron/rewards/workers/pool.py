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

import selectors
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from grpo_megatron.rewards.composite import Components, functions_of
from grpo_megatron.rewards.item import RewardItem, as_item
from grpo_megatron.rewards.known import KNOWN_REWARDS
from grpo_megatron.rewards.reward import Kwargs, RewardResult, check_json
from grpo_megatron.rewards.workers.calls import CallPlan
from grpo_megatron.rewards.workers.process import PendingCall, WorkerProcess
from grpo_megatron.rewards.workers.queue import ItemQueue
from grpo_megatron.rewards.workers.reports import Reports, result_of
from grpo_megatron.workers.family import end_orphans
from grpo_megatron.workers.process import MAX_FAILED_STARTS

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
