"""`grade` and `grade_file`: verdicts and extracted answers in order, bad rows by line, nothing half-written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_megatron.config import ConfigError
from grpo_megatron.data.benchmarks import BenchmarkProblem
from grpo_megatron.evaluation import grading
from grpo_megatron.evaluation.grading import Grade, KeptGrades, grade, grade_file, grader_of, same_answers
from grpo_megatron.evaluation.ledger import LedgerEntry
from grpo_megatron.evaluation.results import grade_samples
from grpo_megatron.rewards.pool import RewardPool
from tests.files import DATA, WHOLE
from tests.runs import write_rows


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(2, 30.0) as pool:
        yield pool


def test_grades_of_gsm8k(pool: RewardPool) -> None:
    answers = ["18", "1,234", "5", "18", "18"]
    texts = ["#### 18", "#### $1,234.00", "\\boxed{6}", "eighteen", "18"]
    expected = [Grade(True, "18"), Grade(True, "1234"), Grade(False, "6"), Grade(False, None), Grade(False, None)]
    assert grade("svamp", answers, texts, pool) == grade("gsm8k", answers, texts, pool) == expected
    assert [verdict.format_ok for verdict in expected] == [True, True, True, False, False]
    assert [one.correct for one in grade("gsm8k_flexible", answers, texts, pool)] == [True, False, False, False, True]
    bad = grade("gsm8k", ["many", "18"], ["#### 18", "#### 18"], pool)  # an error of its row
    assert [(verdict.correct, verdict.status) for verdict in bad] == [(False, "error"), (True, "ok")]
    assert "'many' is not a number" in bad[0].message


def test_grades_between_answer_tags_and_behind_an_opened_thought(pool: RewardPool) -> None:
    """`gsm8k_r1`: numbers and texts. `format` needs the `<think>` that the prompt wrote."""
    answers = ["18", "18", "Paris", "Paris"]
    texts = [f"6 + 12</think><answer>{text}</answer>" for text in ("18.0", "17", " paris.", "")]
    expected = [Grade(True, "18"), Grade(False, "17"), Grade(True, "paris"), Grade(False, None)]
    assert grade("gsm8k_r1", answers, texts, pool) == expected
    assert same_answers("graded_answer", [("1/2", "0.5"), ("Rome", "ROME"), ("1", "2")], pool) == [True, True, False]
    entry, problem = LedgerEntry("u", 0, texts[0], 9, "stop"), BenchmarkProblem("u", "", "")
    grades = grade_samples("format", [(problem, "<think>\n", entry), (problem, "", entry)], pool)
    assert [verdict.correct for verdict in grades] == [True, False]


@pytest.mark.slow
def test_grades_of_math_and_what_takes_too_long(pool: RewardPool) -> None:
    answers = ["x^2+2x+1", "(1,2)", "5", "x^2+1", "7"]
    texts = [r"\boxed{(x+1)^2}", r"\boxed{[1,2]}", "five", r"\boxed{(x+y+z+1)^{999}}", r"\boxed{7}"]
    grades = grade("math", answers, texts, pool)
    assert same_answers("math", [(r"\frac12", "0.5"), ("1", "2")], pool) == [True, False]
    assert [(verdict.correct, verdict.status) for verdict in grades] == [
        *((True, "ok"), (False, "ok"), (False, "ok"), (False, "ok"), (True, "ok"))
    ]
    assert [verdict.prediction for verdict in grades] == ["(x+1)^2", "[1,2]", None, "(x+y+z+1)^{999}", "7"]


def test_kept_grades_hold_for_equal_checkers_and_options(
    tmp_path: Path, pool: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of any package and `--unsafe` grade again. So does a line that cannot be read."""

    def graded() -> int:
        kept = KeptGrades(tmp_path, "gsm8k")
        assert grade("gsm8k", ["18"], ["#### 18"], pool, kept=kept) == [Grade(True, "18")]
        return len(kept.path.read_text().splitlines())

    assert graded() == graded() == 1
    monkeypatch.setattr(grading, "distributions", lambda: [SimpleNamespace(name="math-verify", version="9")])
    grading._grading_code.cache_clear()
    assert graded() == graded() == 2
    monkeypatch.setattr(pool, "kwargs", {"unsafe": True})
    assert graded() == graded() == 3
    grading._grading_code.cache_clear()
    KeptGrades(tmp_path, "gsm8k").path.write_bytes(b'{"key"\n[1]\n{"key": "k", "grade": {"x": 1}}\n\xff\n')
    assert not KeptGrades(tmp_path, "gsm8k").grades


