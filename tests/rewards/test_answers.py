"""What a text's answer is, for the graders of GSM8K and of the quickstart; layouts; hostile texts, in linear time, for all.

lm-evaluation-harness' GSM8K is written here again with `findall`. Filter: re.findall; the first or the last match; of a tuple
the first group that is not empty; "[invalid]" without a match. Metric exact_match: remove `,`, `\\$`, `(?s).*#### ` and `\\.$`
from both sides, lower the case, compare. The code of lm-eval 0.4.13 itself (RegexFilter, exact_match_hf_evaluate, the task's
YAML) gave the same in all of 7,914 completions.
"""

from __future__ import annotations

import json
import random
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.rewards import extractors, rewards
from grpo_megatron.rewards.answers import (
    WINDOW,
    contains_number,
    format_reward,
    gsm8k_reward,
    marked_number,
    numeric_answer,
    numeric_prediction,
    parse_number,
    tag_count_reward,
)
from grpo_megatron.rewards.numeric import arithmetic_reward, graded_answer_reward, graded_reward, reference
from grpo_megatron.rewards.reward import opened_thought
from tests.files import DATA, SLICE_AND_WHOLE, WHOLE


@pytest.mark.parametrize(
    ("expected", "texts"),
    [
        ("1234", ["#### 1,234"]),  # the first eight rows: published vectors (V17)
        ("-12.5", ["#### -12.50"]),
        ("7", ["####7"]),
        ("4", ["#### 3\nno, wait\n#### 4"]),
        ("3/4", ["#### 3/4"]),
        ("42", ["#### 42" + " and so on" * 40]),
        (
            "18",
            ["<answer>18</answer>", r"\boxed{18}", r"\boxed{\$18\%}", r"#### \boxed{18}", "#### **18**", "#### US$18"],
        ),
        ("18", ["#### 18, not 19", "####\n18", "#### 18 km - that is all"]),
        ("2469/2", ["<answer>\n $1,234.50 per week\n</answer>"]),
        ("7", [r"so $\boxed 7$", "#### 007"]),
        ("11111", [r"\boxed{11,\! 111}"]),
        ("63/400", [r"\boxed{\frac{63}{400}}"]),
        ("-5", ["#### -$5", "#### \u22125"]),
        ("1/2", ["#### \u20ac.50"]),
        ("50", ["#### 50%"]),
        ("3/2", ["#### 1 1/2"]),
        ("2", [r"#### 1 then \boxed{2}"]),  # the last mark of any kind decides
        ("1", [r"\boxed{2} then #### 1"]),
        ("5", ["#### Step 1: think\n<answer>5</answer>"]),
    ],
)
def test_the_number_behind_the_last_mark(expected: str, texts: list[str]) -> None:
    for text in texts:
        assert marked_number(text) == Fraction(expected), text


NO_NUMBER = [
    *("", "42", "####", "#### 42\n####", "#### the answer is 42", "<answer>42", r"\boxed{42", "#### 9 * 2", "#### 3/0"),
    *("#### 18 = 9 * 2", "#### 2**3", "#### 10-20", "#### 10:30", "#### 1.2.3", "#### 1,23", "#### 18 19", "#### 5e3"),
    *("#### 1e999999999", "#### 0x1F", "#### " + "9" * 5000),
    *("#### \uff14\uff12", "#### \u0664\u0662", "#### 5\u00bd", "#### \u00b2"),  # digits outside ASCII
]


@pytest.mark.parametrize("text", NO_NUMBER)
def test_no_prediction_without_a_plain_number(text: str) -> None:
    assert marked_number(text) is None
    assert gsm8k_reward(text, "42") == {"score": 0.0, "acc": 0.0, "extracted": 0.0}


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_every_decimal_comes_back_exactly(number: int, places: int) -> None:
    value = Fraction(number, 10**places)
    integer, rest = divmod(abs(number), 10**places)
    text = f"{'-' if number < 0 else ''}{integer:,}" + (f".{rest:0{places}d}" if places else "")
    assert marked_number(f"so it is\n#### ${text} in all") == value
    assert gsm8k_reward(f"<answer>{text}</answer>", str(value))["score"] == 1.0
    assert gsm8k_reward(rf"\boxed{{{text}}}", str(value + 1))["score"] == 0.0


def test_the_prediction_as_text() -> None:
    predictions = {"#### 1,234": "1234", "#### -12.50": "-12.5", "#### 1/3": "1/3", "#### .125": "0.125", "none": None}
    assert {text: numeric_prediction(text) for text in predictions} == predictions
    for name in ("graded", "graded_answer"):
        extract = extractors.get(name).extract
        assert extract("<answer> $1,234.50 </answer>") == "1234.5"
        assert extract("<answer> New  York. </answer>") == "new york"
        assert extract("New York") is None


