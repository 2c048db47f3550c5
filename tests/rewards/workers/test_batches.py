"""A batch that grows while the caller does other work: `begin`, `submit`, `serve`, `collect`."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator

import pytest

from grpo_megatron.rewards.pool import RewardPool
from tests.rewards.workers.waiting import PATIENCE_S, wait_until

TIMEOUT_S = 3.0

MODULE = """
import os, time

def reward(completion, answer):
    match completion:
        case "raise": raise KeyError("gone")
        case "os._exit": os._exit(3)
        case "sleep": time.sleep(600)
        case "nan": return float("nan")
        case _: return float(completion)
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    folder = tmp_path_factory.mktemp("user")
    (folder / "batch_reward.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    with RewardPool(2, TIMEOUT_S) as pool:
        yield pool
    sys.path.remove(str(folder))


@pytest.mark.slow
def test_a_batch_that_grows_while_the_caller_works_gives_the_same_results(pool: RewardPool) -> None:
    names = ["1", "raise", "os._exit", "2", "sleep", "nan", "os._exit", "3", *map(str, range(4, 30))]
    items = [("batch_reward:reward", name, "") for name in names]
    expected = pool.grade(items)
    pool.begin(["batch_reward:reward"])
    pool.submit(items[0])
    wait_until(lambda: pool.serve() is None and pool._results[0] is not None)  # without `collect`
    for item in items[1:]:
        pool.submit(item)
        pool.serve()
    results = pool.collect()
    assert [(r.status, r.reward) for r in results[7:]] == [("ok", float(name)) for name in names[7:]]
    assert [r.status for r in results] == [r.status for r in expected]
    for number in (1, 4, 5):  # the messages of the others name signals and exit codes, and what was printed last
        assert results[number].message == expected[number].message


def test_an_interrupted_batch_leaves_nothing_to_the_next_one(pool: RewardPool) -> None:
    pool.begin(["batch_reward:reward"])
    for _ in range(10):
        pool.submit(("batch_reward:reward", "sleep", ""))
    pool.begin(["batch_reward:reward"])
    pool.submit(("batch_reward:reward", "5", ""))
    assert [result.reward for result in pool.collect()] == [5.0]
    assert [result.reward for result in pool.grade([("batch_reward:reward", "6", "")])] == [6.0]


def test_time_in_which_the_caller_did_not_serve_fails_no_item(
    pool: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An item whose result is there, and one too large for the pipe, of which the worker has only the beginning."""
    wait_until(
        lambda: bool(pool.grade([("batch_reward:reward", "1", "")] * 20)) and all(w.ready for w in pool._workers)
    )
    clock, away = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + away)
    pool.begin(["batch_reward:reward"])
    pool.submit(("batch_reward:reward", "1", ""))
    pool.submit(("batch_reward:reward", "2" + " " * 2_000_000, ""))
    (first,) = [w for w in pool._workers if [list(call.numbers) for call in w.pending] == [[0]]]
    assert select.select([first.stdout], [], [], PATIENCE_S)[0]
    away = 100 * TIMEOUT_S
    pool.serve()
    assert [(r.status, r.reward) for r in pool.collect()] == [("ok", 1.0), ("ok", 2.0)]
