"""`reward.components` before a run: what is refused and why, what each name stands for, and what the plan shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.components import resolved_components, reward_name_problems
from grpo_megatron.checks.reward_call import call_rewards, column_problems, reward_lines
from grpo_megatron.config import Config
from grpo_megatron.types import Prompt
from grpo_megatron.untrusted import parse_yaml
from tests.runs import texts

DOCS = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"
ACCURACY = {"name": "accuracy"}


def config(*components: dict[str, Any], task: str = "gsm8k", **reward: Any) -> Config:
    section = {"components": list(components), **reward}
    return Config.model_validate({"model": {"path": "m"}, "data": {"task": task}, "reward": section})


def test_the_example_of_the_docs_is_accepted() -> None:
    example = DOCS.read_text().partition("## Sums of several")[2].split("```")[1]
    made = Config.model_validate({"model": {"path": "m"}, **parse_yaml(example)})
    assert texts(reward_name_problems(made)) == []
    assert [part["function"] for part in resolved_components(made)] == [
        "graded_answer",
        "format",
        "repetition",
        "length",
    ]


def test_the_plan_shows_each_component_on_a_real_row() -> None:
    made = config(
        ACCURACY,
        {"name": "format", "weight": 0.5, "kwargs": {"layout": "tagged"}},
        {"name": "length", "gate": {"component": "accuracy", "max": 0}, "kwargs": {"max_length": 28}},
    )
    prompts = [Prompt("gsm8k/train/0", (1,), "6 * 7 =", "42", "gsm8k", "composite")]
    lines = list(reward_lines(made, call_rewards(made, prompts)))
    assert lines == [
        ("reward", "composite: 1 for the right answer, -1 for the wrong one (see below)"),
        ("  accuracy", "1 x gsm8k: 1, 0"),
        ("  format", "0.5 x format: 0, 0"),
        ("  length", "1 x length where accuracy <= 0: closed, -1"),
        ("  reported", "accuracy/acc 1, 0; accuracy/extracted 1, 0; length/open 0, 1; acc 1, 0"),
    ]


def test_columns_that_the_rows_lack_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "column_reward.py").write_text("def by_level(completion, level): ...\ndef any(completion, level=1): 0")
    monkeypatch.syspath_prepend(tmp_path)
    made = config({"name": "a", "function": "column_reward:by_level"}, {"name": "b", "function": "column_reward:any"})
    row = Prompt("gsm8k/train/0", (1,), "6 * 7 =", "42", "gsm8k", "composite", columns={"lvel": 3})
    (problem,) = texts(column_problems(made, [row]))
    assert problem.startswith("reward.components[0] (a): reward 'column_reward:by_level' cannot be called: nothing")
    assert problem.endswith("the row's columns lvel; did you mean 'lvel'? (row gsm8k/train/0)")
    assert not texts(column_problems(made, [replace(row, columns={"level": 3})]))
    single = config(function="column_reward:by_level")
    (problem,) = texts(column_problems(single, [replace(row, reward="column_reward:by_level")]))
    assert problem.startswith("reward.function: reward 'column_reward:by_level'")