def test_an_answer_that_is_no_number_is_an_error_not_a_zero() -> None:
    for digits in ("0", "007", "42", "9" * WINDOW):
        assert numeric_answer(digits) == parse_number(digits) == int(digits)
    for digits in ("9" * (WINDOW + 1), "\uff14\uff12", "\u00b2", ""):
        with pytest.raises(ValueError, match="is not a number"):
            numeric_answer(digits)
    assert numeric_answer("1,234") == numeric_answer("so it is\n#### 1,234") == 1234
    assert (parse_number("18 apples"), parse_number("apples 18")) == (18, None)
    with pytest.raises(ValueError, match="'many' is not a number"):
        gsm8k_reward("#### 42", "many")
    for answer in ("", " \n", "#### "):
        with pytest.raises(ValueError, match="is empty"):
            reference(answer)


def test_contained_means_a_number_of_its_own() -> None:
    contained = [("$5.00.", "5"), ("is 1,234.", "1234"), ("1, 2, 3", "2"), ("0.50", "1/2"), ("1 / 3", "1/3")]
    for text, number in [*contained, ("it is -7", "-7")]:
        assert contains_number(text, Fraction(number)), text
    for text, number in [("5.01", "5"), ("is 1,234", "234"), ("10.5", "1/2"), ("it is 7", "-7")]:
        assert not contains_number(text, Fraction(number)), text


@pytest.mark.parametrize("data", SLICE_AND_WHOLE)
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_reference_solution_of_real_gsm8k_is_right(split: str, data: Path) -> None:
    rows = [json.loads(line) for line in (data / "gsm8k" / f"{split}.jsonl").read_text().splitlines()]
    assert len(rows) == ({"train": 80, "test": 200} if data == DATA else {"train": 7473, "test": 1319})[split]
    for row in rows:
        answer = row["answer"].rpartition("####")[2].strip()
        assert gsm8k_reward(row["answer"], answer)["score"] == 1.0
        assert gsm8k_reward(row["answer"] + "1", answer)["score"] == 0.0  # a digit more


# -- layouts, the quickstart, graded rewards ---------------------------------------------------------------------------


def test_layouts() -> None:
    for text in (
        *("<think>8+3=11</think><answer>91</answer>", " <think>\na\n</think>\n\n<answer>\nanything\n</answer>\n"),
        *("#### 42", "I add.\n  #### -$5.50 \n"),
    ):
        assert format_reward(text, "") == 1.0, text
    for text in (
        *("", "<answer>91</answer>", "<answer>91</answer><think>x</think>", "<think>x<answer>1</answer></think>"),
        *("<think>x</think><answer>1</answer><answer>2</answer>", "<think>x</think> so <answer>1</answer>"),
        *("<think>x</think><answer>1</answer> done", "#### 1\n#### 2", "so #### 42", "#### 42\ndone", "####"),
    ):
        assert format_reward(text, "") == 0.0, text
    tagged = "<think>a</think><answer>b</answer>"
    counts = {tagged: 1.0, tagged + "<answer>": 0.75, tagged * 2: 0.0, "</think><answer>b": 0.5, "": 0}
    assert {text: tag_count_reward(text, "") for text in counts} == counts
    assert [format_reward(tagged, "", layout=name) for name in ("tagged", "hashes", "any")] == [1, 0, 1]  # type: ignore[arg-type]
    thought = "<think>5 < 6}</think> So \\boxed{4}."
    texts = [thought, thought[:-2], f" {thought}", thought.replace("</think>", ""), "\\boxed{4}", f"<think>{thought}"]
    assert [format_reward(text, "", layout="boxed") for text in texts] == [1, 0, 0, 0, 0, 1]
    assert [format_reward("#### 4", "", layout=name) for name in ("tagged", "hashes", "any")] == [0, 1, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("User: 1+1?\nAssistant: <think>\n", "<think>\n"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("use <think> </think> tags. User: 1+1?\nAssistant:", ""),
        ("<think>\n" + " " * 100, ""),  # far from the end
        ("", ""),
    ],
)
def test_a_thought_that_the_prompt_has_opened(prompt: str, opened: str) -> None:
    assert opened_thought(prompt) == opened
    response = "6 * 7</think><answer>42</answer>"
    assert format_reward(opened_thought(prompt) + response, "") == float(opened.strip() == "<think>")


