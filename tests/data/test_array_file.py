""".json files: rows by offset are those of a parser of whole files, and so is each message."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from grpo_megatron.data.array_file import ArrayFile, open_list
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.config import ConfigError
from grpo_megatron.data.rows import ListFile, open_rows, raw_rows
from tests.data.test_json_lines import AWKWARD, VALUES

BLOCKS = "grpo_megatron.data.offset_file.OffsetFile.BLOCK"
ROWS = [{"prompt": f'p{n}, "[\\ {{\n\u00e9', "extra": {"n": n, "list": [n] * (n % 3)}} for n in range(25)]


def outcome(path: Path, by_number: bool) -> str:
    """The rows, or the message; NaN is written as nan, so that it equals itself."""
    try:
        if by_number:
            rows = open_rows(path)
            return repr(list(rows.rows(0, len(rows))))
        found = [row for _, _, row in raw_rows(path)]
        return repr(found) if found else f"data file {str(path)!r} has no rows"
    except ConfigError as error:
        return str(error)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lists")


@pytest.mark.parametrize("block", [7, 1 << 22])
def test_awkward_files_are_read_as_a_whole_file_is(folder: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(BLOCKS, block)
    short = [line for line in AWKWARD if len(line) < 1000]
    files = [*short, *(b"[" + line + b"]" for line in short), *(b"[1, " + line + b" , {}]" for line in short)]
    files += [
        b"[]",
        b" [ ]\n",
        b"\xef\xbb\xbf [1]",
        b"[1]x",
        b"[1] []",
        b"[1}",
        b"[1",
        b"x[1]",
        b"",
        b"[1\x00]",
        b"[\x001\x00]",
    ]
    files += [
        b"[,]",
        b"[1,,2]",
        b'["\\\\", "\\"]", "]"]',
        b'["',
        b'["\\',
        b'["a\\"]',
        b"[{]}",
        b"[1\x0c]",
        b"[1]\xff",
        b"[1]\x0c",
    ]
    path = folder / "a.json"
    for content in files:
        path.write_bytes(content)
        assert outcome(path, True) == outcome(path, False), content[:80]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    values=st.lists(VALUES, max_size=4),
    indent=st.sampled_from([None, 1]),
    place=st.integers(0, 60),
    inserted=st.sampled_from([b"", b"", b"", b'"', b",", b"]", b"[", b"\\", b"\xff", b"\xef\xbb\xbf"]),
    block=st.sampled_from([5, 1 << 22]),
)
def test_changed_files_are_read_as_a_whole_file_is(
    folder: Path, values: Any, indent: int | None, place: int, inserted: bytes, block: int
) -> None:
    content = json.dumps(values, indent=indent).encode()
    path = folder / "b.json"
    path.write_bytes(content[:place] + inserted + content[place:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BLOCKS, block)
        assert outcome(path, True) == outcome(path, False)


def test_right_files_are_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS, indent=2))
    rows = open_list(path)
    assert isinstance(rows, ArrayFile) and list(rows.rows(0, 25)) == ROWS
    assert [next(rows.rows(n, n + 1)) for n in reversed(range(25))] == ROWS[::-1] and list(rows.rows(3, 20)) == ROWS[
        3:20
    ]
    assert rows.place(3) == "row 3"
    path.write_text('[{"a": 1, "a": 2}]')
    with pytest.raises(ConfigError, match="was changed while it was in use"):
        list(rows.rows(0, 1))
    with pytest.raises(ConfigError, match="a.json' has the key 'a' twice in one object"):
        open_rows(path)
    path.write_text(json.dumps(["\ud800"]))
    assert isinstance(open_list(path), ArrayFile)  # single rows may need the strict parser
    path.write_text(f"[{'[' * 70}{']' * 70}]")
    assert isinstance(open_list(path), ListFile)
    monkeypatch.setattr(BLOCKS, 1 << 16)
    path.write_text(json.dumps([{"prompt": "x" * 2000}] * 3000))
    tracemalloc.start()
    rows = open_rows(path)
    assert sum(len(row["prompt"]) for row in rows.rows(0, len(rows))) == 6_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 4
