"""Pass rates that were measured before: which prompts they select, with which weights, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError, SamplingConfig
from grpo_megatron.data.sampler import read_pass_rates, select_prompts
from grpo_megatron.types import Prompt
from tests.files import row_files

RATES = [0.0, 0.25, 0.5, 1.0]


def prompts(count: int = 4) -> list[Prompt]:
    return [Prompt(f"t/train/{i}", (i,), f"<{i}>", f"a{i}", "t", "r", question=f"q{i}") for i in range(count)]


def rows(**extra: Any) -> list[dict[str, Any]]:
    """In another order than the prompts: row numbers do not count."""
    return [{"question": f"q{i}", "answer": f"a{i}", "rate": rate, **extra} for i, rate in enumerate(RATES)][::-1]


def selected(path: Path, **sampling: Any) -> list[Prompt]:
    return select_prompts(prompts(), SamplingConfig.model_validate({"pass_rates": path, **sampling}))


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        # each divided by its mean, so that they are comparable with uniform_share
        ({"weight": "uniform"}, [1, 1, 1, 1]),
        ({"weight": "1-p"}, [1 / 0.5625, 0.75 / 0.5625, 0.5 / 0.5625, 0]),  # mean (1 + 3/4 + 1/2 + 0) / 4 = 9/16
        ({"weight": "p(1-p)"}, [0, 12 / 7, 16 / 7, 0]),  # mean (3/16 + 4/16) / 4 = 7/64
        ({"weight": "p(1-p)", "uniform_share": 0.25}, [0.25, 0.25 + 9 / 7, 0.25 + 12 / 7, 0.25]),
        ({"weight": "p(1-p)", "min_pass_rate": 0.25, "max_pass_rate": 0.5}, [None, 6 / 7, 8 / 7, None]),
    ],
)
def test_prompts_are_selected_and_weighted(
    tmp_path: Path, sampling: dict[str, Any], weights: list[float | None]
) -> None:
    kept = {prompt.uid: prompt for prompt in selected(row_files(tmp_path / "p.jsonl", *rows())[0], **sampling)}
    found = [kept[f"t/train/{i}"].weight if f"t/train/{i}" in kept else None for i in range(4)]
    assert found == [None if weight is None else pytest.approx(weight) for weight in weights]
    assert all(prompt.pass_rate == RATES[int(uid[-1])] for uid, prompt in kept.items())


def test_weights_of_the_file(tmp_path: Path) -> None:
    given = [{**row, "weight": 3 * (row["question"] == "q2")} for row in rows()]
    path = row_files(tmp_path / "p.jsonl", *given)[0]
    assert [prompt.weight for prompt in selected(path, weight="file")] == [0, 0, 4, 0]
    del given[1]["weight"]
    with pytest.raises(ConfigError, match='needs a number "weight" in every row, and some have none'):
        selected(row_files(path, *given)[0], weight="file")


def test_prompts_without_a_pass_rate(tmp_path: Path) -> None:
    path = row_files(tmp_path / "p.jsonl", *rows()[1:])[0]  # q3 is missing
    with pytest.raises(ConfigError, match=r"lacks 1 of the 4 prompts \(the first: t/train/3\); measure them"):
        selected(path)
    assert [prompt.pass_rate for prompt in selected(path, default_pass_rate=0.75)] == [0, 0.25, 0.5, 0.75]
    with pytest.raises(ConfigError, match="lacks 1 of the 4 prompts .* data.sampling.weight=file needs a weight"):
        selected(
            row_files(path, *({**row, "weight": 1} for row in rows()[1:]))[0], weight="file", default_pass_rate=0.5
        )
    other_answer = [{**row, "answer": "other"} if row["question"] == "q1" else row for row in rows()]
    with pytest.raises(ConfigError, match="the first: t/train/1"):
        selected(row_files(path, *other_answer)[0])


def test_nothing_is_left(tmp_path: Path) -> None:
    path = row_files(tmp_path / "p.jsonl", *rows())[0]
    with pytest.raises(ConfigError, match="3 of 4 prompts have a pass rate below 0.6, and 1 above 0.9: nothing is"):
        selected(path, min_pass_rate=0.6, max_pass_rate=0.9)
    with pytest.raises(ConfigError, match=r"weight=p\(1-p\) is 0 for all 1 prompts; set another weight"):
        selected(path, min_pass_rate=1.0, weight="p(1-p)")


def test_wrong_rows_are_named(tmp_path: Path) -> None:
    right = {"question": "q", "answer": "a", "rate": 1}
    for row, message in (
        ({"question": "q", "answer": "a"}, "line 1: field 'rate' is missing"),
        ({**right, "rate": 1.5}, "field 'rate' is 1.5, and a pass rate is 0 to 1"),
        ({**right, "rate": float("nan")}, "field 'rate' is nan, not a number of 0 or more"),
        ({**right, "rate": True}, "field 'rate' is true or false, not a number"),
        ({**right, "weight": -1}, "field 'weight' is -1, not a number of 0 or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_pass_rates(row_files(tmp_path / "p.jsonl", row)[0])
    chat = {**rows()[0], "question": [{"role": "user", "content": "q3"}]}  # the same question as a chat
    with pytest.raises(ConfigError, match="line 5: has the question and the answer of an earlier row"):
        read_pass_rates(row_files(tmp_path / "p.jsonl", *rows(), chat)[0])
