"""How items reach rewards: calls of several items (batched, async, comparing), and batches that grow while the caller works."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator

import pytest

from grpo_megatron.rewards.pool import CallQueue, PlannedReward, RewardPool
from grpo_megatron.rewards.reward import RewardItem, check_reward
from tests.rewards.waiting import PATIENCE_S, wait_until

TIMEOUT_S = 1.5
MODULE = """
import asyncio, os, time
from grpo_megatron.rewards import rewards

@rewards.declare(batch=True, batch_size=4)
def many(completion, answer, level):
    assert len(completion) == len(answer) == len(level)
    if "raise" in completion: raise KeyError("gone")
    if "exit" in completion: os._exit(3)
    if "hang" in completion: time.sleep(600)
    return [{"score": float(text), "level": place, "size": len(level)} for text, place in zip(completion, level)]

@rewards.declare(batch=True, compares=True)
def ranks(completion, answer):
    return [sorted(completion).index(text) for text in completion]

@rewards.declare(batch=True)
def short(completion, answer): return [1.0] if len(completion) > 1 else [2.0]

def trl(prompts, completions, level, **columns):
    return [None if text == "none" else float(number) for text, number in zip(completions, level)]

def grows(solution_str, ground_truth): return {"score": 1.0 if solution_str == ground_truth else 0.0, "acc": 1}

inside = 0
@rewards.declare(batch_size=8)
async def waits(completion, answer):
    global inside
    inside += 1
    if completion == "raise": raise KeyError("gone")
    if completion == "exit": raise SystemExit(2)
    if completion == "hang": await asyncio.sleep(600)
    await asyncio.sleep(0)
    return {"score": float(completion), "inside": inside}  # all that one call has started

@rewards.declare(batch_size=1)
async def alone(completion, answer):
    global queue
    try: queue
    except NameError: queue = asyncio.Queue()  # like a client: it belongs to the loop in which it is used first
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(queue.put_nowait, completion)
    return {"score": float(await queue.get())}

def texts(completion, answer): return {"score": 1, "acc": 1.0, "said": "red \\x1b[31m", "why": None}