def test_names_of_graders() -> None:
    assert [grader_of(task) for task in ("math500", "olympiadbench", "svamp", "math", "gsm8k_strict")] == [
        *("math", "math", "gsm8k", "math", "gsm8k_strict")
    ]
    with pytest.raises(ConfigError, match="cannot grade with 'gsm9k': unknown reward 'gsm9k'; did you mean 'gsm8k'"):
        grader_of("gsm9k")
    with pytest.raises(ConfigError, match="task 'gsm8k_lm_eval' has no reward of its own; name a reward"):
        grader_of("gsm8k_lm_eval")
    with pytest.raises(ConfigError, match="task 'jsonl' has no reward of its own"):
        grader_of("jsonl")


def test_a_file_keeps_its_rows(tmp_path: Path) -> None:
    rows = [
        {"id": 7, "answer": "18", "completion": "#### 18", "note": "\u00e9\u4e2d"},
        {"answer": 18, "completion": "", "nested": {"a": [1, None]}},
        {"answer": 2.5, "completion": "#### 5/2", "correct": "old"},
    ]
    output = tmp_path / "out.jsonl"
    counts = grade_file("gsm8k", write_rows(tmp_path / "in.jsonl", rows), output)
    assert counts == {"rows": 3, "correct": 2, "without_answer": 1, "timeout": 0, "error": 0}
    verdicts = [(True, "18"), (False, None), (True, "2.5")]
    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        {**row, "correct": correct, "prediction": extracted}
        for row, (correct, extracted) in zip(rows, verdicts, strict=True)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("task", ["gsm8k", "math"])
def test_bad_rows_are_named_and_nothing_is_written(tmp_path: Path, task: str) -> None:
    bad: dict[str, Any] = {
        "is not JSON": "{oops",
        "field 'completion' is missing": {"answer": "1"},
        "field 'completion' is null, not a string": {"answer": "1", "completion": None},
        "field 'answer' is true or false, not a string": {"answer": True, "completion": ""},
    }
    if task == "gsm8k":
        bad["the reference answer 'many' is not a number"] = {"answer": "many", "completion": ""}
    else:
        bad["field 'answer' is a list, not a string"] = {"answer": ["1"], "completion": ""}
    path = write_rows(tmp_path / "in.jsonl", [{"answer": "1", "completion": "#### 1"}, *bad.values()])
    with pytest.raises(ConfigError, match=f"{len(bad)} of {len(bad) + 1} rows are wrong") as error:
        grade_file(task, path, tmp_path / "out.jsonl")
    for line, message in enumerate(bad, start=2):
        assert f"line {line}: {message}" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_output_that_cannot_be_written_is_found_first(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [{"answer": "1", "completion": "#### 1"}])
    for output in (tmp_path, tmp_path / "gone" / "out.jsonl"):
        with pytest.raises(ConfigError, match="cannot write"):
            grade_file("gsm8k", path, output)
    with pytest.raises(ConfigError, match="cannot read data file"):
        grade_file("gsm8k", tmp_path / "none.jsonl", tmp_path / "out.jsonl")


@pytest.mark.parametrize(("data", "count"), [(DATA, 62), pytest.param(WHOLE, 7500, marks=pytest.mark.real_data)])
def test_the_solutions_of_real_math_as_a_file(
    data: Path, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in (data / "math" / "train.jsonl").read_text().splitlines()]
    path = write_rows(tmp_path / "in.jsonl", [{"answer": r["answer"], "completion": r["solution"]} for r in rows])
    counts = grade_file("math", path, tmp_path / "out.jsonl")
    # two reference answers of the file are "", and their solutions have an empty box
    assert counts == {"rows": count, "correct": count, "without_answer": 2, "timeout": 0, "error": 0}
    assert f"2 of {count} reference answers are empty" in capsys.readouterr().err


def test_a_file_gives_its_columns_to_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "by_column.py").write_text(
        "def near(completion, answer, margin): return abs(int(completion) - int(answer)) <= margin"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"completion": "5", "answer": "7", "margin": margin} for margin in (1, 2)]
    write_rows(tmp_path / "rows.jsonl", rows)
    done = grade_file("by_column:near", tmp_path / "rows.jsonl", tmp_path / "graded.jsonl")
    assert (done["correct"], done["error"]) == (1, 0)
    (tmp_path / "rows.jsonl").write_text('{"completion": "5", "answer": "7"}\n')
    with pytest.raises(
        ConfigError, match="nothing gives its parameter 'margin'.*the row's columns|there are completion"
    ):
        grade_file("by_column:near", tmp_path / "rows.jsonl", tmp_path / "graded.jsonl")
