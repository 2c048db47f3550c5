"""Layouts, the reward of the quickstart, and graded rewards: the values 1, 0.5, 0.01 and 0, for numbers and other texts."""

from __future__ import annotations

import pytest

from grpo_megatron.rewards import extractors
from grpo_megatron.rewards.answers import format_reward
from grpo_megatron.rewards.numeric import arithmetic_reward, graded_answer_reward, graded_reward, reference


@pytest.mark.parametrize(
    "text",
    [
        "<think>8+3=11</think><answer>91</answer>",
        " <think>\na\n</think>\n\n<answer>\nanything\n</answer>\n",
        "#### 42",
        "I add.\n  #### -$5.50 \n",
    ],
)
def test_a_kept_format_earns_one(text: str) -> None:
    assert format_reward(text, "") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<answer>91</answer>",
        "<answer>91</answer><think>x</think>",
        "<think>x</think><answer>1</answer><answer>2</answer>",
        "<think>x</think> so <answer>1</answer>",
        "<think>x<answer>1</answer></think>",
        "<think>x</think><answer>1</answer> done",
        "#### 1\n#### 2",
        "so #### 42",
        "#### 42\ndone",
        "####",
    ],
)
def test_a_broken_format_earns_zero(text: str) -> None:
    assert format_reward(text, "") == 0.0


@pytest.mark.parametrize(
    ("text", "score", "formatted", "worked"),
    [
        ("<think>8+3=11,1+7+1=9</think><answer>91</answer>", 1, 1, 1),
        ("<answer>91</answer>", 1, 1, 0),
        ("<answer> 91\n</answer>\n", 1, 1, 0),
        ("<think> </think><answer>91</answer>", 1, 1, 0),
        ("<think>x</think><answer>92</answer>", 0, 1, 1),
        ("<answer>-91</answer>", 0, 1, 0),
        ("<answer>91</answer>.", 0, 0, 0),
        ("<answer>91", 0, 0, 0),
        ("<answer>\u0669\u0661</answer>", 0, 0, 0),
        ("91", 0, 0, 0),
        ("<answer>" + "9" * 5000 + "</answer>", 0, 0, 0),
    ],
)
def test_arithmetic_needs_the_integer_at_the_very_end(text: str, score: int, formatted: int, worked: int) -> None:
    assert arithmetic_reward(text, "91") == {"score": score, "acc": score, "format": formatted, "worked": worked}


@pytest.mark.parametrize(
    ("completion", "answer", "marked", "tagged"),
    [
        # numbers
        ("<think>6 * 7</think><answer>42</answer>", "42", 1, 1),
        ("<answer>the sum is 42</answer>", "42", 0.5, 0.5),
        ("it is 42 <answer>43</answer>", "42", 0.5, 0.01),
        ("<answer>142</answer>", "42", 0.01, 0.01),
        ("#### 42", "42", 1, 0),
        ("it is 42", "42", 0.5, 0),
        ("", "42", 0.01, 0),
        ("<answer>42", "42", 0.5, 0),
        ("<answer>42</answer> or <answer>43</answer>", "42", 0.5, 0.01),  # the last pair counts
        ("<answer>42</answer><answer>", "42", 0.5, 0),
        # other texts
        ("<answer>Paris</answer>", "Paris", 1, 1),
        ("<answer>\n  **paris**.\n</answer>", "Paris", 1, 1),
        ("<answer>It is Paris, in France</answer>", "Paris", 0.5, 0.5),
        ("<answer>Parisian</answer>", "Paris", 0.01, 0.01),
        ("so\n#### Paris", "Paris", 1, 0),
        ("<answer>3:45</answer>", "3:45", 1, 1),
        ("<answer></answer>", "Paris", 0.01, 0.01),
        ("<answer>a</answer>", ".*", 0.01, 0.01),  # the reference is no pattern
        ("<answer>yes</answer>", "#### Yes", 1, 1),
    ],
)
def test_the_four_values(completion: str, answer: str, marked: float, tagged: float) -> None:
    for function, score in ((graded_reward, marked), (graded_answer_reward, tagged)):
        returned = function(completion, answer)
        assert returned["score"] == score, function.__name__
        assert returned["acc"] == float(score == 1)


def test_a_blank_reference_is_an_error_and_predictions_are_comparable() -> None:
    for answer in ("", " \n", "#### "):
        with pytest.raises(ValueError, match="is empty"):
            reference(answer)
    for name in ("graded", "graded_answer"):
        extract = extractors.get(name).extract
        assert extract("<answer> $1,234.50 </answer>") == "1234.5"
        assert extract("<answer> New  York. </answer>") == "new york"
        assert extract("New York") is None
