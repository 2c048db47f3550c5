r"""The grader of MATH: extraction, results on pairs of answers, when sympy is needed, hostile text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.rewards.math.grader import (
    boxed_prediction,
    equivalent,
    is_right,
    latex_answer,
    math_reward,
    vote_key,
)
from grpo_megatron.rewards.math.structure import parse_tree
from grpo_megatron.rewards.math.value import import_math_verify, refuses
from grpo_megatron.rewards.pool import RewardPool
from tests.files import DATA

ROOT = Path(__file__).resolve().parents[3]


PIECES = [
    *("\\frac", "\\text{", "\\{", "{", "}", "(", "[", "]", ")", ",", ";", ":", "1", "23", "x", "cm", "\\pm", "\\cup"),
    *("=", "<", "\\le", "\\in", "\\\\", "&", "^", "_", ".", "%", "\\$", "$"),
]


@pytest.fixture(scope="module", autouse=True)
def imported_math_verify() -> None:
    import_math_verify()  # before any test measures time


@pytest.mark.parametrize(
    ("text", "prediction"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1} no, $\boxed{2}$.", "2"),
        (r"\boxed{1} no, \boxed{2", None),
        (r"\boxed 7$ is it", "7"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\fbox{7}", "7"),
        (r"$\boxed{7\}$ in all.", "7"),
        (r"\boxed{\{1,2\}\}$", r"\{1,2\}"),
        (r"\boxed{\{1,2\}", None),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{1} and \boxed{3}", "1, 3"),
        (r"\boxed{1} but \boxed{3}", "3"),
        (r"<answer> 7 </answer>", "7"),
        (r"<answer>\boxed{7}</answer>", "7"),
        (r"\boxed{6} <answer>7</answer>", "7"),
        (r"\boxed{6} <answer>7", None),
        ("The answer is 7.", None),
        ("so.\nFinal Answer: **7**", "7"),
        ("### Final Answer\n\n**$7$**.\n\n---", "7"),
        ("> **The final answer is:** `7`", "7"),
        ("Final Answer: 3*4", "3*4"),
        (r"*Final Answer:* $1010_{2} * 2$", r"1010_{2} * 2"),
        (r"_Final Answer: $(110)_2$._", r"(110)_2"),
        ("Answer: $13$", "13"),
        ("**Answer:** $(6,0)$.", "(6,0)"),
        ("The answer is: 7", "7"),
        ("Answer: 6 or 7", None),
        ("Answer: 7\nBut no.", None),
        ("Final Answer: 6 or 7", None),
        ("Final Answer: 7\nBut no.", None),
        (r"Final Answer: 7 \boxed{8", None),
        ("", None),
    ],
)
def test_boxed_prediction(text: str, prediction: str | None) -> None:
    assert boxed_prediction(text) == prediction


def pairs(*names: str) -> list[tuple[str, str]]:
    """Reads (answer, prediction) for each prediction of every line of these tables."""
    tables: dict[str, list[tuple[str, str]]] = {}
    for line in (DATA / "math" / "pairs.txt").read_text().splitlines():
        if line.startswith("[") and line.endswith("]") and " @ " not in line:
            table = tables.setdefault(line[1:-1], [])
        elif not line.startswith("#"):
            answer, *predictions = line.split(" @ ")
            table += [(answer.strip(), prediction.strip()) for prediction in predictions]
    return [pair for name in names for pair in tables[name]]


@pytest.mark.parametrize(("answer", "prediction"), pairs("EQUAL", "SAME"))
def test_equal_answers(answer: str, prediction: str) -> None:
    assert equivalent(answer, prediction)
    assert math_reward(rf"Thus $\boxed{{{prediction}}}$.", answer) == {"score": 1.0, "acc": 1.0, "extracted": 1.0}


@pytest.mark.parametrize(("answer", "prediction"), pairs("DIFFERENT", "OTHER"))
def test_different_answers(answer: str, prediction: str) -> None:
    assert not equivalent(answer, prediction)
    assert math_reward(rf"Thus $\boxed{{{prediction}}}$.", answer)["score"] == 0.0


def test_of_several_boxes_the_list_or_the_last() -> None:
    assert is_right("1,3", r"\boxed{1} and \boxed{3}")
    assert is_right("3", r"\boxed{1} and \boxed{3}")  # a reference of MATH may hold only the last
    assert not is_right("1", r"\boxed{1} and \boxed{3}")
    assert not is_right("1", r"\boxed{1}, wait, \boxed{3}")


def test_the_reference_may_be_boxed_but_not_empty() -> None:
    assert latex_answer(r"so it is \boxed{\frac12}") == r"\frac12"
    assert latex_answer(" 7 ") == "7"
    for empty in ("", " ", r"\boxed{}"):
        with pytest.raises(ValueError, match="the reference answer is empty"):
            latex_answer(empty)


def test_votes_for_one_number_are_one_vote() -> None:
    assert {vote_key(text) for text in (r"\frac12", "0.5", r"\dfrac{1}{2}", "1/2", " 2/4 ")} == {"1/2"}
    assert vote_key(r"\left(1, 2\right)") == vote_key("(1,2)") != vote_key("[1,2]")


def test_plain_answers_never_need_sympy() -> None:
    code = r"""
