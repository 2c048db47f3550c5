"""Reading rows: every mistake is named with file, line and field, several at once; and the built-in tasks' rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.data.rows import read_rows, text_field
from grpo_megatron.data.tasks import Task, get_task


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _question(row: dict[str, Any]) -> str:
    return text_field(row, "question")


def test_jsonl_and_json_lists_read_the_same(tmp_path: Path) -> None:
    lines = _write(tmp_path / "a.jsonl", '\ufeff{"question": "one"}\r\n\n  \n{"question": "zwei \u00fc"}')
    listed = _write(tmp_path / "a.json", json.dumps([{"question": "one"}, {"question": "zwei \u00fc"}]))
    assert read_rows(lines, _question) == read_rows(listed, _question) == ["one", "zwei \u00fc"]


def test_all_mistakes_of_a_file_are_one_error(tmp_path: Path) -> None:
    rows = [
        b'{"question": "fine"}',
        b'{"question": ""}',
        b'{"questoin": "x", "answer": "y"}',
        b'{"question": 5}',
        b"[1]",
        b'{"question": "unclosed',
        b'{"question": "\xff"}',
        b'{"question": null}',
    ]
    path = _write(tmp_path / "bad.jsonl", b"\n".join(rows))
    with pytest.raises(ValueError) as error:
        read_rows(path, _question)
    assert str(error.value).splitlines() == [
        f"data file {str(path)!r}: 7 of 8 rows are wrong:",
        "  line 2: field 'question' is empty",
        "  line 3: field 'question' is missing (fields: 'questoin', 'answer')",
        "  line 4: field 'question' is int, not a string",
        "  line 5: is a list, not an object",
        "  line 6: is not JSON (Unterminated string starting at at line 1, column 14)",
        "  and 2 more",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "has no rows"),
        ("blank.jsonl", "\n \n", "has no rows"),
        ("empty.json", "[]", "has no rows"),
        ("object.json", "{}", "must be a list of objects, not an object"),
        ("broken.json", "[", "is not JSON"),
        ("deep.json", "[" * 100_000, "nested too deeply"),
        ("list.json", '[{"question": "x"}, 5]', "row 1: is int, not an object"),
        ("rows.csv", "question", "must end with .jsonl or .json"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rows(_write(tmp_path / name, content), _question)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read data file .*gone.jsonl.*No such file"):
        read_rows(tmp_path / "gone.jsonl", _question)


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        ("gsm8k", {"question": "1+1?", "answer": "<<1+1=2>>\n#### 1,234 "}, ("1+1?", "1,234")),
        ("arithmetic", {"prompt": "1+1<sep>", "answer": "-2"}, ("1+1<sep>", "-2")),
        ("jsonl", {"prompt": "hi", "answer": ""}, ("hi", "")),
        (
            "jsonl",
            {"prompt": [{"role": "user", "content": "x"}], "answer": "y"},
            ([{"role": "user", "content": "x"}], "y"),
        ),
    ],
)
def test_tasks_read_their_rows(task: str, row: dict[str, Any], expected: tuple[Any, str]) -> None:
    assert get_task(task).read_row(row) == expected


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("gsm8k", {"question": "1+1?"}, "'answer' is missing"),
        ("gsm8k", {"question": "1+1?", "answer": "2"}, "no #### before"),
        ("gsm8k", {"question": "1+1?", "answer": "#### two"}, "'two' is not a number"),
        ("arithmetic", {"prompt": "1+1", "answer": "2.0"}, "'2.0', not an integer"),
        ("arithmetic", {"prompt": "1+1", "answer": 2}, "is int, not a string"),
        ("jsonl", {"prompt": [], "answer": ""}, "'prompt' is empty"),
        ("jsonl", {"prompt": ["x"], "answer": ""}, "a message must be an object"),
        ("jsonl", {"prompt": [{"role": "user"}], "answer": ""}, "'content' is missing"),
        ("jsonl", {"prompt": [{"role": "assistant", "content": "x"}], "answer": ""}, "ends with the assistant's turn"),
    ],
)
def test_tasks_refuse_wrong_rows(task: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_task(task).read_row(row)


def test_tasks_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_task.py").write_text(
        "from grpo_megatron.data.tasks import Task\n"
        "def make(): return Task('mine', lambda row: (row['q'], row['a']), 'graded')\n"
        "MINE = make()\n"
        "def wrong(): return 5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_task:make", "my_task:MINE"):
        task = get_task(name)
        assert isinstance(task, Task) and (task.name, task.reward) == ("mine", "graded")
    with pytest.raises(ValueError, match="data.task='my_task:wrong' gives int"):
        get_task("my_task:wrong")
    with pytest.raises(ValueError, match="unknown task 'gsm8'; did you mean 'gsm8k'"):
        get_task("gsm8")