def plain(completion, answer):
    match completion:
        case "raise": raise KeyError("gone")
        case "os._exit": os._exit(3)
        case "sleep": time.sleep(600)
        case "nan": return float("nan")
        case _: return float(completion)
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("user")
    (folder / "shared_calls.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    for name in ("many", "ranks", "short", "trl", "grows", "waits", "alone", "texts", "plain"):
        check_reward(f"shared_calls:{name}")  # as before a run: from here on their signatures are known
    yield "shared_calls"
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def pool(module: str) -> Iterator[RewardPool]:
    with RewardPool(1, TIMEOUT_S) as pool:
        yield pool


def items(name: str, *texts: str) -> list[RewardItem]:
    return [RewardItem(f"shared_calls:{name}", text, "1", columns={"level": n}) for n, text in enumerate(texts)]


def test_a_batch_has_what_is_ready_up_to_its_size(pool: RewardPool) -> None:
    results = pool.grade(items("many", *map(str, range(10))))
    assert [result.reward for result in results] == list(range(10))
    assert [result.metrics["level"] for result in results] == list(range(10))
    assert [result.metrics["size"] for result in results] == [4] * 8 + [2] * 2


def test_a_bad_item_costs_only_itself(pool: RewardPool) -> None:
    """An exception is tried again in the same worker; a batch that ends its worker or hangs, in another one."""
    results = pool.grade(items("many", "0", "1", "raise", "3", "exit", "5", "hang", "7", "word"))
    assert [r.reward for r in results if r.status == "ok"] == [0, 1, 3, 5, 7]
    assert [r.status for r in results] == ["ok", "ok", "error", "ok", "error", "ok", "timeout", "ok", "error"]
    assert "KeyError: 'gone'" in results[2].message and "exit code 3" in results[4].message
    assert "could not convert string to float: 'word'" in results[8].message


def test_a_batch_of_the_wrong_length_fails_as_a_whole(pool: RewardPool) -> None:
    results = pool.grade(items("short", "a", "b", "c"))
    assert {r.message for r in results} == {
        "reward 'shared_calls:short': WrongNumber: the reward was called with a batch of 3 completions and returned 1 rewards;"
        " it must return a list with one reward per completion, in their order"
    }


def test_a_reward_that_compares_gets_all_at_once(pool: RewardPool) -> None:
    pool.begin()
    for item in items("ranks", *"dbcafe"):
        pool.submit(item)
        pool.serve()
    assert [result.reward for result in pool.collect()] == [3, 1, 2, 0, 5, 4]


def test_other_trainers_functions_in_workers(pool: RewardPool) -> None:
    results = pool.grade([*items("trl", "a", "none", "b"), *items("grows", "1", "2")])
    assert [r.status for r in results] == ["ok", "none", "ok", "ok", "ok"]
    assert [r.reward for r in results if r.status == "ok"] == [0, 2, 1, 0]


def test_async_items_wait_together(pool: RewardPool) -> None:
    results = pool.grade(items("waits", "1", "raise", "exit", "hang", "5"))
    assert [r.status for r in results] == ["ok", "error", "error", "timeout", "ok"]
    assert [r.metrics["inside"] for r in results if r.status == "ok"] == [5, 5]
    assert "no result after 1.5 s (reward.timeout_s)" in results[3].message
    assert pool.grade(items("waits", "7"))[0].metrics["inside"] == 6  # in the same process: no worker was killed


def test_async_items_of_one_worker_share_an_event_loop(pool: RewardPool) -> None:
    results = pool.grade(items("alone", "1", "word", "2", "3"))
    assert [r.reward for r in results if r.status == "ok"] == [1, 2, 3]


def test_entries_that_are_no_numbers_are_texts_and_those_without_value_named_once(
    pool: RewardPool, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        (result,) = pool.grade(items("texts", ""))
        assert (result.reward, result.metrics) == (1.0, {"acc": 1.0})
        assert result.texts == {"said": "red ", "why": "None"}  # without what a terminal would obey
    assert [record.message for record in caplog.records] == [
        "reward 'shared_calls:texts': its entry 'why' is None, so it is no metric; it is written beside the logged samples"
    ]


@pytest.mark.slow
def test_a_batch_that_grows_while_the_caller_works_gives_the_same_results(pool: RewardPool) -> None:
    names = ["1", "raise", "os._exit", "2", "sleep", "nan", "os._exit", "3", *map(str, range(4, 30))]
    batch = items("plain", *names)
    expected = pool.grade(batch)
    pool.begin()
    pool.submit(batch[0])
    wait_until(lambda: pool.serve() is None and pool._results[0] is not None)  # without `collect`
    for item in batch[1:]:
        pool.submit(item)
        pool.serve()
    results = pool.collect()
    assert [(r.status, r.reward) for r in results[7:]] == [("ok", float(name)) for name in names[7:]]
    assert [r.status for r in results] == [r.status for r in expected]
    for number in (1, 4, 5):  # the messages of the others name signals and exit codes, and what was printed last
        assert results[number].message == expected[number].message


def test_an_interrupted_batch_leaves_nothing_to_the_next_one(pool: RewardPool) -> None:
    pool.begin()
    for item in items("plain", *["sleep"] * 10):
        pool.submit(item)
    pool.begin()
    pool.submit(items("plain", "5")[0])
    assert [result.reward for result in pool.collect()] == [5.0]
    assert [result.reward for result in pool.grade(items("plain", "6"))] == [6.0]


def test_time_in_which_the_caller_did_not_serve_fails_no_item(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An item whose result is there, and one too large for the pipe, of which the host has only the beginning."""
    with RewardPool(2, PATIENCE_S) as pool:
        pool.grade(items("plain", *["1"] * 20))
        clock, away = time.monotonic, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: clock() + away)
        pool.begin()
        for item in items("plain", "1", "2" + " " * 4_000_000):
            pool.submit(item)
        (host,) = pool._processes._hosts
        assert select.select([host.stdout], [], [], PATIENCE_S)[0]
        away = 100 * PATIENCE_S
        pool.serve()
        assert [(r.status, r.reward) for r in pool.collect()] == [("ok", 1.0), ("ok", 2.0)]


def test_free_workers_share_what_is_ready(module: str) -> None:
    queue = CallQueue({}, {}, {})
    for number in range(6):
        queue.add(number, "shared_calls:many")
    queue.add(6, "gsm8k")
    assert queue.take(3, all_are_there=False) == [0, 1]
    assert queue.take(2, all_are_there=False) == [2, 3]
    assert queue.take(0, all_are_there=False) == [6]  # behind a call in work, only a single item waits
    queue.put_back("shared_calls:many", [0, 1], one_by_one=True)
    assert [queue.take(1, all_are_there=False) for _ in range(4)] == [[0], [1], [4, 5], []]


def test_quick_rewards_of_the_package_share_messages(module: str) -> None:
    """One that took 0.1 ms per sample does; a slow one, the user's own and a sum do not."""
    seconds = {"gsm8k": 1e-4, "math": 0.1, "shared_calls:plain": 1e-4, "composite": 1e-4}
    queue = CallQueue({}, {"components": []}, seconds)
    names = ["gsm8k"] * 3 + ["math"] * 2 + ["shared_calls:plain"] * 2 + ["composite"] * 2 + ["gsm8k"] * 20
    for number, name in enumerate(names):
        queue.add(number, name)
    queue.put_back("gsm8k", queue.take(1, all_are_there=True)[:2], one_by_one=True)
    sizes = [len(queue.take(1, all_are_there=True)) for _ in range(9)]
    assert sizes == [1, 1, 1, 1, 1, 1, 1, 1, 7] and not queue


def test_a_worker_gets_what_the_function_reads() -> None:
    about = {"prompt": "P", "messages": [{"role": "user"}], "columns": {"level": 1, "more": 2}, "completion_ids": [1]}
    components = [{"function": "shared_calls:many", "kwargs": {}}, {"function": "judge", "kwargs": {}}]

    def sent(name: str) -> object:
        planned = PlannedReward(name, {"components": components} if name == "composite" else {})
        return planned.sample(RewardItem(name, "c", "a", **about))  # type: ignore[arg-type]

    columns = {"gsm8k": {}, "shared_calls:many": {"level": 1}, "composite": {"level": 1}, "absent:f": about["columns"]}
    for name, expected in columns.items():
        known = {"name": name, "completion": "c", "answer": "a", "data_source": "", "step": 0, "is_chat": False}
        assert sent(name) == {**known, **about, "columns": expected}