@pytest.mark.parametrize(
    ("text", "score", "formatted", "worked"),
    [
        ("<think>8+3=11,1+7+1=9</think><answer>91</answer>", 1, 1, 1),
        ("<answer>91</answer>", 1, 1, 0),
        ("<think> </think><answer>91</answer>", 1, 1, 0),
        ("<think>x</think><answer>92</answer>", 0, 1, 1),
        ("<answer>91</answer>.", 0, 0, 0),
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
        ("#### 42", "42", 1, 0),
        ("it is 42", "42", 0.5, 0),
        ("", "42", 0.01, 0),
        ("<answer>42</answer> or <answer>43</answer>", "42", 0.5, 0.01),  # the last pair counts
        # other texts
        ("<answer>Paris</answer>", "Paris", 1, 1),
        ("<answer>\n  **paris**.\n</answer>", "Paris", 1, 1),
        ("<answer>It is Paris, in France</answer>", "Paris", 0.5, 0.5),
        ("<answer>Parisian</answer>", "Paris", 0.01, 0.01),
        ("<answer>a</answer>", ".*", 0.01, 0.01),  # the reference is no pattern
        ("<answer>yes</answer>", "#### Yes", 1, 1),
        # scripts without spaces between words; "the answer is apple", with a Chinese full stop
        ("<answer>\u7b54\u6848\u662f\u82f9\u679c\u3002</answer>", "\u82f9\u679c", 0.5, 0.5),
        ("<answer>\u82f9\u679c\u3002</answer>", "\u82f9\u679c", 1, 1),
        ("<answer>\u7b54\u6848\u662fParis\u3002</answer>", "Paris", 0.5, 0.5),
        ("<answer>\u7b54\u6848\u662fParisian</answer>", "Paris", 0.01, 0.01),
        ("<answer>\u7b54\u6848\u662f\u68a8</answer>", "\u82f9\u679c", 0.01, 0.01),
        ("<answer>\u7b54\u6848\u662f42\u4e2a\u3002</answer>", "42", 0.5, 0.5),
    ],
)
def test_the_four_values(completion: str, answer: str, marked: float, tagged: float) -> None:
    for function, score in ((graded_reward, marked), (graded_answer_reward, tagged)):
        returned = function(completion, answer)
        assert returned["score"] == score, function.__name__
        assert returned["acc"] == float(score == 1)


# -- lm-evaluation-harness ---------------------------------------------------------------------------------------------

STRICT, FLEXIBLE = r"#### (\-?[0-9\.\,]+)", r"(-?[$0-9.,]{2,})|(-?[0-9]+)"
FORMS = [
    *("%s", "#### %s", "####%s", "#### $%s", "#### %s.", "#### %s dollars", "The answer is %s.", "\\boxed{%s}"),
    *("#### %s\n#### 7", "#### 7\nno #### %s", "#### -%s", "#### %s.00", "%s%%", "#### ", "#### .", "", "-", "$$"),
    *("...", "#### %s...", "#### %s,", "#### 1.000,%s", "**%s**", "%s\n\n", "Question: %s"),
]


def harness(pattern: str, select: int, completion: str, solution: str) -> float:
    matches = re.findall(pattern, completion)
    match = matches[select] if matches else "[invalid]"
    if isinstance(match, tuple):
        match = next(group for group in match if group)
    sides = []
    for side in (match.strip(), solution):
        for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
            side = re.sub(ignored, "", side)
        sides.append(side.lower())
    return float(sides[0] == sides[1])


def _compare(completion: str, answer: str, solution: str) -> None:
    for name, pattern, select in (("gsm8k_strict", STRICT, 0), ("gsm8k_flexible", FLEXIBLE, -1)):
        expected = harness(pattern, select, completion, solution)
        for given_answer in (answer, solution):  # either may be the reference answer
            assert rewards.get(name)(completion, given_answer)["score"] == expected, (name, completion, given_answer)


def test_equal_completions_get_the_harness_scores() -> None:
    rng = random.Random(0)
    for number in range(1500):
        answer = rng.choice([str(number), f"{number * 1000:,}", f"-{number}", f"{number}.5"])
        solution = f"It is 3 * 4 = <<3*4=12>>12.\n#### {answer}"
        value = rng.choice([answer, answer.replace(",", ""), str(rng.randint(0, 99))])
        form = rng.choice(FORMS)
        text = rng.choice(["", "It is 3 * 4 = 12.\n"]) + (form % value if "%s" in form else form)
        _compare(text, answer, solution)
    for row in map(json.loads, (WHOLE / "gsm8k" / "test.jsonl").read_text().splitlines()):
        answer = row["answer"].rpartition("#### ")[2]
        _compare(row["answer"], answer, row["answer"])
        assert rewards.get("gsm8k_strict")(row["answer"], answer)["score"] == 1.0


# -- hostile texts, for all rewards that read no formula ---------------------------------------------------------------

