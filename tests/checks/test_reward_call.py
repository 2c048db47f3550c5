"""Before anything starts, each reward is called on a real row: what fails on a right and on a wrong completion is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.reward_call import call_rewards, looks_right
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.rewards import extractors, rewards
from grpo_megatron.rewards.known import KNOWN_REWARDS
from grpo_megatron.types import Prompt

MODULE = """
import asyncio, os, time

def raises(completion, answer): raise KeyError(answer)
def words(completion, answer): return "good"
def hangs(completion, answer): time.sleep(600)
def leaves(completion, answer): os._exit(0)
def picky(completion, answer): return 1.0 / ("boxed" in completion)  # raises on a wrong completion
async def waits(completion, answer):
    await asyncio.sleep(0)
    return {"score": 1.0, "prediction": "a text"}
async def streams(completion, answer): yield 1.0
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "called_reward.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def problems_of(*names: str, **section: Any) -> list[str]:
    prompts = [Prompt(f"task/rows/{n}", (1,), "6 * 7 =", "42", "task", name) for name in names for n in range(3)]
    try:
        call_rewards(Config.model_validate({"model": {"path": "m"}, "reward": section}), prompts)
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "KeyError: '42'"),
        ("words", "ValueError: the reward is str, not a number"),
        ("hangs", "no result after 1 s (reward.timeout_s); killed"),
        ("leaves", "the reward's process died: exit code 0"),
        ("streams", "ValueError: the reward is async_generator, not a number"),
    ],
)
def test_a_reward_that_always_fails_is_refused(user_module: None, name: str, message: str) -> None:
    section = {"timeout_s": 1.0} if name == "hangs" else {}
    (problem,) = problems_of(f"called_reward:{name}", **section)
    assert problem.startswith(
        "reward.function: called on a real row (task/rows/0, answer '42'), it fails on a completion with the answer and on"
        f" one without: reward 'called_reward:{name}': {message}"
    )
    assert problem.endswith("; correct it (reward.max_failed_ratio=1 starts all the same)")
    assert problem.count(message) == 1


def test_a_reward_that_works_on_one_completion_passes(user_module: None) -> None:
    assert problems_of("called_reward:picky", "called_reward:waits") == []
    assert problems_of("called_reward:raises", max_failed_ratio=1) == []
    assert problems_of() == []


def test_each_reward_of_the_rows_is_called(user_module: None) -> None:
    problems = problems_of("called_reward:waits", "called_reward:raises", "gsm8k", "called_reward:words")
    assert [problem.split("reward '")[1].split("'")[0] for problem in problems] == [
        "called_reward:raises",
        "called_reward:words",
    ]


@pytest.mark.parametrize("name", sorted(set(KNOWN_REWARDS) & set(extractors.names())))
def test_the_right_looking_completion_is_right_to_every_grader(name: str) -> None:
    if name == "math":
        assert rewards.get(name)(looks_right("42"), "42")["score"] == 1.0
        return
    returned = rewards.get(name)(looks_right("42"), "42")
    assert (returned["score"] if isinstance(returned, dict) else returned) == 1.0
