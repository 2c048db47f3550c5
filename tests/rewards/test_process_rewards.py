"""The arithmetic of written steps: which equations hold, what is no equation, real GSM8K solutions, where steps end.

Of the 28,851 lines with an equation in GSM8K's solutions (train and test), 50 fail. Most are mistakes of the authors
("70 + 40 = 100", "4000 + 2040 = 6120", "192*100=$1920"). Some 17 can be read in two ways ("2000 / 2/3 = 3000" for a
division by 2/3, "0900-0130 = 0730 hours", "$2.50 - $2.24 = 26 cents"). The test split has four: "+ $3.00" is missing,
"364 / 4 = 273", "$32 - $20 = $300", and "48 = 100% + 20%".
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.rewards.process_rewards import arithmetic_steps_reward, equations, split_steps, value_of
from grpo_megatron.starting.generated import bare_response, worked_response
from tests.files import SLICE_AND_WHOLE

HOLD = [
    *("<<48/2=24>>", "48/2=24", "She makes 9 * 2 = $<<9*2=18>>18 a day.", "80,000*1.5=<<80000*1.5=120000>>120,000"),
    *("2 x 3 = 6", "2 \u00d7 3 = 6 and 6 \u00f7 2 = 3", r"\frac{1}{2} + \frac{1}{4} = 0.75", "(2+3)*4 = 20"),
    *("2*3 = 6 = 12/2", "10% * 50 = 5", "3 / 4 * 100 = 75%", "100/7 = 14.29", "$1.005 * 3 = $3.02", "2(3+4) = 14"),
]
FAIL = ["<<48/2=25>>", "48/2=25", "48 / 2 = <<48/2=24>>25 clips", "7/2 = 3", "2 + 3 = 5 + 1 = 6", "1/3 = 0.34"]
NO_EQUATIONS = [
    *("", "#### 24", "x + 5 = 10", "3 * 4 = 12x", "20 = 10", "half of 10 + 2 = 7", "apples - 5 + 2 = 10", "1/0 = 1"),
    *("9**9**9**9 = 1", "__import__('os').system('true') = 0", "((((((" * 100 + "1 = 1", "= = ="),
]


def test_what_holds_what_does_not_and_what_is_no_equation() -> None:
    for text in HOLD:
        assert equations(text) and all(equations(text)), text
    for text in FAIL:
        assert False in equations(text), text
    for text in NO_EQUATIONS:
        assert equations(text) == [], text


@settings(deadline=None)
@given(st.integers(-999, 999), st.integers(1, 999), st.sampled_from("+-*/"), st.integers(1, 50))
def test_right_and_wrong_results(a: int, b: int, sign: str, error: int) -> None:
    exact = {"+": Fraction(a + b), "-": Fraction(a - b), "*": Fraction(a * b), "/": Fraction(a, b)}[sign]
    assert value_of(f"({a}) {sign} {b}") == exact
    assert equations(f"({a}) {sign} {b} = {exact}") == [True]
    assert equations(f"({a}) {sign} {b} = {exact + error}") == [False]


@settings(deadline=None)
@given(st.text(st.sampled_from("0123456789+-*/^()=%., x$<>\\\n"), max_size=80))
def test_any_text_has_verdicts(text: str) -> None:
    result = arithmetic_steps_reward(text, "42")
    ends = [end for end, _ in result["steps"]]
    assert ends == sorted(set(ends)) and all(0 < end <= len(text) for end in ends)


def test_steps_of_a_solution() -> None:
    text = "48/2 = <<48/2=24>>24 clips in May.\n\nSo many!\n48+24 = <<48+24=72>>71 in all.\n#### 72\n"
    result = arithmetic_steps_reward(text, "72")
    ends = [text.index("May.") + 4, text.index("all.") + 4, len(text) - 1]
    assert result["steps"] == [(ends[0], 1.0), (ends[1], 0.0), (ends[2], 1.0)]
    assert (result["score"], result["acc"], result["step_acc"], result["checked_steps"]) == (1.0, 1.0, 0.5, 2.0)
    assert arithmetic_steps_reward(text, "71")["steps"][-1] == (ends[2], 0.0)
    assert arithmetic_steps_reward("", "71")["steps"] == []
    assert arithmetic_steps_reward("no idea", "71")["steps"] == [(7, 0.0)]


def test_steps_of_the_quickstart() -> None:
    text = worked_response(38, 53)
    assert text == "<think>8+3=11,3+5+1=9</think><answer>91</answer>"
    result = arithmetic_steps_reward(text, "91", outcome="arithmetic")
    assert result["steps"] == [(text.index(","), 1.0), (text.index("</think>"), 1.0), (len(text), 1.0)]
    wrong = text.replace("=11", "=12")
    steps = arithmetic_steps_reward(wrong, "91", outcome="arithmetic")["steps"]
    assert [value for _, value in steps] == [0.0, 1.0, 1.0]
    assert arithmetic_steps_reward(bare_response(38, 53), "90", outcome="arithmetic")["steps"] == [(19, 0.0)]
    with pytest.raises(ValueError, match="unknown reward 'gsm9k'"):
        arithmetic_steps_reward("1+1=2", "2", outcome="gsm9k")


def test_lines_end_behind_their_last_character() -> None:
    text = " one \n\n two</think>three"
    texts = [(text[:end][-3:], step.strip()) for end, step in split_steps(text)]
    assert texts == [("one", "one"), ("two", "two"), ("ree", "three")]


COUNTS = {200: (646, 0), 1319: (4407, 4)}  # problems -> lines with an equation, lines with a false one: see the header


@pytest.mark.parametrize("data", SLICE_AND_WHOLE)
def test_the_arithmetic_of_real_gsm8k(data: Path) -> None:
    solutions = [json.loads(line)["answer"] for line in (data / "gsm8k" / "test.jsonl").read_text().splitlines()]
    verdicts = [equations(line) for solution in solutions for line in solution.split("\n")[:-1]]
    assert (sum(map(bool, verdicts)), sum(False in verdict for verdict in verdicts)) == COUNTS[len(solutions)]