OF_ROWS = {name for name in rewards.names() if rewards.facts(name).check}  # they grade by columns of the row
NAMES = sorted({*rewards.names()} - {"composite", "judge", "math", "remote"} - OF_ROWS)
ANSWERS = {"choice": "C", "calls": "[]"}  # reference answers that are not 42
CHARACTERS = st.one_of(st.characters(), st.sampled_from("#<answer>/\\boxed{} 0159.,-+*$%=()^\u0665\u00bd\n"))


@settings(deadline=None, max_examples=150)
@given(st.text(CHARACTERS, max_size=100))
def test_any_text_is_graded_without_an_exception(text: str) -> None:
    for name in NAMES:
        kwargs = {"max_length": 100} if name == "length" else {}
        for start in ("", "####", "<answer>"):
            value = rewards.get(name)(start + text, ANSWERS.get(name, "42"), **kwargs)
            assert -1 <= (value["score"] if isinstance(value, dict) else value) <= 1


MEGABYTES_10 = 10_000_000
PIECES = ["#", "<answer>", "\\boxed{", "0", "0." + "0" * 5000, "1,000", " ", "\n", "42/", "\u0665"]
MORE_PIECES = [
    "answer is * ",
    "a",
    "ab ",
    "\u0301",
    "<think>",
    "\u4f60",
    "\ud800",
    "1+1=2\n",
    "1+1=2,",
    "((",
    "9^9^",
    "<<",
]


@pytest.mark.parametrize("piece", [*PIECES, *MORE_PIECES])
def test_a_long_text_takes_linear_time(piece: str) -> None:
    """Each reads a text a few times: 0.1 to 1.5 s of processor time for 10 MB. Quadratic time would be hours."""
    start = time.process_time()
    text = piece * (MEGABYTES_10 // len(piece))
    for name in ("arithmetic", "format", "gsm8k", "tag_count"):
        rewards.get(name)(text, "42")
    for prefix in ("####", "<answer>", "\\boxed{") if piece in PIECES else ():
        marked_number(prefix + text + "</answer>")
    arithmetic_reward("<think>" + text, "42")
    opened_thought(text)
    for name in NAMES:  # these read every character
        for answer in ("42", "a b") if name.startswith("graded") else (ANSWERS.get(name, "42"),):
            rewards.get(name)(text[:250_000], answer, **({"max_length": 100} if name == "length" else {}))
    assert time.process_time() - start < 90


# -- letters of choices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *(
            (text, "C")
            for text in ("Answer: C", "**Answer:** C", "**Answer: C**", "ANSWER: C", "the answer is (C).", "C")
        ),
        *((text, "C") for text in ("The correct answer is C) Rome", "The answer is\n\n**C**", "Answer: $C$", "(C)")),
        *(
            (text, "C")
            for text in (r"$\boxed{\text{C}}$", r"The answer is $\boxed{\mathrm{(C)}}$", "<answer>C</answer>")
        ),
        ("The answer is A. Wait, no.\nAnswer: B", "B"),
        ("Answer: **I**", "I"),
        *(
            (text, None)
            for text in ("Answer: I think so", "Answer: Cats", "answer is A's", "answer: c", "the answer", "")
        ),
        ("answer to question C", None),
    ],
)
def test_the_letter_behind_the_last_mark(text: str, letter: str | None) -> None:
    assert extractors.get("choice").extract(text) == letter
    assert rewards.get("choice")(text, "C") == {
        "score": float(letter == "C"),
        "acc": float(letter == "C"),
        "extracted": float(letter is not None),
    }


def test_letters_beside_those_of_lm_evaluation_harness() -> None:
    """Its regular expressions of mmlu_pro 3.1 and gpqa_*_cot_zeroshot 2.2 (flexible-extract), as of lm-eval 0.4.13.

    They find no letter in other forms, and the first one takes the first answer of a text that corrects itself.
    """
    mmlu_pro, gpqa = re.compile(r"answer is \(?([ABCDEFGHIJ])\)?"), re.compile(r"\([A-Z]\)")
    texts = {
        "So the answer is (C).": "CC",
        "the answer is C": "C-",
        "Answer: C": "--",
        r"\boxed{C}": "--",
        "I pick (C)": "-C",
    }
    for text, found in texts.items():
        harness = [next(iter(mmlu_pro.findall(text)), "-"), next(iter(gpqa.findall(text)[-1:]), "(-)")[1]]
        assert harness == [*found]
    assert [extractors.get("choice").extract(text) for text in texts] == ["C", "C", "C", "C", None]
    corrected = "The answer is A... no, the answer is B"
    assert mmlu_pro.findall(corrected)[0] == "A" and extractors.get("choice").extract(corrected) == "B"


def test_a_reference_answer_that_is_no_letter_is_an_error() -> None:
    with pytest.raises(ValueError, match="the reference answer 'Rome' is not a letter of a choice"):
        rewards.get("choice")("Answer: C", "Rome")
