"""Environments before a run: the plan shows their first messages, and one that cannot be used is named, with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_megatron.cli import main
from tests.runs import make_run

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '<sep>' }}{% endfor %}"
KEY = "rollout.multi_turn"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("run"))
    (folder / "turns.jinja").write_text(TEMPLATE)
    return folder


def dry_run(run: Path, environment: str, *arguments: str) -> int:
    template = [f"data.chat_template={run / 'turns.jinja'}", "data.apply_chat_template=true"]
    limits = ["data.max_response_length=64", f"{KEY}.max_tool_response_length=16", f"{KEY}.environment={environment}"]
    return main.main(["train", str(run / "run.yaml"), "--dry-run", *template, *limits, *arguments])


def test_the_plan_plays_an_episode(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(run, "tests.environments.games:Guess", f"{KEY}.kwargs={{most: 7}}") == 0
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


def test_a_step_that_fails_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(run, "tests.environments.games:Strict") == 0
    assert "WARNING: the step fails (raised: KeyError" in capsys.readouterr().out


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
    run: Path, environment: str, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(run, environment, *arguments) == 2
    assert problem in capsys.readouterr().err
