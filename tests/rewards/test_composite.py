"""A reward of several components: the sum, its metrics, gates, failures; in worker processes, with the user's functions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.rewards.calling import COMPOSITE, composite_reward
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import RewardResult
from tests.rewards.waiting import PATIENCE_S

MODULE = """
import asyncio, resource

calls = []

def fails(completion, answer): raise KeyError(answer)
def infinite(completion, answer): return float("inf")
def unlimited(completion, answer): return float(resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY)
def late(completion, answer): raise TimeoutError("too late")
def told(completion, answer): return {"score": 0.5, "note": "a text", "words": 3, "acc": 0.0}
def called(completion, answer): calls.append(completion); return float(len(calls))

def asks(completion, answer, *, prompt_text): return float(prompt_text == "1 + 1 =")

async def meets(completion, answer, *, barrier=[]):  # returns when two of them wait at the same time
    barrier.append(asyncio.Event())
    if len(barrier) == 2: [event.set() for event in barrier]
    await asyncio.wait_for(barrier[0].wait(), 60)
    return 1.0
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_components.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_components"


def component(
    name: str, function: str = "", weight: float = 1.0, gate: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    gate = gate and {"min": None, "max": None, **gate}
    return {"name": name, "function": function or name, "weight": weight, "kwargs": kwargs, "gate": gate}


def summed(components: list[Any], completion: str, answer: str = "42", **more: Any) -> dict[str, Any]:
    item = {"completion": completion, "answer": answer, **more}
    returned = asyncio.run(composite_reward(completion, answer, components=components, item=item))
    assert returned is not None
    return returned


PARTS = [
    component("accuracy", "gsm8k"),
    component("format", weight=0.25, layout="tagged"),
    component("tag_count", weight=0.0),
    component("length", weight=0.5, max_length=40),
]


@pytest.mark.parametrize(
    ("completion", "score", "values"),
    [
        # 1 + 0.25 - 0.5 * 35 / 40, and so on; a weight of 0 is a metric only
        ("<think>a</think><answer>42</answer>", 0.8125, (1, 1, 1, -0.875)),
        ("<think>a</think><answer>43</answer>", -0.1875, (0, 1, 1, -0.875)),
        ("#### 42", 1 - 0.5 * 7 / 40, (1, 0, 0, -0.175)),
        ("", 0.0, (0, 0, 0, 0)),
        ("x" * 1000, -0.5, (0, 0, 0, -1)),
    ],
)
def test_the_sum_and_its_metrics(completion: str, score: float, values: tuple[float, ...]) -> None:
    returned = summed(PARTS, completion)
    assert returned["score"] == pytest.approx(score)
    assert tuple(returned[part["name"]] for part in PARTS) == pytest.approx(values)
    assert returned["acc"] == values[0]  # that of the first component that reports one
    assert set(returned) == {"score", "acc", "accuracy/acc", "accuracy/extracted", *(part["name"] for part in PARTS)}


def test_a_component_with_a_negative_weight_is_subtracted() -> None:
    """1 for the answer, minus 0.5 for the layout that is not wanted."""
    parts = [component("accuracy", "gsm8k"), component("format", weight=-0.5, layout="tagged")]
    returned = summed(parts, "<think>a</think><answer>42</answer>")
    assert (returned["score"], returned["format"]) == (0.5, 1.0)


def test_gates(module: str) -> None:
    """A closed gate: the function is not called, adds nothing, has no value, and closes what depends on it."""
    parts = [
        component("short", "length", gate={"component": "praise", "min": 1}, max_length=4, start=2.0, end=1.0),
        component("praise", f"{module}:called", gate={"component": "accuracy", "min": 1}),
        component("accuracy", "gsm8k"),
        component("excuse", "length", gate={"component": "accuracy", "max": 0}, max_length=10, start=-10.0, end=0.0),
        component("never", "tag_count", gate={"component": "praise", "max": 0}),
    ]
    right, wrong = summed(parts, "#### 42"), summed(parts, "#### 4")
    ones = ["accuracy", "praise", "short", "acc", "accuracy/acc", "accuracy/extracted", "praise/open", "short/open"]
    assert right == {"score": 1.0 + 1.0 + 1.0, **dict.fromkeys(ones, 1.0), "excuse/open": 0.0, "never/open": 0.0}
    zeros = ["accuracy", "acc", "accuracy/acc", "praise/open", "short/open", "never/open"]
    open_ones = {"accuracy/extracted": 1.0, "excuse/open": 1.0}
    assert wrong == {"score": -4.0, "excuse": -4.0, **dict.fromkeys(zeros, 0.0), **open_ones}
    assert summed(parts, "#### 42")["praise"] == 2.0  # called once per right answer


def test_what_components_report(module: str) -> None:
    parts = [component("told", f"{module}:told", weight=2.0), component("asks", f"{module}:asks"), component("graded")]
    returned = summed(parts, "#### 42", prompt="1 + 1 =")
    assert returned["score"] == 2 * 0.5 + 1.0 + 1.0
    assert [returned[name] for name in ("told/note", "told/words", "acc", "graded/acc")] == ["a text", 3, 0, 1]


def test_components_that_wait_wait_together(module: str) -> None:
    parts = [component(name, f"{module}:meets") for name in ("one", "two")]
    assert summed(parts, "")["score"] == 2.0


# -- in worker processes -----------------------------------------------------------------------------------------------


@pytest.fixture
def graded(module: str) -> Iterator[Any]:
    """Function components -> results of three items, of which the second is a plain reward beside the sum."""

    def run(*components: Any) -> list[RewardResult]:
        items = [(COMPOSITE, "#### 42", "42", "1 + 1 ="), ("gsm8k", "#### 42", "42"), (COMPOSITE, "#### 4", "42", "?")]
        with RewardPool(1, PATIENCE_S, {}, components) as pool:
            return pool.grade(items)

    yield run


def test_the_workers_sum(graded: Any, module: str) -> None:
    results = graded(
        component("accuracy", "math", weight=2.0),
        component("asks", f"{module}:asks"),
        component("told", f"{module}:told"),
        component("free", f"{module}:unlimited", weight=0.0),
    )
    assert [result.status for result in results] == ["ok"] * 3, results
    assert [result.reward for result in results] == [0.0 + 1.0 + 0.5, 1.0, 0.0 + 0.0 + 0.5]
    assert results[0].metrics["asks"] == 1.0
    assert results[0].metrics["free"] == 1.0  # a user's function has no limit on memory
    assert results[0].texts == {"told/note": "a text"}


@pytest.mark.parametrize(
    ("function", "status", "message"),
    [
        ("fails", "error", "reward 'composite': RuntimeError: component 'bad': KeyError: '42'"),
        ("infinite", "error", "component 'bad': ValueError: the reward is inf, not a finite number"),
        ("late", "timeout", "reward 'composite': TimeoutError: component 'bad': too late"),
        ("absent", "error", "reward 'composite': ValueError: 'own_components:absent': module"),  # before its time runs
    ],
)
def test_a_component_that_fails_fails_the_sample(
    graded: Any, module: str, function: str, status: str, message: str
) -> None:
    results = graded(component("format"), component("bad", f"{module}:{function}"))
    assert [result.status for result in results] == [status, "ok", status]
    assert message in results[0].message
    assert results[0].reward != results[0].reward  # NaN


def test_components_that_are_no_json_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be passed to the workers as JSON"):
        RewardPool(1, components=[component("length", limits={1})])
