"""Names, signatures and results of reward functions: ours, and other trainers' recognised by their parameters."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_megatron.rewards.calling import BoundReward
from grpo_megatron.rewards.reward import MAX_ENTRY, RewardResult, check_reward, parse_reward, read_signature, rewards

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm8", "unknown reward 'gsm8'; did you mean 'gsm8k'"),
        ("json:no_such_function", "has no attribute 'no_such_function'; define it there"),
        ("json:dump_s", "has no attribute 'dump_s'; did you mean 'dumps'"),
        ("./mine/my_reward.py:score", "; write mine.my_reward:score$"),
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
        ({"score": 1, "f(x)": 1, "f[x]": 2}, r"'f\(x\)' and 'f\[x\]' are both written as 'f_x_'; rename one"),
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


# -- what a function gets by name ------------------------------------------------------------------------------------------

ROW = {
    "prompt": [{"role": "user", "content": "6 * 7 ="}],
    "answer": "six times seven is 42 #### 42",
    "difficulty": 3,
    "step": "a column that has the name of a field",
    "reward_model": {"ground_truth": 42},
    "extra_info": {"index": 5},
}
SAMPLE = {
    "completion": "42",
    "answer": "42",
    "prompt": "<user> 6 * 7 =",
    "messages": [{"role": "system", "content": "be brief"}, *ROW["prompt"]],  # type: ignore[misc]
    "columns": ROW,
    "data_source": "sums",
    "completion_ids": [4, 2],
    "step": 9,
    "is_chat": True,
}
Function = Callable[..., Any]


def called(function: Function, monkeypatch: pytest.MonkeyPatch, *samples: Any, **kwargs: Any) -> Any:
    """Returns what a worker gets from the function for each sample."""
    monkeypatch.setitem(rewards._entries, "under_test", function)
    call = BoundReward("under_test", kwargs)
    given = samples or (SAMPLE,)
    entries = call.entries(call.start(given), given)
    return entries if samples else entries[0]


def test_a_function_gets_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(completion, answer, prompt, messages, extra_info, data_source, completion_ids, step, difficulty, bonus=1):  # type: ignore[no-untyped-def]
        return locals()

    fields = {name: value for name, value in SAMPLE.items() if name not in ("columns", "is_chat")}
    assert called(named, monkeypatch, bonus=2) == {**fields, "extra_info": {"index": 5}, "difficulty": 3, "bonus": 2}
    assert called(lambda completion: completion, monkeypatch) == "42"
    # reward.kwargs come first
    assert called(lambda completion, difficulty=0: difficulty, monkeypatch, difficulty=8) == 8
    without = {**SAMPLE, "columns": {}}
    assert called(lambda completion, difficulty=0: difficulty, monkeypatch, without) == [0]
    assert called(lambda completion, extra_info: extra_info, monkeypatch, without) == [{}]
    with pytest.raises(KeyError, match="this sample's row has no 'difficulty'"):
        called(lambda completion, difficulty: difficulty, monkeypatch, without)


def test_others_get_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    got = called(lambda completion, difficulty, **others: (difficulty, others), monkeypatch, bonus=1)
    assert got == (3, {"reward_model": {"ground_truth": 42}, "bonus": 1})  # no column that has the name of a field


def test_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (
        lambda text, gold: (text, gold),
        lambda text, answer: (text, answer),
        lambda *texts: texts,
        lambda text, gold, /: (text, gold),
        lambda text, gold, difficulty: (text, gold),
    ):
        assert called(function, monkeypatch) == ("42", "42")
    assert called(lambda text, gold, difficulty, *, bonus: (difficulty, bonus), monkeypatch, bonus=2) == (3, 2)


def test_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, bonus=0, **others):  # type: ignore[no-untyped-def]
        return data_source, solution_str, ground_truth, extra_info, bonus, others

    got = called(compute_score, monkeypatch, bonus=1)
    assert got == ("sums", "42", 42, {"index": 5}, 1, {})
    assert called(lambda solution_str, ground_truth: ground_truth, monkeypatch, {**SAMPLE, "columns": {}}) == ["42"]

    def batched(data_sources, solution_strs, ground_truths, extra_infos):  # type: ignore[no-untyped-def]
        return list(zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True))

    assert called(batched, monkeypatch, SAMPLE, SAMPLE) == [("sums", "42", 42, {"index": 5})] * 2
    without = {**SAMPLE, "columns": {}}  # in one batch with a row that has the column
    assert called(lambda solution_strs, difficulty=None: difficulty, monkeypatch, SAMPLE, without) == [3, None]
    with pytest.raises(KeyError, match="this sample's row has no 'difficulty'"):
        called(lambda solution_strs, difficulty: difficulty, monkeypatch, SAMPLE, without)


def test_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    def reward(prompts, completions, answer, difficulty, **others):  # type: ignore[no-untyped-def]
        others["log_extra"]("seen", ["a", "b"])
        others["log_metric"]("share", 0.5)
        return [locals()] * len(prompts)

    entry = called(reward, monkeypatch, SAMPLE, {**SAMPLE, "is_chat": False})[0]
    assert (entry["seen"], entry["share"]) == ("a", 0.5)
    got = entry["score"]
    assert got["prompts"] == [ROW["prompt"], "<user> 6 * 7 ="]  # of a conversational row: as in the file
    assert got["completions"] == [[{"role": "assistant", "content": "42"}], "42"]
    assert (got["answer"], got["difficulty"]) == ([ROW["answer"]] * 2, [3, 3])  # columns, not our own answer
    others = got["others"]
    assert others["completion_ids"] == [[4, 2]] * 2 and others["trainer_state"].global_step == 9
    assert not {"prompt", "completion"} & set(others) and others["reward_model"] == [{"ground_truth": 42}] * 2
    assert called(lambda completions, answer: answer, monkeypatch, {**SAMPLE, "columns": {}}) == ["42"]


def test_none_of_trl_does_not_apply_and_of_others_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rewards._entries, "trl", lambda completions, **others: [None])
    monkeypatch.setitem(rewards._entries, "ours", lambda completion: None)
    assert asyncio.run(BoundReward("trl", {}).grade(SAMPLE)).status == "none"
    with pytest.raises(ValueError, match="the reward is NoneType, not a number"):
        asyncio.run(BoundReward("ours", {}).grade(SAMPLE))


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [
        (lambda completion, solutoin: 0, ["solution"], "nothing gives its parameter 'solutoin'.*mean 'solution'"),
        (lambda solution_str, method: 0, [], "there are data_source, solution_str, ground_truth, extra_info"),
        (lambda: 0, [], r"it reads no completion \(its parameters: none\)"),
    ],
)
def test_what_nothing_gives_is_refused(
    function: Function, columns: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rewards._entries, "under_test", function)
    with pytest.raises(ValueError, match=message):
        check_reward("under_test", {}, columns)
    if "reads no" not in message:
        assert read_signature(function).problem({}) is None  # the columns are not known yet


def test_the_examples_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "rewards.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    forms, returned = [], []
    chat = {**SAMPLE, "completion": "it is 42", "columns": {**ROW, "max_words": 2}}
    for block in blocks:
        names: dict[str, Any] = {}
        exec(block, names)
        (function,) = [value for value in names.values() if getattr(value, "__globals__", None) is names]
        forms.append(read_signature(function).form)
        returned.append(
            called(function, monkeypatch, chat, chat) if forms[-1] == "TRL" else called(function, monkeypatch, chat)
        )
    assert forms == ["ours", "ours", "verl", "TRL"]
    assert returned == [[{"score": 1.0, "acc": True}], [1.0], [{"score": 1.0, "acc": 1.0}], [0.0, 0.0]]
