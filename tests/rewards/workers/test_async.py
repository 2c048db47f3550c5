"""Async rewards in a worker, and entries of a reward that are not numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import RewardResult

PATIENCE_S, TIMEOUT_S = 300.0, 3.0
MODULE = """
import asyncio, sys

def texts(completion, answer):
    return {"score": 1, "acc": 1.0, "said": "red \\x1b[31m", "why": None}

async def async_reward(completion, answer, **kwargs):
    global queue
    try: queue
    except NameError: queue = asyncio.Queue()  # like a client: it belongs to the loop in which it is used first
    match completion:
        case "raise": raise KeyError("gone")
        case "exit": sys.exit(2)
        case "sleep": await asyncio.sleep(600)
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(queue.put_nowait, completion)
    return {"score": float(await queue.get())}
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_reward.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def test_an_async_reward_is_run_to_its_end(user_module: None) -> None:
    """Items of one worker share an event loop; an item that raises, exits or hangs costs itself only."""

    def graded(workers: RewardPool, *completions: str) -> list[RewardResult]:
        return workers.grade([("other_reward:async_reward", completion, "") for completion in completions])

    with RewardPool(2, PATIENCE_S) as pool:
        results = graded(pool, "1", "2", "raise", "3", "exit", "4", "5")
    assert [result.reward for result in results if result.status == "ok"] == [1, 2, 3, 4, 5]
    assert "KeyError: 'gone'" in results[2].message
    assert "SystemExit: 2" in results[4].message
    with RewardPool(1, TIMEOUT_S) as pool:
        assert [result.status for result in graded(pool, "1", "sleep", "2")] == ["ok", "timeout", "ok"]


def test_entries_that_are_no_numbers_are_texts_and_named_once(
    user_module: None, caplog: pytest.LogCaptureFixture
) -> None:
    with RewardPool(1, PATIENCE_S) as pool:
        for _ in range(2):
            (result,) = pool.grade([("other_reward:texts", "", "")])
            assert (result.reward, result.metrics) == (1.0, {"acc": 1.0})
            assert result.texts == {"said": "red ", "why": "None"}  # without what a terminal would obey
    assert [record.message for record in caplog.records] == [
        f"reward 'other_reward:texts': its entry {key!r} is no finite number, so it is no metric; it is written beside the"
        " logged samples"
        for key in ("said", "why")
    ]
