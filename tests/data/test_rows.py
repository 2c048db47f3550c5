"""Reading rows: every mistake is named with file, line and field, several at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.data.fields import text_field
from grpo_megatron.data.rows import read_rows


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _question(row: dict[str, Any]) -> str:
    return text_field(row, "question")


def test_jsonl_and_json_lists_read_the_same(tmp_path: Path) -> None:
    lines = _write(tmp_path / "a.jsonl", '\ufeff{"question": "one"}\r\n\n  \n{"question": "zwei \u00fc"}')
    listed = _write(tmp_path / "a.json", json.dumps([{"question": "one"}, {"question": "zwei \u00fc"}]))
    assert read_rows(lines, _question) == read_rows(listed, _question) == ["one", "zwei \u00fc"]
    table = _write(tmp_path / "a.csv", '\ufeffquestion,note\r\none,\r\n\r\n"zwei \u00fc","of, two\nlines ""x"""\r\n')
    assert read_rows(table, _question) == ["one", "zwei \u00fc"]
    assert read_rows(table, lambda row: row["note"]) == ["", 'of, two\nlines "x"']


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
        ("rows.tsv", "question", "must end with .jsonl or .json or .csv"),
        ("header.csv", "question\n", "has no rows"),
        ("twice.csv", "question,question\na,b\n", "has a column twice in its header: 'question', 'question'"),
        ("short.csv", "question,answer\na,b\nc\n", "line 3: has 1 cells, and the header has 2"),
        ("open.csv", 'question\n"a', "is no CSV .unexpected end of data at line 2"),
        ("latin.csv", b"question\n\xff\n", "is not UTF-8"),
        ("no*.jsonl", None, "no file matches this pattern"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, content: str | bytes | None, message: str) -> None:
    if content is not None:
        _write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / name, _question)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read data file .*gone.jsonl.*No such file"):
        read_rows(tmp_path / "gone.jsonl", _question)
