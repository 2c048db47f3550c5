r"""The reference solutions of the real files, graded: all are right but two, whose box is empty.

Those two are in MATH's training split: the authors left out the letter of a choice. The text of both problems gives 0,
which is the answer in the task (missing_answers in data/tasks/math.yaml). The solution boxes nothing, so it is wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.data.rows import read_rows
from grpo_megatron.data.task import get_task
from grpo_megatron.rewards import rewards
from grpo_megatron.rewards.math import structure, value
from grpo_megatron.rewards.math.grader import boxed_prediction, equivalent
from grpo_megatron.rewards.math.structure import parse_tree, same_tree
from grpo_megatron.rewards.math.value import rational, same_value, split_unit
from tests.files import DATA, SLICE_AND_WHOLE, WHOLE

COUNTS = {"train": 7500, "test": 5000, "math500_test": 500}
SLICES = {"train": 62, "test": 60, "math500_test": 80}


def _rows(name: str, data: Path = WHOLE) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / "math" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("data", SLICE_AND_WHOLE)
@pytest.mark.parametrize("name", COUNTS)
def test_every_reference_solution_of_real_math_is_right(name: str, data: Path) -> None:
    rows = _rows(name, data)
    answers = [answer for _, answer in read_rows(data / "math" / f"{name}.jsonl", get_task("math").read_row)]
    assert len(rows) == len(answers) == (SLICES if data == DATA else COUNTS)[name]
    wrong = [
        (boxed_prediction(row["solution"]), answer)
        for row, answer in zip(rows, answers, strict=True)
        if rewards.get("math")(row["solution"], answer)["score"] != 1.0
    ]
    assert wrong == [("", "0")] * (2 if name == "train" else 0)


def test_another_box_is_wrong() -> None:
    """Each solution against the reference of the next row with another answer: equal only where the values are."""
    rows = _rows("math500_test")
    numbers = [row for row in rows if rational(row["answer"]) is not None]
    for row, other in zip(numbers, numbers[1:], strict=False):
        same_number = rational(row["answer"]) == rational(other["answer"])
        assert rewards.get("math")(row["solution"], other["answer"])["score"] == float(same_number)


def test_respelt_references_are_right() -> None:
    for row in _rows("math500_test"):
        answer = row["answer"]
        for prediction in (
            answer.replace("\\frac", "\\dfrac"),
            answer.replace("\\left", "").replace("\\right", ""),
            answer.replace(" ", "").replace("\\pi", "\\pi ").replace("\\cos", "\\cos ").replace("\\le", "\\le "),
            f"$ {answer} $.",
            f"\\displaystyle {answer}",
        ):
            if "\\le f" not in prediction:
                assert equivalent(answer, prediction), (answer, prediction)


@pytest.mark.slow
@pytest.mark.real_data
def test_math_verify_reads_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow path, on every 40th different reference of MATH: no shortcut for one and the same string."""
    answers = sorted(
        {boxed_prediction(row["solution"]) or "" for name in ("train", "test") for row in _rows(name)} - {""}
    )
    unread = []

    def slow(one: str, other: str) -> bool:
        one, other = (split_unit(text)[0].removesuffix("%") for text in (one, other))
        if rational(one) is not None or (not value.refuses(one) and "text" in one) or one.replace("_", "").isalnum():
            return same_value(one, other)
        return value.same_formula(one, other)

    monkeypatch.setattr(structure, "same_value", slow)
    for answer in answers[::40]:
        tree = parse_tree(answer)
        if not same_tree(tree, tree):
            unread.append(answer)
    assert len(answers) > 4000 and unread == []
