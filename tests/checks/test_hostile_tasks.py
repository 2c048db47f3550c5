"""Hostile task files and options of the scripted evaluation: each is refused with one bounded message."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError
from grpo_megatron.config.options import parse
from grpo_megatron.data.benchmarks import DataPlaces, read_datasets
from grpo_megatron.data.task import read_task_file
from grpo_megatron.evaluation.options import EvaluateOptions

TASK = """
name: t
title: T
version: 1
reward: math
question: ['{question}']
answer: [{field: answer}]
files: [FILE]
fewshot: {files: [rows.jsonl], solution: solution, remove: 'REMOVE', default: 1}
"""


def refusal(folder: Path, remove: str, file: str = "rows.jsonl", solution: str = "x") -> str:
    (folder / "task.yaml").write_text(TASK.replace("REMOVE", remove).replace("FILE", file))
    (folder / "rows.jsonl").write_text(json.dumps({"question": "1 + 1", "answer": "2", "solution": solution}))
    with pytest.raises(ConfigError) as raised:
        read_datasets([read_task_file(folder / "task.yaml")], DataPlaces(folder), lambda task: 1, None)
    assert len(str(raised.value)) < 1500
    return str(raised.value)


def test_expressions_and_files_of_a_task(tmp_path: Path) -> None:
    assert "fewshot.remove: Value error, not a regular expression (missing )" in refusal(tmp_path, "(")
    slow = refusal(tmp_path, "(a+)+$", solution="a" * 60 + "b")  # 2^60 ways to divide the a
    assert "line 1: fewshot.remove='(a+)+$' of task 't' took more than 2 s of processor time" in slow
    assert f"no data file in '{tmp_path}'" in refusal(tmp_path, "x", file="x" * 300)
    assert f"no data file in '{tmp_path}'" in refusal(tmp_path, "x", file="/dev/zero")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--samples", "99999999999", "--samples 99999999999 is more than 65,536; set that or less"),
        ("--workers", "1000000", "--workers 1000000 is more than 1,024"),
        ("--dp", "1000000", "--dp 1000000 is more than 65,536"),
        ("--kv-cache-gib", "1000000000", "--kv-cache-gib 1000000000 is more than 4,096"),
        ("--temperature", "nan", "--temperature nan is not a finite number"),
        ("--seed", "9" * 5000, "is not a whole number of 64 bits"),
        ("--samples", "\u00b2", "is not a whole number of 64 bits"),
        ("--engine-kwargs", "[" * 9999, "is not JSON that can be read (nested too deeply)"),
        ("--engine-kwargs", '{"a": ' + "9" * 5000 + "}", "has an integer of 5,000 digits"),
        ("--engine-kwargs", '{"a": 1, "a": 2}', "has the key 'a' twice in one object"),
    ],
    ids=lambda value: value[:20].encode("ascii", "replace").decode(),
)
def test_options_of_evaluate(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "print_usage", lambda *_: None)
    arguments: list[Any] = ["--model", "m", "--tasks", "math", option, value]
    try:
        parse(EvaluateOptions, arguments)
        raise AssertionError("it was let through")
    except SystemExit as error:
        assert error.code == 2
        text = capsys.readouterr().err
    except ConfigError as error:
        text = str(error)
    assert message in text
    assert len(text) < 400
