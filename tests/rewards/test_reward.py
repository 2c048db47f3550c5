"""Names and results of reward functions, and what importing the package imports."""

from __future__ import annotations

import math
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.rewards import check_reward
from grpo_megatron.rewards.reward import MAX_ENTRY, RewardResult, parse_reward

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm8", "unknown reward 'gsm8'; did you mean 'gsm8k'"),
        ("json:no_such_function", "has no attribute 'no_such_function'"),
        ("__main__:score", "a worker process cannot import __main__"),
        ("raising_module:score", "importing it raised ZeroDivisionError"),
    ],
)
def test_a_name_that_cannot_be_used_is_a_clear_error(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=message):
        check_reward(name)


@pytest.mark.parametrize("returned", [1, True, 1.0, np.float32(1.0), np.int64(1), Decimal(1), {"score": 1}])
def test_any_finite_number_is_a_reward(returned: object) -> None:
    assert parse_reward(returned) == RewardResult(1.0)


class Unreadable:
    def __float__(self) -> float:
        raise RuntimeError

    __str__ = __float__  # type: ignore[assignment]


def test_further_entries_are_metrics_or_texts() -> None:
    assert parse_reward({"score": 0.5, "acc": True, "length": 3}) == RewardResult(0.5, {"acc": 1.0, "length": 3.0})
    texts = {"pred": "42", "none": None, "nan": math.nan, "array": np.ones(2), "long": "x" * 999, "odd": Unreadable()}
    result = parse_reward({"score": 1, "acc": 1, **texts, "half": "\ud800"})
    assert (result.reward, result.metrics) == (1.0, {"acc": 1.0})
    expected = {"pred": "42", "none": "None", "nan": "nan", "array": "[1. 1.]", "long": "x" * MAX_ENTRY}
    assert result.texts == {**expected, "odd": "(Unreadable)", "half": "\\ud800"}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (float("nan"), "the reward is nan, not a finite number"),
        ({"score": float("inf")}, "entry 'score' is inf"),
        ({"acc": 1.0}, r"a dict without 'score' \(keys: acc\)"),
        (1e308, r"the reward is 1e\+308; it must be between -1e\+09 and 1e\+09: scale it"),
        ({"score": 1.0, **{str(n): n for n in range(66)}}, "returned 67 entries"),
    ],
)
def test_anything_else_is_an_error(returned: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_reward(returned)


def test_steps_are_ends_and_values() -> None:
    steps = [(3, 1), [np.int64(7), np.float32(0.5)], (10, -1.0)]
    assert parse_reward({"score": 1.0, "steps": steps}, 10) == RewardResult(1.0, steps=((3, 1.0), (7, 0.5), (10, -1.0)))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (1.0, "entry 'steps' is float, not a list"),
        ([3], "step 0 is int, not"),
        ([(0, 1.0)], "step 0 ends at 0; ends are integers above 0 and at most the completion's 10"),
        ([(3, 1.0), (3, 1.0)], "step 1 ends at 3; ends are integers above 3"),
        ([(3, float("nan"))], "a step's value is nan, not a finite number"),
        ([(n + 1, 0.0) for n in range(10_001)], "more than 10000 steps|step 10 ends at 11"),
    ],
)
def test_wrong_steps_are_errors(steps: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_reward({"score": 1.0, "steps": steps}, 10)


def test_workers_import_neither_torch_nor_transformers_nor_pydantic() -> None:
    code = (
        "import sys, grpo_megatron.rewards.calling, grpo_megatron.rewards.pool;"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'pydantic', 'yaml', 'numpy', 'sympy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"