import sys
from grpo_megatron.rewards.math.grader import math_reward
for answer, text, score in [("42", "42", 1), ("42", "43", 0), ("0.5", r"\frac12", 1), ("1,000", "1000", 1), ("x+1", "x+1", 1),
                          ("7", "no idea at all", 0), (r"\text{Evelyn}", "Evelyn", 1), ("(1,2)", "(2,1)", 0), ("2", "x=2", 1),
                          (r"\{1,2\}", "2,1", 1), ("[0,1)", "[0,1]", 0), ("3,5", r"\{5,3\}", 1), ("5", "none", 0)]:
    assert math_reward(r"\boxed{%s}" % text, answer)["score"] == score, (answer, text)
print("sympy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(PIECES)))
def test_any_text_has_a_tree_and_a_key(pieces: list[str]) -> None:
    for text in ("".join(pieces), " ".join(pieces)):
        parse_tree(text)
        vote_key(text)
        boxed_prediction("\\boxed{" + text + "}")


# -- hostile text, in the workers that training and evaluation use -----------------------------------------------------

TIMEOUT_S = 300.0  # usually below 1 s; hours if any of it were evaluated
MARKER = "grader-was-here"
MILLIONS = {
    "brackets": "\\boxed{" + "(" * 10_000_000,
    "braces": "{" * 10_000_000,
    "boxes": "\\boxed{" * 1_400_000,
    "digits": "\\boxed{" + "9" * 10_000_000 + "}",
    "tags": "<answer>" * 1_200_000,
}
HOSTILE = {
    "tower": r"\boxed{9^9^9^9}",
    "tower of brackets": r"\boxed{(9^{999})^{999}}",
    "factorials": r"\boxed{((99!)!)!}",
    "huge factorial": r"\boxed{99999999!}",
    "huge binomial": r"\boxed{\binom{99999999}{4444444}}",
    "import": rf"\boxed{{__import__('os').system('touch {MARKER}')}}",
    "dunder": r"\boxed{().__class__.__base__.__subclasses__()}",
    "lambda": r"\boxed{(lambda: [0] * 10**10)()}",
    "full-width digits": "\\boxed{\uff14\uff12}",
    "nested roots": "\\boxed{" + "\\sqrt{" * 200 + "2" + "}" * 200 + "}",
    "nested fractions": "\\boxed{" + "\\frac{1}{" * 100 + "2" + "}" * 100 + "}",
    "long list": "\\boxed{" + "x," * 2000 + "}",
    "nulls": "\\boxed{\x00\x00}",
    "surrogate": "\\boxed{\ud800}",
}
SLOW = {"power of a sum": r"\boxed{(x+y+z+1)^{999}}", "tower of pi": r"\boxed{\pi^{\pi^{\pi^{\pi^\pi}}}}"}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    with RewardPool(1, TIMEOUT_S) as pool, pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cwd"))
        yield pool


@pytest.mark.parametrize("name", [*MILLIONS, *HOSTILE])
def test_hostile_text_is_wrong_and_nothing_more(pool: RewardPool, name: str) -> None:
    text = (MILLIONS | HOSTILE)[name]
    results = pool.grade([("math", text, "42"), ("math", text, "x^2+1"), ("gsm8k", text, "42")])
    assert [(result.reward, result.status) for result in results] == [(0.0, "ok")] * 3
    assert not Path(MARKER).exists() and not (ROOT / MARKER).exists()


@pytest.mark.parametrize("name", SLOW)
def test_what_sympy_cannot_finish_is_wrong(pool: RewardPool, name: str) -> None:
    good = ("math", r"\boxed{(x+1)^2}", "x^2+2x+1")
    results = pool.grade([good, ("math", SLOW[name], "x^2+1"), good])
    assert [result.status for result in results] == ["ok", "ok", "ok"]
    assert [result.reward for result in results] == [1.0, 0.0, 1.0]


def test_what_is_refused_before_sympy_sees_it() -> None:
    for text in ("9^{9^9}", "2^99999", "(9^{99})^{999}", "99999!", "5!!", "\uff15", "x" * 301, "(" * 13 + ")" * 13):
        assert refuses(text), text
    for text in ("2^{10}", "e^{x^2}", "x^{2n+1}", "100!", r"\binom{100}{50}", "(x+1)^{100}", r"\frac{1}{2}"):
        assert not refuses(text), text
