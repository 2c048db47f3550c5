"""The format reward and the quickstart's reward."""

from __future__ import annotations

import pytest

from grpo_megatron.rewards.answers import format_reward
from grpo_megatron.rewards.numeric import arithmetic_reward


@pytest.mark.parametrize(
    "text",
    [
        "<think>8+3=11</think><answer>91</answer>",
        " <think>\na\n</think>\n\n<answer>\nanything\n</answer>\n",
        "<think></think><answer></answer>",
        "#### 42",
        "I add.\nI carry.\n#### 1,234",
        "I add.\n  #### -$5.50 \n",
    ],
)
def test_a_kept_format_earns_one(text: str) -> None:
    assert format_reward(text, "") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "<answer>91</answer>",
        "<answer>91</answer><think>x</think>",
        "<think>x</think><answer>1</answer><answer>2</answer>",
        "<think>x<think>y</think><answer>1</answer>",
        "<think>x</think> so <answer>1</answer>",
        "<think>x<answer>1</answer></think>",
        "well <think>x</think><answer>1</answer>",
        "<think>x</think><answer>1</answer> done",
        "#### 1\n#### 2",
        "so #### 42",
        "#### 42\ndone",
        "#### many",
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
        ("<answer>091</answer>", 1, 1, 0),
        ("<think> </think><answer>91</answer>", 1, 1, 0),
        ("<think>x</think><answer>92</answer>", 0, 1, 1),
        ("<answer>-91</answer>", 0, 1, 0),
        ("<answer>91</answer>.", 0, 0, 0),
        ("<answer>91</answer><answer></answer>", 0, 0, 0),
        ("<answer>91", 0, 0, 0),
        ("<answer>9 1</answer>", 0, 0, 0),
        ("<answer>\u0669\u0661</answer>", 0, 0, 0),
        ("<think>8+3=11", 0, 0, 0),
        ("91", 0, 0, 0),
        ("<answer>" + "9" * 5000 + "</answer>", 0, 0, 0),
    ],
)
def test_arithmetic_needs_the_integer_at_the_very_end(text: str, score: int, formatted: int, worked: int) -> None:
    assert arithmetic_reward(text, "91") == {"score": score, "acc": score, "format": formatted, "worked": worked}
