"""The pass over all rows: its numbers, its errors, its cache, and what it holds in memory."""

from __future__ import annotations

import gc
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpo_megatron.data.cache import data_cache, take_lock
from grpo_megatron.data.survey import Numbers, Survey

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data import survey
from grpo_megatron.data.arithmetic import build_tokenizer
from grpo_megatron.data.prompts import load_prompts
from grpo_megatron.data.rows import RowSet
from grpo_megatron.data.tokenizer import load_tokenizer

PLAIN = DataConfig(task="arithmetic", apply_chat_template=False, max_prompt_length=8)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(survey, "ROWS_PER_CHUNK", 16)
    monkeypatch.setattr(survey, "MIN_CACHED", 1)
    monkeypatch.setenv("GRPO_MEGATRON_CACHE", str(tmp_path / "cache"))


def write(path: Path, count: int, bad: tuple[int, ...] = ()) -> Path:
    rows = [{"prompt": "1" * (n % 9 + 1), "answer": None if n in bad else str(n)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def counted(rows: RowSet, seen: list[int], key: str | None = "k") -> Survey[int]:
    """Measures the answers; `seen` gets the numbers of the rows that this process has measured."""

    def measure(parsed: list[tuple[int, int]]) -> Numbers:
        seen.extend(number for number, _ in parsed)
        return np.array([[answer] for _, answer in parsed], np.int32)

    return Survey(rows, lambda row: int(row["answer"] or "none"), measure, key)


def test_each_row_is_measured_once_over_processes_and_runs(tmp_path: Path) -> None:
    rows = RowSet([write(tmp_path / "a.jsonl", 100)], "s")
    seen: list[int] = []
    expected = np.arange(100)[:, None]
    assert (counted(rows, seen).run() == expected).all()
    own = len(seen)
    assert own <= 100 and (counted(rows, seen).run() == expected).all() and len(seen) == own
    assert (counted(rows, seen, key="another").run() == expected).all() and len(seen) > own
    # a damaged and a missing entry are made again, and only they
    entries = sorted((data_cache().folder / "survey-k").iterdir())
    entries[2].write_bytes(entries[2].read_bytes()[:-1] + b"x")
    entries[4].unlink()
    seen.clear()
    assert (counted(rows, seen).run() == expected).all()
    assert seen == [*range(64, 80), *range(32, 48)]
    assert counted(rows, seen, key=None).run().shape == (100, 1)


def test_rows_are_checked_without_garbage_collections(tmp_path: Path) -> None:
    rows = RowSet([write(tmp_path / "a.jsonl", 40)], "s")
    enabled: list[bool] = []

    def parse(row: dict[str, Any]) -> int:
        enabled.append(gc.isenabled())
        if len(enabled) == 20:
            raise KeyError("a mistake of the task's own")
        return 0

    with pytest.raises(KeyError):
        Survey(rows, parse, lambda parsed: np.zeros((len(parsed), 1), np.int32), None).run()
    assert not any(enabled) and gc.isenabled()


def test_chunks_that_another_process_has_are_waited_for(tmp_path: Path) -> None:
    """The other process takes chunk 3 and stores it; a third one took chunk 5 and died."""
    rows = RowSet([write(tmp_path / "a.jsonl", 100)], "s")
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with data_cache().lock_file("survey-k") as descriptor, take_lock(descriptor, 3, wait=False):
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os.environ["LOCAL_WORLD_SIZE"] = "1000"  # no children
            counted(rows, [])._compute_and_store(data_cache(), "survey-k", 3)
            os._exit(0)
    assert os.read(ready[0], 1) == b"x"
    seen: list[int] = []
    waiting = counted(rows, seen)
    taken = waiting._take("survey-k", data_cache(), range(7))
    assert sorted(taken) == [0, 1, 2, 4, 5, 6]
    os.write(go[1], b"x")
    assert (waiting.run() == np.arange(100)[:, None]).all()
    assert os.waitpid(child, 0)[1] == 0
    assert not set(range(48, 64)) & set(seen)


def test_all_wrong_rows_are_one_error_with_each_file(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.jsonl", 40, bad=(3, 20)), write(tmp_path / "b.jsonl", 200, bad=tuple(range(60, 70)))]
    with pytest.raises(ConfigError) as error:
        load_prompts(PLAIN, files, build_tokenizer())
    first, second = str(error.value).split("data file")[1:]
    assert "a.jsonl': 2 of 40 rows are wrong:\n  line 4: " in first and "\n  line 21: " in first
    assert "b.jsonl': 10 of 200 rows are wrong:\n  line 61: " in second and "and 5 more" in second
    with pytest.raises(ConfigError, match="c.jsonl': 16 of the first 16 rows are wrong"):
        load_prompts(PLAIN, [write(tmp_path / "c.jsonl", 50, bad=tuple(range(50)))], build_tokenizer())


def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRPO_MEGATRON_CACHE", str(tmp_path / "file"))
    rows = RowSet([write(tmp_path / "a.jsonl", 40)], "s")
    assert len(counted(rows, []).run()) == 40
    assert "cannot be written" in caplog.text


def test_lengths_are_cached_by_file_tokenizer_and_template(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer", PLAIN)
    file = write(tmp_path / "a.jsonl", 40)

    def entries() -> int:
        assert len(load_prompts(PLAIN, [file], tokenizer)) == sum(
            n % 9 < 8 for n in range(len(file.read_bytes().split()) // 4)
        )
        return len(list((data_cache().folder).glob("survey-*/")))

    assert entries() == 1 == entries()
    tokenizer.chat_template = "{{ messages }}"
    assert entries() == 2
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}{{ messages }}"  # tomorrow's prompts are others
    assert entries() == 2
    tokenizer.chat_template = "{{ messages }}"
    file.write_text(file.read_text().replace('"1"', '"2"'))  # as many rows, of the same lengths
    assert entries() == 3
    (tmp_path / "tokenizer" / "tokenizer.json").open("a").write(" ")
    assert entries() == 4


def test_prompts_are_tokenised_when_they_are_read_and_memory_does_not_hold_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3,000 rows of 2 kB the table holds an offset (8 bytes) and two numbers (8 bytes) each; with chunks, under 1 MB."""
    monkeypatch.setattr("grpo_megatron.data.offset_file.OffsetFile.BLOCK", 1 << 16)
    file = tmp_path / "a.jsonl"
    row: dict[str, Any] = {"prompt": "1+1", "answer": "2", "notes": "x" * 2000}
    file.write_text((json.dumps(row) + "\n") * 3000)
    tokenizer = build_tokenizer()
    load_prompts(PLAIN, [file], tokenizer)  # imports, and the tokenizer's caches
    tracemalloc.start()
    prompts = load_prompts(PLAIN, [file], tokenizer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(prompts) == 3000 and peak < file.stat().st_size / 4
    calls = []
    monkeypatch.setattr(
        "grpo_megatron.data.prompts.encode_prompts", lambda texts, *_, **__: calls.append(texts) or [[7]]
    )
    prompt = prompts[1234]
    assert (prompt.uid, prompt.answer, prompt.columns["notes"]) == ("arithmetic/a/1234", "2", "x" * 2000)
    assert not calls and prompt.prompt_ids == prompt.prompt_ids == (7,) and calls == [["1+1"]]
    # the prompts that were made last are kept, so that a small data set is tokenised once
    monkeypatch.setattr("grpo_megatron.data.item_table.KEPT", 10)
    assert prompts[1234] is prompt
    made = [prompts[n] for n in range(9)]
    assert prompts[1234] is prompt and prompts[8] is made[8]
    prompts[9]
    assert prompts[1234] is not prompt


def test_a_plan_of_many_rows_measures_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grpo_megatron.data.prompts.SAMPLED_FROM", 90)
    file, tokenizer = write(tmp_path / "a.jsonl", 90), build_tokenizer()
    data = PLAIN.model_copy(update={"max_prompt_length": 7})
    assert len(load_prompts(data, [file], tokenizer)) == 70
    caplog.clear()
    assert len(load_prompts(data, [file], tokenizer, is_plan=True)) == 90
    assert "of 48 prompts are longer than 7 tokens" in caplog.text  # 8 of each of 6 chunks
