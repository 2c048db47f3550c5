"""Rows of data files: every format gives its rows by number, and all mistakes are named with file, line and field."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_megatron.config import ConfigError
from grpo_megatron.data import rows as rows_module
from grpo_megatron.data.rows import LineFile, RowSet, open_rows, read_rows, text_field

ROWS = [{"prompt": f"p{n}\n\u00e9", "extra": {"n": n, "list": [n] * (n % 3)}} for n in range(25)]


def by_number(path: Path) -> list[Any]:
    rows = open_rows(path)
    last_first = [next(rows.rows(n, n + 1)) for n in reversed(range(len(rows)))]
    assert list(rows.rows(3, 20)) == last_first[::-1][3:20]
    assert list(rows.rows(5, 5)) == []
    return last_first[::-1]


def parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def arrow_stream(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As `datasets` writes it: the stream format, in batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def test_text_formats_by_number(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    texts = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    blank = "\n \t\r\n".join(texts[:20])  # blank lines are no rows
    lines.write_bytes(b"\xef\xbb\xbf" + f"{blank}\n\n{texts[20]}\n  {texts[21]}\nnot json\n{texts[22]}".encode())
    found = by_number(lines)
    assert found[:22] == ROWS[:22] and found[23] == ROWS[22] and "is not JSON" in str(found[22])
    rows = open_rows(lines)
    assert [rows.place(n) for n in range(24)] == [f"line {n}" for n in [*range(1, 40, 2), 41, 42, 43, 44]]
    assert isinstance(rows, LineFile) and [rows.line(n) for n in (0, 23)] == [texts[0], texts[22]]
    table = tmp_path / "a.csv"
    table.write_bytes(b'\xef\xbb\xbfa,b\r\n1,"two\r\nlines ""q"""\r\n\r\n2,x\r\n3\r\n')
    *right, wrong = by_number(table)
    assert right == [{"a": "1", "b": 'two\r\nlines "q"'}, {"a": "2", "b": "x"}] and "has 1 cells" in str(wrong)
    assert [open_rows(table).place(n) for n in range(3)] == ["line 3", "line 5", "line 6"]
    whole = tmp_path / "a.json"
    whole.write_text(json.dumps(ROWS))
    assert by_number(whole) == ROWS


def test_a_file_that_is_read_as_a_whole_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in (("a.json", '[{"a": 1}]'), ("a.csv", "aaaa,b\n1,2")):
        (tmp_path / name).write_text(content)
        monkeypatch.setattr(rows_module, "MAX_WHOLE", 10)
        assert len(open_rows(tmp_path / name)) == 1
        monkeypatch.setattr(rows_module, "MAX_WHOLE", 9)
        with pytest.raises(ConfigError, match=f"has 10 bytes; a .{name[2:]} file is read into memory, .* as .jsonl"):
            open_rows(tmp_path / name)


def test_a_file_that_changes_is_an_error(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"a": 1}\n{"a": 2}\n')
    rows = open_rows(lines)
    lines.write_text('{"a": 11}\n{"a": 2}\n')
    with pytest.raises(ConfigError, match="was changed while it was in use"):
        list(rows.rows(1, 2))


def test_a_row_that_is_too_long_is_wrong_and_the_others_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    fits, long = {"a": "x" * 23}, {"a": "x" * 90}  # 32 bytes, and more than three times as many
    lines.write_text("\n".join(map(json.dumps, [fits, long, {}, {}, long])))
    rows = LineFile(lines, max_row=32)
    first, second, third, fourth, fifth = rows.rows(0, 5)
    assert (first, third, fourth) == (fits, {}, {})
    assert all(isinstance(row, ValueError) and "more than 32 bytes" in str(row) for row in (second, fifth))


def test_parquet_and_arrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert by_number(parquet(tmp_path / "a.parquet", ROWS, row_group_size=4)) == ROWS
    assert by_number(arrow_stream(tmp_path / "b.arrow", ROWS)) == ROWS
    # more row groups than are kept: they are decoded again, and a warning says so if they are large
    monkeypatch.setattr(rows_module, "KEPT_BYTES", 300)
    monkeypatch.setattr(rows_module, "_row_groups", rows_module._RowGroups())
    assert by_number(tmp_path / "a.parquet") == ROWS and not caplog.text
    assert 0 < len(rows_module._row_groups._tables) < 7
    monkeypatch.setattr(rows_module, "LARGE_GROUP", 0)
    assert by_number(tmp_path / "a.parquet") == ROWS
    assert caplog.text.count("write the files with small row groups") == 1
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match=r"c.parquet' is no parquet file that can be read"):
        open_rows(tmp_path / "c.parquet")


