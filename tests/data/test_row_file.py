"""Rows by number: every format gives the rows of the plain reader, in any order, and bounded state."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError
from grpo_megatron.data import arrow_rows
from grpo_megatron.data.rows import open_rows, raw_rows

ROWS = [{"prompt": f"p{n}\n\u00e9", "extra": {"n": n, "list": [n] * (n % 3)}} for n in range(25)]


def by_number(path: Path) -> list[Any]:
    rows = open_rows(path)
    last_first = [next(rows.rows(n, n + 1)) for n in reversed(range(len(rows)))]
    assert list(rows.rows(3, 20)) == last_first[::-1][3:20]
    assert list(rows.rows(5, 5)) == []
    return last_first[::-1]


def parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pa = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def arrow_stream(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As `datasets` writes it: the stream format, in batches."""
    pa = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
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
    expected = [row if isinstance(row, dict) else str(row) for _, _, row in raw_rows(lines)]
    assert len(expected) == 24
    assert [row if isinstance(row, dict) else str(row) for row in by_number(lines)] == expected
    places = [place for place, _, _ in raw_rows(lines)]
    rows = open_rows(lines)
    assert [rows.place(n) for n in range(24)] == places
    table = tmp_path / "a.csv"
    table.write_bytes(
        b'\xef\xbb\xbfa,b\r\n1,"two\r\nlines ""q"""\r\n\r\n2,x\r\n3\r\n' + b"".join(b"%d,y\n" % n for n in range(20))
    )
    rows = open_rows(table)
    assert [str(row) for row in by_number(table)] == [str(row) for _, _, row in raw_rows(table)]
    assert [rows.place(n) for n in range(23)] == [place for place, _, _ in raw_rows(table)]
    whole = tmp_path / "a.json"
    whole.write_text(json.dumps(ROWS))
    assert by_number(whole) == ROWS


def test_a_file_of_many_blocks_has_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_megatron.data.offset_file.OffsetFile.BLOCK", 7)
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n\n" + "".join(json.dumps(row) + "\n" + " \n" * (n % 3) for n, row in enumerate(ROWS)))
    assert by_number(lines) == ROWS
    assert open_rows(lines).place(24) == [place for place, _, _ in raw_rows(lines)][24]


def test_a_file_that_changes_is_an_error(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"a": 1}\n{"a": 2}\n')
    rows = open_rows(lines)
    lines.write_text('{"a": 11}\n{"a": 2}\n')
    with pytest.raises(ConfigError, match="was changed while it was in use"):
        list(rows.rows(1, 2))
    rows, modified = open_rows(lines), lines.stat().st_mtime_ns
    lines.write_text('{"a": 11, "b":  2}\n')  # as many bytes
    os.utime(lines, ns=(modified, modified))
    with pytest.raises(ConfigError, match="was changed while it was in use"):
        list(rows.rows(0, 2))


def test_a_row_that_is_too_long_is_wrong_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_megatron.data.row_file.MAX_ROW", 32)
    monkeypatch.setattr("grpo_megatron.data.offset_file.OffsetFile.BLOCK", 32)
    lines = tmp_path / "a.jsonl"
    fits, long = {"a": "x" * 23}, {"a": "x" * 24}  # 32 and 33 bytes
    lines.write_text("\n".join(map(json.dumps, [fits, long, {}, {}, long])))
    rows = open_rows(lines)
    first, second, third, fourth, fifth = rows.rows(0, 5)
    assert (first, third, fourth) == (fits, {}, {})
    assert all(isinstance(row, ValueError) and "at most 32 are read" in str(row) for row in (second, fifth))


def test_parquet_and_arrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_number(parquet(tmp_path / "a.parquet", ROWS, row_group_size=4)) == ROWS
    assert by_number(arrow_stream(tmp_path / "b.arrow", ROWS)) == ROWS
    assert [row for _, _, row in raw_rows(tmp_path / "a.parquet")] == ROWS
    # a large file is converted once, and again only where the cache's file is damaged
    monkeypatch.setenv("GRPO_MEGATRON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(arrow_rows, "MAX_DECODED", 1)
    assert by_number(tmp_path / "a.parquet") == ROWS
    (converted,) = (tmp_path / "cache" / "data").glob("*.arrow")
    written = converted.stat().st_mtime_ns
    assert by_number(tmp_path / "a.parquet") == ROWS
    assert converted.stat().st_mtime_ns == written
    converted.write_bytes(converted.read_bytes()[:-10])
    assert by_number(tmp_path / "a.parquet") == ROWS
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match=r"c.parquet' is no parquet file that can be read"):
        open_rows(tmp_path / "c.parquet")


def test_values_that_json_lacks(tmp_path: Path) -> None:
    import datetime
    import decimal

    day = datetime.date(2026, 1, 2)
    row = {"day": day, "bytes": b"\xff", "price": decimal.Decimal("1.50"), "deep": [{"day": day}], "none": None}
    expected = {"day": "2026-01-02", "bytes": "/w==", "price": "1.50", "deep": [{"day": "2026-01-02"}], "none": None}
    assert by_number(parquet(tmp_path / "a.parquet", [row] * 20)) == [expected] * 20
    nested = parquet(tmp_path / "b.parquet", [{"deep": [{"day": day}], "text": "a"}] * 20)
    assert by_number(nested) == [{"deep": [{"day": "2026-01-02"}], "text": "a"}] * 20


def test_without_pyarrow_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match="needs pyarrow, which is not installed: pip install pyarrow"):
        open_rows(tmp_path / "a.parquet")


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
