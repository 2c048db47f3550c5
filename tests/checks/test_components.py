"""`reward.components` before a run: what is refused and why, what each name stands for, and what the plan shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.names import component_problems, resolved_components, reward_name, reward_name_problems
from grpo_megatron.checks.reward_call import call_rewards, column_problems, reward_lines
from grpo_megatron.config import Config
from grpo_megatron.reading import parse_yaml
from grpo_megatron.types import Prompt
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


def test_names_stand_for_functions() -> None:
    made = config(
        ACCURACY,
        {"name": "format"},
        {"name": "own", "function": "json:loads", "gate": {"component": "format", "min": 1}},
    )
    assert [part["function"] for part in resolved_components(made)] == ["gsm8k", "format", "json:loads"]
    assert resolved_components(made)[2]["gate"] == {"component": "format", "min": 1.0, "max": None}
    assert reward_name(made.reward) == "composite"
    assert texts(component_problems(config(ACCURACY, {"name": "length", "kwargs": {"max_length": 9}}))) == []
    assert (reward_name(config().reward), resolved_components(config())) == (None, [])


@pytest.mark.parametrize(
    ("components", "more", "problem"),
    [
        (
            [ACCURACY],
            {"function": "gsm8k"},
            "reward.function='gsm8k' beside reward.components: a run has one or the other",
        ),
        ([{**ACCURACY, "weight": 0}], {}, "all weights are 0"),
        ([ACCURACY, {"name": "acc", "function": "format"}], {}, "[1] (acc): the name is taken by another metric"),
        ([ACCURACY, ACCURACY], {}, "[1] (accuracy): the name is given twice"),
        ([{"name": "formt"}], {}, "[0] (formt): unknown reward 'formt'; did you mean 'format'?"),
        ([{"name": "length"}], {}, "cannot be called: nothing gives its parameter 'max_length', which has no default"),
        (
            [{"name": "format", "kwargs": {"layuot": 1}}],
            {},
            "it has no parameter 'layuot', which the kwargs hold; did you mean 'layout'",
        ),
        ([{"name": "x", "function": "composite"}], {}, "a sum of components cannot be a component"),
        ([{"name": "arithmetic_steps"}], {}, "gives rewards of single steps, which a sum has no place for"),
        (
            [ACCURACY],
            {"task": "jsonl"},
            "it is the task's own reward, and data.task='jsonl' has none; set its function",
        ),
        ([{**ACCURACY, "gate": {"component": "formt", "min": 1}}], {}, "'formt' is none of the components accuracy"),
        ([ACCURACY, {"name": "format", "gate": {"component": "accuracy"}}], {}, "a gate needs a bound"),
        (
            [ACCURACY, {"name": "format", "gate": {"component": "accuracy", "min": 2, "max": 1}}],
            {},
            "gate.min=2 is above gate.max=1",
        ),
        (
            [{"name": "judge", "kwargs": {"base_url": "u", "model": "m", "prompt": "p", "timeout_s": 20}}],
            {},
            "the judge's timeout_s=20 is not below reward.timeout_s=10, after which its worker is killed; set"
            " reward.timeout_s=25",
        ),
    ],
)
def test_what_is_refused(components: list[dict[str, Any]], more: dict[str, Any], problem: str) -> None:
    problems = texts(reward_name_problems(config(*components, **more)))
    assert len(problems) == 1, problems
    assert problem in problems[0]


def gated(name: str, on: str) -> dict[str, Any]:
    return {"name": name, "function": "format", "gate": {"component": on, "min": 1}}


@pytest.mark.parametrize(
    ("gates", "circles"),
    [
        ({"a": "a"}, ["a -> a"]),
        ({"a": "b", "b": "c", "c": "a"}, ["a -> b -> c -> a"]),
        ({"d": "a", "a": "b", "b": "a"}, ["a -> b -> a"]),
        ({"a": "b", "b": "a", "c": "d", "d": "c"}, ["a -> b -> a", "c -> d -> c"]),
        ({"a": "free", "b": "a", "c": "a"}, []),
    ],
)
def test_circles_of_gates(gates: dict[str, str], circles: list[str]) -> None:
    made = config({"name": "free", "function": "format"}, *(gated(name, on) for name, on in gates.items()))
    assert texts(component_problems(made)) == [
        f"reward.components: the gates {circle} wait for each other; remove one of them" for circle in circles
    ]


def test_a_composite_has_no_other_name() -> None:
    (problem,) = texts(reward_name_problems(config(function="composite")))
    assert (
        problem
        == "reward.function='composite' is the sum of reward.components; set those, and leave reward.function out"
    )


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
    (tmp_path / "column_reward.py").write_text(
        "def by_level(completion, level): ...\ndef any(completion, level=1): ..."
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = config({"name": "a", "function": "column_reward:by_level"}, {"name": "b", "function": "column_reward:any"})
    row = Prompt("gsm8k/train/0", (1,), "6 * 7 =", "42", "gsm8k", "composite", columns={"lvel": 3})
    (problem,) = texts(column_problems(made, [row]))
    assert problem.startswith(
        "reward.components[0] (a): reward 'column_reward:by_level' cannot be called: nothing gives its"
    )
    assert problem.endswith("the row's columns lvel; did you mean 'lvel'? (row gsm8k/train/0)")
    assert not texts(column_problems(made, [replace(row, columns={"level": 3})]))
    single = config(function="column_reward:by_level")
    (problem,) = texts(column_problems(single, [replace(row, reward="column_reward:by_level")]))
    assert problem.startswith("reward.function: reward 'column_reward:by_level'")