def test_values_that_json_lacks(tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 2)
    row = {"day": day, "bytes": b"\xff", "price": decimal.Decimal("1.50"), "deep": [{"day": day}], "none": None}
    expected = {"day": "2026-01-02", "bytes": "/w==", "price": "1.50", "deep": [{"day": "2026-01-02"}], "none": None}
    assert by_number(parquet(tmp_path / "a.parquet", [row] * 20)) == [expected] * 20


def save_to_disk(folder: Path, parts: list[list[dict[str, Any]]]) -> None:
    names = [f"data-{n:05d}-of-{len(parts):05d}.arrow" for n in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        arrow_stream(folder / name, rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_folders_of_datasets(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "saved", [ROWS[:10], ROWS[10:]])
    assert by_number(tmp_path / "saved") == ROWS
    assert open_rows(tmp_path / "saved").place(12) == "shard 1, row 2"
    for split in ("train", "test"):
        save_to_disk(tmp_path / "both" / split, [ROWS])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert by_number(tmp_path / "both" / "test") == ROWS
    with pytest.raises(ConfigError, match=r"both' has several splits; name one of .*both/test, .*both/train$"):
        open_rows(tmp_path / "both")
    hub = tmp_path / "hub"
    for n, part in enumerate((ROWS[:10], ROWS[10:])):
        parquet(hub / "data" / f"train-{n:05d}-of-00002.parquet", part)
    assert by_number(hub) == by_number(hub / "train") == ROWS
    shutil.copy(hub / "data" / "train-00000-of-00002.parquet", hub / "data" / "test-00000-of-00001.parquet")
    assert open_rows(hub / "test").place(0) == "row 0" and by_number(hub / "train") == ROWS
    with pytest.raises(ConfigError, match=r"hub' has no split 'dev'; it has test, train"):
        open_rows(hub / "dev")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no data set"):
        open_rows(tmp_path / "empty")
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match="without _data_files"):
        open_rows(tmp_path / "saved")


# -- checks of all rows ------------------------------------------------------------------------------------------------


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _question(row: dict[str, Any]) -> str:
    return text_field(row, "question")


def test_all_mistakes_of_a_file_are_one_error(tmp_path: Path) -> None:
    rows = [
        b'{"question": "fine"}',
        b'{"question": ""}',
        b'{"questoin": "x", "answer": "y"}',
        b'{"question": 5}',
        b"[1]",
    ]
    rows += [b'{"question": "unclosed', b'{"question": "\xff"}', b'{"question": null}']
    path = _write(tmp_path / "bad.jsonl", b"\n".join(rows))
    with pytest.raises(ValueError) as error:
        read_rows(path, _question)
    assert str(error.value).splitlines() == [
        f"data file {str(path)!r}: 7 of 8 rows are wrong:",
        "  line 2: field 'question' is empty",
        "  line 3: field 'question' is missing (fields: 'questoin', 'answer')",
        "  line 4: field 'question' is a number, not a string",
        "  line 5: is a list, not an object",
        "  line 6: is not JSON (Unterminated string starting at: column 14)",
        "  and 2 more",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("object.json", "{}", "must be a list of objects, not an object"),
        ("list.json", '[{"question": "x"}, 5]', "row 1: is a number, not an object"),
        ("rows.tsv", "question", "must end with .jsonl or .json or .csv"),
        ("twice.csv", "question,question\na,b\n", "has a column twice in its header: 'question', 'question'"),
        ("open.csv", 'question\n"a', "is no CSV .unexpected end of data at line 2"),
        ("latin.csv", b"question\n\xff\n", "is not UTF-8"),
        ("gone.jsonl", None, "cannot read data file .*gone.jsonl.*No such file"),
        ("no*.jsonl", None, "no file matches this pattern"),
        ("packed.jsonl", gzip.compress(b"{}", mtime=0), "is compressed by gzip; decompress it"),
        ("wide.jsonl", '{"question": "x"}'.encode("utf-16"), "is text in UTF-16; write UTF-8"),
        ("pointer.parquet", "version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, content: str | bytes | None, message: str) -> None:
    if content is not None:
        _write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / name, _question)


def test_a_device_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="'/dev/null': the name of a file must end with"):
        read_rows(Path("/dev/null"), _question)


def test_a_binary_column_is_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": [b"1+1="], "image": [b"\x89PNG"]}), tmp_path / "rows.parquet")
    with pytest.raises(
        ValueError, match="row 0: field 'question' is binary, not a string; write the column as strings"
    ):
        read_rows(tmp_path / "rows.parquet", _question)
    assert read_rows(tmp_path / "rows.parquet", lambda row: row["image"]) == ["iVBORw=="]


def test_an_id_of_the_hub_and_an_address_are_answered_with_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match="'some/set': No such file or folder; as an id of the Hub, write hub:some/set/SPLIT@COMMIT"
    ):
        read_rows(Path("some/set"), _question)
    with pytest.raises(ConfigError, match="a run downloads no data"):
        read_rows(Path("https://x.y/z.jsonl"), _question)


