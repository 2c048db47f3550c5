"""Before anything starts, each reward is called on a real row: what fails on a right and on a wrong completion is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.reward_call import call_rewards, report_trials, reward_lines, trial_lines
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.data.prompts import reward_item
from grpo_megatron.rewards import extractors, rewards
from grpo_megatron.rewards.answers import answer_form
from grpo_megatron.types import Prompt

MODULE = """
import asyncio, os, time
from grpo_megatron.rewards import rewards

def raises(completion, answer): raise KeyError(answer)
def absent(completion, colour): return 1.0
def words(completion, answer): return "good"
def hangs(completion, answer): time.sleep(600)
def leaves(completion, answer): os._exit(0)
def picky(completion, answer): return 1.0 / ("42" in completion)  # raises on a wrong completion
async def waits(completion, answer):
    await asyncio.sleep(0)
    return {"score": 1.0, "prediction": "a text"}
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
    right = solution_str.endswith("#### " + ground_truth)
    return {"score": right * (1 + bonus), "acc": right, "length": len(solution_str)}
def trl(completions, level, **others): return [float("42" in text) for text in completions]
@rewards.declare(batch=True)
def average(completion, answer):
    right = [float(text.endswith(key)) for text, key in zip(completion, answer)]
    return [sum(right) / len(right) + 1e-9 * value for value in right]
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
        ("raises", "KeyError: '42' (called_reward.py, line 5)"),
        ("words", "ValueError: the reward is str, not a number"),
        ("hangs", "no result after 1 s (reward.timeout_s); killed"),
        ("leaves", "the reward's process has ended: exit code 0"),
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
    (problem,) = problems_of("called_reward:absent")
    assert "nothing gives its parameter 'colour', which has no default; there are completion, answer," in problem


def test_each_reward_of_the_rows_is_called(user_module: None) -> None:
    problems = problems_of("called_reward:waits", "called_reward:raises", "gsm8k", "called_reward:words")
    assert [problem.split("reward '")[1].split("'")[0] for problem in problems] == [
        "called_reward:raises",
        "called_reward:words",
    ]


@pytest.mark.parametrize("name", extractors.names())
def test_an_answer_in_its_form_is_right_to_every_grader(name: str) -> None:
    for prompt in ("6 * 7 =", "6 * 7 =<think>\n", "6 * 7 =<think>\n\n</think>\n\n"):
        form = answer_form(prompt, [name])
        right, wrong = ("C", "D") if name == "choice" else ("42", "41")
        for answer, score in ((right, 1.0), (wrong, {"graded": 0.01, "graded_answer": 0.01}.get(name, 0.0))):
            response = reward_item(Prompt("u", (), prompt, right, "s", name), form.response(answer, prompt))
            assert rewards.get(name)(response.completion, right)["score"] == score, (prompt, response.completion)


@pytest.mark.parametrize(
    ("prompt", "names", "response"),
    [
        (
            "between <answer> </answer> tags, no \\boxed",
            ["math"],
            "<think>The answer is 7.</think>\n<answer>7</answer>",
        ),
        ("put it in \\boxed{}", ["gsm8k"], "The answer is \\boxed{7}."),
        ("end with #### N <think>\n", [], "The answer is 7.\n</think>\n#### 7"),
        ("Q<think>", ["my:reward"], "The answer is 7.\n</think>\n7"),
    ],
)
def test_the_form_of_an_answer(prompt: str, names: list[str], response: str) -> None:
    assert answer_form(prompt, names).response("7", prompt) == response


ROWS = [
    Prompt(f"s/rows/{n}", (1,), "#### N", answer, "s", "", columns={"level": n})
    for n, answer in enumerate(["42", "42", "43"])
]
PLAN = [
    ("right answer", "'The answer is 42.\\n#### 42' has the reward 2"),
    ("", "(the reference answer of s/rows/0; form: #### ANSWER)"),
    ("wrong answer", "'The answer is 43.\\n#### 43' has the reward 0"),
]


def lines_of(name: str, **section: Any) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    config = Config.model_validate({"model": {"path": "m"}, "reward": section})
    trials = call_rewards(config, [replace(prompt, reward=name) for prompt in ROWS])
    return list(reward_lines(config, trials)), list(trial_lines(trials))


def test_the_plan_shows_a_right_and_a_wrong_answer(user_module: None) -> None:
    name = "called_reward:compute_score"
    step, answers = lines_of(name, kwargs={"bonus": 1})
    assert step == [
        ("reward", f"{name}: 2 for the right answer, 0 for the wrong one (see below)"),
        ("  reported", "acc 1, 0; length 25, 25"),
        (
            "  adapted",
            f"{name} is called as verl's compute_score(data_source, solution_str, ground_truth, extra_info)",
        ),
    ]
    assert answers == PLAN


def test_a_reward_that_does_not_prefer_the_right_answer_is_a_warning(
    user_module: None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config.model_validate({"model": {"path": "m"}, "rollout": {"stop": ["42\n#", "###"]}})
    names = [f"called_reward:{name}" for name in ("waits", "trl", "average")]
    trials = call_rewards(config, [replace(prompt, reward=name) for name in names for prompt in ROWS])
    caplog.clear()
    report_trials(config, trials)
    assert (
        "reward called_reward:trl is called as TRL's reward(prompts, completions, **columns)" in capsys.readouterr().out
    )
    stop, equal, _, _, depends = warned = [record.message for record in caplog.records]
    assert stop.startswith("rollout.stop=['###'] ends 'The answer is 42.\\n#### 42' before its answer")
    assert equal.startswith(
        "the reward called_reward:waits does not prefer the right answer of s/rows/0: 1 for 'The answer is 42.\\n"
    )
    assert depends.startswith(
        "the reward called_reward:average gives 1 to 'The answer is 42.\\n#### 42' alone, and 0.5"
    )
    assert [text for title, text in trial_lines(trials) if title == "WARNING"] == warned
