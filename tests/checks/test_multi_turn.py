"""The section `rollout.multi_turn` against the rest of the config: each message names the key and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.methods import method_problems
from grpo_megatron.checks.names import check_environment, environment_problems, reward_name_problems
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.environments.environment import ChatMessage, Environment, Step
from tests.runs import texts

HERE = "tests.checks.test_multi_turn"


class Game(Environment):
    gives_rewards = True

    def __init__(self, level: int = 1) -> None:
        self.level = level

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        return []

    def step(self, completion: str) -> Step:
        return Step([])


class Talk(Game):
    gives_rewards = False


def not_an_environment() -> None: ...


def config(multi_turn: dict[str, Any], **sections: dict[str, Any]) -> Config:
    rollout = {"multi_turn": multi_turn, **sections.pop("rollout", {})}
    raw = {"model": {"path": "m"}, "data": {"task": "gsm8k"}, "rollout": rollout, **sections}
    return Config.model_validate(raw)


TALK = {"environment": f"{HERE}:Talk"}
GAME = {"environment": f"{HERE}:Game"}
CASES: dict[str, tuple[Config, str]] = {
    "unknown": (config({"environment": "tool"}), "unknown environment 'tool'; did you mean 'tools'?"),
    "no module": (config({"environment": "no.such:Thing"}), "cannot import module 'no.such'"),
    "no class": (config({"environment": f"{HERE}:not_an_environment"}), "is no subclass of"),
    "plain text": (config(TALK, data={"apply_chat_template": False}), "set data.apply_chat_template=true"),
    "tasks": (config(TALK, data={"val_tasks": ["math500"]}), "name the files in data.val_files"),
    "long observations": (
        config({**TALK, "max_tool_response_length": 400}, data={"max_response_length": 400}),
        "max_tool_response_length=400 tokens of one observation leave no turn in data.max_response_length=400",
    ),
    "two graders": (config(GAME, reward={"function": "gsm8k"}), "reward.function='gsm8k' would not be called"),
    "a sum beside": (
        config(GAME, reward={"components": [{"name": "format"}]}),
        "reward.components would not be called",
    ),
    "replaced": (
        config(GAME, reward_model={"path": "rm", "combine": "replace"}),
        "reward_model.combine=replace would discard them; set combine=add",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_work_is_refused(case: str) -> None:
    wrong, expected = CASES[case]
    (problem,) = texts(environment_problems(wrong))
    assert expected in problem


@pytest.mark.parametrize("multi_turn", [{}, TALK, GAME, {"environment": "tools", "tools": ["calculator"]}])
def test_what_works_is_accepted(multi_turn: dict[str, Any]) -> None:
    assert texts(environment_problems(config(multi_turn, data={"task": "gsm8k"}))) == []


def test_an_environment_that_grades_needs_no_reward_function(tmp_path: Path) -> None:
    task = tmp_path / "quiz.yaml"
    task.write_text("name: quiz\nversion: 1\ntitle: Quiz\nquestion: ['{q}']\nanswer: [{field: a}]\n")
    data = {"task": str(task)}
    assert texts(reward_name_problems(config(GAME, data=data))) == []
    (problem,) = texts(reward_name_problems(config(TALK, data=data)))
    assert "has no reward of its own" in problem


def test_single_turns_may_have_rewards() -> None:
    steps = {"adv_estimator": "grpo_process"}
    assert texts(method_problems(config(GAME, algorithm=steps))) == []
    assert len(texts(method_problems(config({}, algorithm=steps)))) == 1


def test_an_environment_is_made_once_before_the_run() -> None:
    class Tokenizer:
        chat_template, eos_token_id = None, 1

    with pytest.raises(ConfigError, match="cannot be made with .*'depth': 3.*; correct rollout.multi_turn.kwargs"):
        check_environment(config({**GAME, "kwargs": {"depth": 3}}), Tokenizer())
    with pytest.raises(ConfigError, match="the tokenizer has none; set data.chat_template"):
        check_environment(config(GAME), Tokenizer())
