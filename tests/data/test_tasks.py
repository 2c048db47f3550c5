"""The tasks of benchmarks: what their rows give, which reward grades them, and what is wrong with a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.data.rows import read_rows
from grpo_megatron.data.tasks import EMPTY_BOXES, get_task, tasks
from grpo_megatron.rewards import check_reward, extractors

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.mark.parametrize(
    ("task", "row", "answer"),
    [
        ("gsm8k", {"question": "q", "answer": "so\n#### 1,234"}, "1,234"),
        ("math", {"problem": "q", "solution": r"\boxed{1} is $\boxed{\frac{1}{2}}$"}, r"\frac{1}{2}"),
        ("math", {"problem": "q", "answer": "7", "solution": r"\boxed{8}"}, "7"),
        ("math", {"problem": EMPTY_BOXES[0] + " (A) 0", "solution": r"\boxed{}"}, "0"),
        ("math500", {"problem": "q", "answer": "x"}, "x"),
        ("olympiadbench", {"question": "q", "final_answer": ["$1$", "$2$"]}, "$1$, $2$"),
        ("boxed", {"prompt": "q", "answer": 204}, "204"),
        ("boxed", {"problem": "q", "answer": "204"}, "204"),
        ("svamp", {"Body": "b", "Question": "q", "Answer": 145.0}, "145"),
        ("svamp", {"Body": "b", "Question": "q", "Answer": 2.5}, "2.5"),
    ],
)
def test_answers_of_rows(task: str, row: dict[str, Any], answer: str) -> None:
    question, gold = get_task(task).read_row(row)
    assert gold == answer
    assert question == {"svamp": "b q"}.get(task, row.get("problem", "q"))


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("math", {"problem": "q", "solution": r"\boxed{1"}, r"field 'solution' has no closed"),
        ("math", {"problem": "q", "solution": r"\boxed{}"}, "the reference answer is empty"),
        ("math", {"problem": "q"}, "field 'solution' is missing"),
        ("olympiadbench", {"question": "q", "final_answer": "1"}, "'final_answer' is not a list of strings"),
        ("boxed", {"problem": "q"}, "field 'answer' is missing"),
        ("svamp", {"Body": "b", "Question": "q", "Answer": None}, "field 'Answer' is not a number"),
        ("svamp", {"Body": "b", "Question": "q", "Answer": "many"}, "'many' is not a number"),
    ],
)
def test_wrong_rows(task: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_task(task).read_row(row)


def test_every_task_with_a_reward_shares_its_extractor() -> None:
    for name in tasks.names():
        task = get_task(name)
        assert task.name == name
        if task.reward is not None:
            check_reward(task.reward)
            assert task.reward in extractors.names()


@pytest.mark.parametrize(
    ("task", "file", "count"),
    [("olympiadbench", "extra/olympiadbench/test", 675), ("svamp", "extra/svamp/test", 1000)],
)
def test_real_files_are_read(task: str, file: str, count: int) -> None:
    path = DATA / f"{file}.jsonl"
    if not path.exists():
        pytest.skip(f"not found: {path}")
    assert len(read_rows(path, get_task(task).read_row)) == count
