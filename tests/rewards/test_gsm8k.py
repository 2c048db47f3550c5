"""The numeric extractor: published vectors (V17), what is no prediction, real GSM8K, linear time."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.rewards import rewards
from grpo_megatron.rewards.answers import (
    WINDOW,
    contains_number,
    gsm8k_reward,
    marked_number,
    numeric_answer,
    numeric_prediction,
    parse_number,
)
from grpo_megatron.rewards.numeric import arithmetic_reward, graded_reward
from tests.files import DATA, SLICE_AND_WHOLE

NUMERIC = ["arithmetic", "arithmetic_steps", "format", "graded", "gsm8k", "gsm8k_flexible", "gsm8k_strict"]

V17 = [
    ("#### 1,234", "1234"),
    ("#### -12.50", "-12.5"),
    ("#### $18", "18"),
    ("####7", "7"),
    ("#### 3\nno, wait\n#### 4", "4"),
    ("#### 5.", "5"),
    ("#### 3/4", "3/4"),
    ("#### 42" + " and so on" * 40, "42"),
]


@pytest.mark.parametrize(("text", "expected"), V17)
def test_extracts_the_vectors_of_v17(text: str, expected: str) -> None:
    assert marked_number(text) == Fraction(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>18</answer>", "18"),
        ("<answer>\n $1,234.50 per week\n</answer>", "2469/2"),
        (r"so \boxed{18}", "18"),
        (r"so $\boxed 7$", "7"),
        (r"\boxed{\frac{63}{400}}", "63/400"),
        (r"\boxed{\$18\%}", "18"),
        (r"\boxed{11,\! 111}", "11111"),
        (r"\fbox{12}", "12"),
        (r"#### \boxed{18}", "18"),
        ("#### **18**", "18"),
        ("#### US$18", "18"),
        ("#### -$5", "-5"),
        ("#### \u22125", "-5"),
        ("#### \u20ac.50", "1/2"),
        ("#### 50%", "50"),
        ("#### 1 1/2", "3/2"),
        ("#### 007", "7"),
        ("#### 18, not 19", "18"),
        ("####\n18", "18"),
        ("#### 18 km - that is all", "18"),
        # the last mark of any kind decides
        (r"#### 1 then \boxed{2}", "2"),
        (r"\boxed{2} then #### 1", "1"),
        ("#### Step 1: think\n<answer>5</answer>", "5"),
    ],
)
def test_drops_markup_and_units(text: str, expected: str) -> None:
    assert marked_number(text) == Fraction(expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "####",
        "#### 42\n####",  # the last mark decides, and it has no number
        "#### the answer is 42",
        "<answer>42",
        r"\boxed{42",
        "#### 9 * 2",
        "#### 18 = 9 * 2",
        "#### 2**3",
        "#### 10-20",
        "#### 10:30",
        "#### 3/0",
        "#### 1.2.3",
        "#### 1,23",
        "#### 18 19",
        "#### 5e3",
        "#### 1e999999999",
        "#### 0x1F",
        "#### " + "9" * 5000,
        "#### \uff14\uff12",  # full-width digits
        "#### \u0664\u0662",  # Arabic-Indic digits
        "#### 5\u00bd",
        "#### \u00b2",
    ],
)
def test_no_prediction_without_a_plain_number(text: str) -> None:
    assert marked_number(text) is None
    assert gsm8k_reward(text, "42") == {"score": 0.0, "acc": 0.0, "extracted": 0.0}


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_every_decimal_comes_back_exactly(number: int, places: int) -> None:
    value = Fraction(number, 10**places)
    whole, rest = divmod(abs(number), 10**places)
    text = f"{'-' if number < 0 else ''}{whole:,}" + (f".{rest:0{places}d}" if places else "")
    assert marked_number(f"so it is\n#### ${text} in all") == value
    assert gsm8k_reward(f"<answer>{text}</answer>", str(value))["score"] == 1.0
    assert gsm8k_reward(rf"\boxed{{{text}}}", str(value + 1))["score"] == 0.0


@settings(deadline=None)
@given(st.text(st.sampled_from("#<answer>/\\boxed{} 0159.,-+*$%\u0665\u00bd\n"), max_size=60))
def test_any_text_is_graded_without_an_exception(text: str) -> None:
    for name in NUMERIC:
        rewards.get(name)(text, "42")
        rewards.get(name)("####" + text, "42")
        rewards.get(name)("<answer>" + text + "</answer>", "42")


@pytest.mark.parametrize(
    ("text", "answer"),
    [("#### 1,234", "1234"), ("#### -12.50", "-12.5"), ("#### 1/3", "1/3"), ("#### .125", "0.125"), ("none", None)],
)
def test_the_prediction_as_text(text: str, answer: str | None) -> None:
    assert numeric_prediction(text) == answer


def test_an_answer_that_is_no_number_is_an_error_not_a_zero() -> None:
    for digits in ("0", "007", "42", "9" * WINDOW):
        assert numeric_answer(digits) == parse_number(digits) == int(digits)
    for digits in ("9" * (WINDOW + 1), "\uff14\uff12", "\u00b2", ""):
        with pytest.raises(ValueError, match="is not a number"):
            numeric_answer(digits)
    assert numeric_answer("1,234") == numeric_answer("so it is\n#### 1,234") == 1234
    with pytest.raises(ValueError, match="'many' is not a number"):
        gsm8k_reward("#### 42", "many")


def test_graded_rewards_the_answer_in_the_text() -> None:
    assert graded_reward("#### 42", "42")["score"] == 1.0
    assert graded_reward("it is 42, I think", "42")["score"] == 0.5
    assert graded_reward("it is 42, I think\n#### 43", "42") == {"score": 0.5, "acc": 0.0, "extracted": 1.0}
    assert graded_reward("it is 142 or 421 or 4.2 or 42.5 or 42,000", "42")["score"] == 0.01


@pytest.mark.parametrize(
    ("text", "number", "contained"),
    [
        ("$5.00.", "5", True),
        ("5.01", "5", False),
        ("is 1,234.", "1234", True),
        ("is 1234", "1234", True),
        ("is 1,234", "234", False),
        ("1, 2, 3", "2", True),
        ("10.5", "1/2", False),
        ("0.50", "1/2", True),
        ("1/2", "1/2", True),
        ("1 / 3", "1/3", True),
        ("it is -7", "-7", True),
        ("it is 7", "-7", False),
        ("0.0", "0", True),
    ],
)
def test_contained_means_a_number_of_its_own(text: str, number: str, contained: bool) -> None:
    assert contains_number(text, Fraction(number)) == contained


def test_parse_number_needs_the_number_first() -> None:
    assert parse_number("18 apples") == 18
    assert parse_number("apples 18") is None


@pytest.mark.parametrize("data", SLICE_AND_WHOLE)
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_reference_solution_of_real_gsm8k_is_right(split: str, data: Path) -> None:
    rows = [json.loads(line) for line in (data / "gsm8k" / f"{split}.jsonl").read_text().splitlines()]
    assert len(rows) == ({"train": 80, "test": 200} if data == DATA else {"train": 7473, "test": 1319})[split]
    for row in rows:
        answer = row["answer"].rpartition("####")[2].strip()
        assert gsm8k_reward(row["answer"], answer)["score"] == 1.0
        assert gsm8k_reward(row["answer"] + "1", answer)["score"] == 0.0  # a digit more


MEGABYTES_10 = 10_000_000
ADVERSARIAL = {
    name: (piece * (MEGABYTES_10 // len(piece)))[:MEGABYTES_10]
    for name, piece in {
        "hashes": "#",
        "tags": "<answer>",
        "boxes": "\\boxed{",
        "zeros": "0",
        "decimals": "0." + "0" * 5000,
        "groups": "1,000",
        "spaces": " ",
        "newlines": "\n",
        "fractions": "42/",
        "unicode digits": "\u0665",
    }.items()
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_ten_megabytes_take_linear_time(name: str) -> None:
    """Each of these reads 10 MB a few times: 0.1 to 1.5 s of processor time. Quadratic time would be hours."""
    text = ADVERSARIAL[name]
    start = time.process_time()
    names = ["arithmetic", "format", "gsm8k", *(["graded"] if text[0].isdigit() else [])]  # graded looks for digits
    for reward in NUMERIC if name in ("zeros", "groups", "newlines") else names:
        rewards.get(reward)(text, "42")
    for prefix in ("####", "<answer>", "\\boxed{"):
        marked_number(prefix + text + "</answer>")
    arithmetic_reward("<think>" + text, "42")
    assert time.process_time() - start < 60