def test_mistakes_of_all_files_are_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "ROWS_PER_CHUNK", 16)

    def numbers(name: str, count: int, bad: range) -> Path:
        rows = [{"n": "" if number in bad else str(number)} for number in range(count)]
        return _write(tmp_path / name, "".join(json.dumps(row) + "\n" for row in rows))

    def parsed(*files: Path) -> list[list[tuple[int, str]]]:
        return list(RowSet(files).parsed(lambda row: text_field(row, "n")))

    right = parsed(numbers("a.jsonl", 40, range(0)), numbers("b.jsonl", 10, range(0)))
    assert [len(chunk) for chunk in right] == [16, 16, 16, 2] and right[2][8] == (40, "0")
    with pytest.raises(ConfigError) as error:
        parsed(numbers("a.jsonl", 40, range(3, 21, 17)), numbers("b.jsonl", 200, range(60, 70)))
    first, second = error.value.problems
    assert "a.jsonl': 2 of 40 rows are wrong:\n  line 4: " in first.text and "\n  line 21: " in first.text
    assert "b.jsonl': 10 of 200 rows are wrong:\n  line 61: " in second.text and "and 5 more" in second.text
    with pytest.raises(ConfigError, match="c.jsonl': 16 of the first 16 rows are wrong"):
        parsed(numbers("c.jsonl", 50, range(50)))


def test_rows_are_not_held_in_memory(tmp_path: Path) -> None:
    """Of 3,000 rows of 2 kB an offset of 8 bytes each is held."""
    file = _write(tmp_path / "a.jsonl", (json.dumps({"notes": "x" * 2000}) + "\n") * 3000)
    tracemalloc.start()
    rows = open_rows(file)
    assert sum(len(row["notes"]) for row in rows.rows(0, len(rows))) == 6_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < file.stat().st_size / 10


def test_a_parquet_file_that_repeats_a_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """448 bytes would become 6.5 GB."""
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), pa.array(["x" * 65_536]))
    pq.write_table(pa.table({"prompt": repeated}), tmp_path / "a.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "a.parquet").stat().st_size < 1000
    monkeypatch.setattr(rows_module, "MAX_GROUP", 1 << 20)
    rows = open_rows(tmp_path / "a.parquet")
    with pytest.raises(
        ConfigError, match=r"a.parquet' has .* bytes or more in row group 0 .* at most 1,048,576 .* or as .jsonl"
    ):
        next(rows.rows(0, 1))
    monkeypatch.setattr(rows_module, "MAX_GROUP", 1 << 10)
    with pytest.raises(ConfigError, match="at most 1,024 are accepted"):
        open_rows(tmp_path / "a.parquet")


def test_an_arrow_file_with_a_wrong_offset_ends_no_process(tmp_path: Path) -> None:
    content = arrow_stream(tmp_path / "a.arrow", [{"prompt": "a" * 10}] * 7).read_bytes()
    place = content.index(struct.pack("<3i", 0, 10, 20)) + 4
    (tmp_path / "b.arrow").write_bytes(content[:place] + struct.pack("<i", 1 << 30) + content[place + 4 :])
    with pytest.raises(
        ConfigError, match=r"b.arrow' is no arrow file .*offset for slot 1 out of bounds: 1073741824 > 70"
    ):
        list(open_rows(tmp_path / "b.arrow").rows(0, 7))
    (tmp_path / "c.arrow").write_bytes(b"\x00" + content[1:])
    with pytest.raises(ConfigError, match=r"cannot read data file '.*c.arrow': (?!None)."):
        open_rows(tmp_path / "c.arrow")
