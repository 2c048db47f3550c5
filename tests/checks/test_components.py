"""Rewards and environments before a run: refusals with exit code 2, and what the plan shows of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.components import resolved_components, reward_name_problems
from grpo_megatron.checks.reward_call import call_rewards, reward_lines
from grpo_megatron.cli import main
from grpo_megatron.config import Config
from grpo_megatron.types import Prompt
from grpo_megatron.untrusted import parse_yaml
from tests.runs import make_run, texts

DOCS = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"
ACCURACY = {"name": "accuracy"}


def config(*components: dict[str, Any], task: str = "gsm8k", **reward: Any) -> Config:
    section = {"components": list(components), **reward}
    return Config.model_validate({"model": {"path": "m"}, "data": {"task": task}, "reward": section})


def test_the_example_of_the_docs_is_accepted() -> None:
    example = DOCS.read_text().partition("## Sums of several")[2].split("```yaml")[1].split("```")[0]
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


TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '<sep>' }}{% endfor %}"
KEY = "rollout.multi_turn"


@pytest.fixture(scope="module")
def played_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("run"))
    (folder / "turns.jinja").write_text(TEMPLATE)
    return folder


def dry_run(played_run: Path, environment: str, *arguments: str) -> int:
    template = [f"data.chat_template={played_run / 'turns.jinja'}", "data.apply_chat_template=true"]
    limits = ["data.max_response_length=64", f"{KEY}.max_tool_response_length=16", f"{KEY}.environment={environment}"]
    return main.main(["train", str(played_run / "run.yaml"), "--dry-run", *template, *limits, *arguments])


def test_the_plan_plays_an_episode(played_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(played_run, "tests.environments.games:Guess", f"{KEY}.kwargs={{most: 7}}") == 0
    text = capsys.readouterr().out
    assert "tests.environments.games:Guess; 1 worker per engine, 30 s per call" in text
    assert "trajectory        at most 8 turns and 64 tokens with observations, 16 per tool response" in text
    assert "an episode        user: Guess my number from 1 to 7." in text
    assert (
        " model: <think>The answer is 1.</think> <answer>1</answer>\n" in text
    )  # the row's answer, as the task wants it
    assert " user: My number is higher.\n" in text
    assert " turn 1: the reward 0.1, guesses 1; it goes on\n" in text
    assert " turn 3: the reward 0, guesses 3; it goes on\n" in text
    assert "turn 4" not in text


def test_a_step_that_fails_is_said(played_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(played_run, "tests.environments.games:Strict") == 0
    text = capsys.readouterr().out
    assert "WARNING: the step fails (raised: KeyError" in text and "(games.py, line " in text
    assert "READY EXCEPT: in the episode above the step fails (raised: KeyError" in text


@pytest.mark.parametrize(
    ("environment", "arguments", "problem"),
    [
        ("tests.environments.games:Guess", [f"{KEY}.kwargs={{least: 1}}"], "unexpected keyword argument 'least'"),
        ("tests.environments.hostile:Picky", [], "reset fails on the first row of the data (raised: KeyError"),
        ("tests.environments.hostile:Mute", [], "gives no message for the first row"),
        ("tests.environments.games:Guess", [f"{KEY}.format=json"], "format=json has no effect with rollout.multi_turn"),
        ("tools", [f"{KEY}.tools=[calculator]", f"{KEY}.format=hermess"], "did you mean 'hermes'"),
    ],
)
def test_an_environment_that_cannot_be_used(
    played_run: Path, environment: str, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(played_run, environment, *arguments) == 2
    assert problem in capsys.readouterr().err
