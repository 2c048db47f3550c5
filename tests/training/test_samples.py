"""Rollout files: as if never stopped after a resume, whose they are, and what a line says of a trajectory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.checks.methods import rollout_file_problems
from grpo_megatron.config import Config
from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.step import (
    HEAD,
    MAX_SHOWN_ROWS,
    TAIL,
    RolloutFiles,
    ShownSamples,
    TokenTexts,
    mean_advantage,
    parts_of,
    shown_rows,
)
from grpo_megatron.types import BRANCH, GroupTable, Plan, Sample, Turn
from tests import tiny
from tests.browser import WIDTHS, Browser
from tests.fakes import LoneMesh, prompt
from tests.fakes import run_trainer as run
from tests.runs import texts


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def sections(output_dir: Path, rollouts: Path, **trainer: Any) -> dict[str, Any]:
    return {"trainer": {"total_training_steps": 5, "save_freq": 2, "rollout_data_dir": rollouts, **trainer}}


def test_a_resumed_run_writes_the_same_bytes(tmp_path: Path) -> None:
    """Stopped after step 3, saved after step 2; between the two starts, step 2's file is damaged and step 4's appears."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    _, logged = run(whole, **sections(whole, whole / "rollouts"))
    assert all("timing_s/dump_rollout_generations" in row for row in logged)
    names = [f"step_{step:06d}.jsonl" for step in range(5)]
    assert sorted(files(whole / "rollouts")) == ["run.json", *names]

    run(halves, stop_after=3, **sections(halves, halves / "rollouts"))
    latest = max((halves / "checkpoints").iterdir())
    (latest / "trainer.json").unlink()
    latest.rmdir()  # of step 3
    (halves / "rollouts" / names[2]).write_text("half a li")
    (halves / "rollouts" / names[4]).write_text("of weights that are lost\n")
    (halves / "rollouts" / f".{names[2]}.0123abcd.partial").write_text("half a li")
    run(halves, stop_after=3, **sections(halves, halves / "rollouts"))
    expected = files(whole / "rollouts")
    assert files(halves / "rollouts") == {name: expected[name] for name in ["run.json", *names[:3]]}
    run(halves, **sections(halves, halves / "rollouts"))
    assert files(halves / "rollouts") == expected

    # Two prompts of two samples, whose rewards are 0 and 1: advantages -+ 0.707 with the sample standard deviation.
    rows = [json.loads(line) for line in expected[names[4]].splitlines()]
    assert [(row["uid"], row["group"], row["index"]) for row in rows] == [
        *(("p/2", 0, 0), ("p/2", 0, 1), ("p/3", 1, 0), ("p/3", 1, 1)),
    ]
    assert [row["score"] for row in rows] == [0.0, 1.0, 0.0, 1.0]
    assert [row["advantage"] for row in rows] == pytest.approx([-0.7071, 0.7071] * 2, abs=1e-4)
    assert {(row["step"], row["version"], row["weights"]) for row in rows} == {(4, 4, "policy after 4")}


# -- whose folder it is ------------------------------------------------------------------------------------------------


def problems(output_dir: Path, rollouts: Path, **sections: Any) -> list[str]:
    trainer = {"output_dir": output_dir, "rollout_data_dir": rollouts, **sections.pop("trainer", {})}
    return texts(rollout_file_problems(Config.model_validate({"model": {"path": "m"}, "trainer": trainer, **sections})))


def test_another_run_does_not_write_over_rollouts(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts"
    run(tmp_path / "one", **sections(tmp_path / "one", rollouts))
    assert problems(tmp_path / "one", rollouts) == []
    [problem] = problems(tmp_path / "two", rollouts)
    assert "holds the rollouts of another run (../one); choose another folder" in problem
    before = files(rollouts)
    with pytest.raises(RankError, match="holds the rollouts of another run"):
        run(tmp_path / "two", **sections(tmp_path / "two", rollouts))
    assert files(rollouts) == before
    (rollouts / "run.json").write_text("[]")
    assert "of another run (an unknown run)" in problems(tmp_path / "one", rollouts)[0]


def test_an_earlier_runs_rollouts_are_kept(tmp_path: Path) -> None:
    inside, outside = tmp_path / "run" / "rollouts", tmp_path / "elsewhere"
    run(tmp_path / "first", **sections(tmp_path / "first", tmp_path / "first" / "rollouts"))
    (tmp_path / "first").rename(tmp_path / "run")  # a run that is moved keeps its rollouts
    assert problems(tmp_path / "run", inside) == []
    before = files(inside)
    run(tmp_path / "run", **sections(tmp_path / "run", inside, resume_mode="disable", total_training_steps=1))
    assert files(tmp_path / "run" / "earlier_001" / "rollouts") == before
    assert sorted(files(inside)) == ["run.json", "step_000000.jsonl"]
    run(tmp_path / "other", **sections(tmp_path / "other", outside))
    [problem] = problems(tmp_path / "other", outside, trainer={"resume_mode": "disable"})
    assert "an earlier run's rollouts, which trainer.resume_mode=disable keeps" in problem


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file, not a folder" in problems(tmp_path / "run", tmp_path / "file" / "rollouts")[0]
    assert "is trainer.output_dir; set a folder in it" in problems(tmp_path / "run", tmp_path / "run")[0]
    sft = {"algorithm": {"source": "file", "adv_estimator": "constant"}, "actor": {"loss_mode": "sft"}}
    assert "algorithm.source=file generates no responses" in problems(tmp_path / "run", tmp_path / "rollouts", **sft)[0]


# -- single lines ------------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer whose token i is the word "i"."""

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return " ".join(map(str, token_ids))


def test_a_trajectory_has_its_turns_and_no_response(tmp_path: Path) -> None:
    turns = [Turn(0, 2, "assistant", 3, 0), Turn(2, 3, "observation", 3, 1), Turn(3, 4, "assistant", 3, 2)]
    sample = Sample(prompt(0), 0, 0, [5, 6, 7, 8], [0.0] * 4, "stop", 3, turns=turns, text="transcript", status="ok")
    sample.trajectory_metrics, sample.reward_texts = {"calls": 1.0, "nan": float("nan")}, {"note": "fine"}
    table = GroupTable([0], [0], [0.5], [1], [4], [False], [0], raw_reward=[1.0], loss_spans=[[(0, 2), (3, 4)]])
    plan = Plan([[1.0, 2.0, 100.0, 6.0]], [1.0], [[[[0]]]])
    RolloutFiles(tmp_path / "out", tmp_path, LoneMesh(), Words()).write(3, Metrics(), [sample], table, plan)
    row = json.loads((tmp_path / "out" / "step_000003.jsonl").read_text())
    assert "response" not in row and row["prompt_text"] == "question 0"
    assert row["turns"] == [
        {"kind": "assistant", "text": "5 6"},
        {"kind": "observation", "text": "7"},
        {"kind": "assistant", "text": "8"},
    ]
    assert (row["score"], row["reward"], row["advantage"]) == (1.0, 0.5, 3.0)  # (1 + 2 + 6) / 3
    assert row["metrics"] == {"calls": 1.0, "nan": None} and row["texts"] == {"note": "fine"}
    assert mean_advantage(None, [(0, 2)]) is mean_advantage([1.0, 5.0], []) is None and mean_advantage(0.5, []) == 0.5


def test_parts_are_bounded_and_never_empty() -> None:
    """Tokens per row: 3, 3, 9, 1 on rank 0, then 2 on rank 1, then 2 on rank 0."""
    lengths, holders = [2, 2, 8, 0, 1, 1], [0, 0, 0, 0, 1, 0]
    table = GroupTable([0] * 6, list(range(6)), [0.0] * 6, [1] * 6, lengths, [False] * 6, holders)
    assert list(parts_of(table, 6)) == [(0, [0, 1]), (0, [2]), (0, [3]), (1, [4]), (0, [5])]
    assert list(parts_of(table, 100)) == [(0, [0, 1, 2, 3]), (1, [4]), (0, [5])]


# -- What the report shows of a step: which groups, which tokens, and the log-probabilities of engine and policy beside


class Bytes:
    """A tokenizer whose tokens are bytes, as byte-level BPE may have them. It strips the start of a text, as some do."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", "replace").removeprefix(" ")


def table_of(rewards: list[list[float]], length: int = 3) -> GroupTable:
    flat = [(prompt, index, reward) for prompt, group in enumerate(rewards) for index, reward in enumerate(group)]
    prompts, indices, values = (list(column) for column in zip(*flat, strict=True))
    count = len(flat)
    return GroupTable(prompts, indices, values, [1] * count, [length] * count, [False] * count, [0] * count)


def test_the_group_with_the_widest_rewards_and_the_first_one_are_shown() -> None:
    nan, inf = float("nan"), float("inf")
    assert shown_rows(table_of([[1, 1], [0, nan], [0.0, 1.0], [0, 0.5]])) == [[4, 5], [0, 1]]
    assert shown_rows(table_of([[0, 1], [1, 0], [0, 0]])) == [[0, 1], [2, 3]]  # the first one is the widest
    assert shown_rows(table_of([[nan, inf]])) == [[0, 1]]
    assert shown_rows(table_of([[0.0] * 20])) == [list(range(8))]
    assert shown_rows(GroupTable([], [], [], [], [], [], [])) == []


def gathered(is_generated: bool, ids: list[int], mask: list[int]) -> dict[str, Any]:
    sample = Sample(prompt(0), 0, 0, ids, [-0.5] * len(ids), "stop", 0, loss_mask=mask, reward=1.0)
    batch = tiny.make_batch([([9], ids)], [[[0]]])
    batch.rows = [0]
    batch.loss_mask = torch.tensor([mask]).bool()
    batch.rollout_logprobs = torch.full((1, len(ids)), -0.5)
    batch.old_logprobs = torch.full((1, len(ids)), -0.75)
    mesh: Any = LoneMesh()
    groups = ShownSamples(mesh, Bytes(), is_generated).gather(
        [sample], table_of([[1.0]], len(ids)), Plan([0.25], [1.0], [[[[0]]]]), batch
    )
    assert groups is not None
    return dict(groups()[0]["samples"][0])


def test_each_token_has_the_numbers_of_engine_and_policy() -> None:
    """-0.75 of the policy minus -0.5 of the engine; the last token is not in the loss."""
    shown = gathered(True, list(b"a b"), [1, 1, 0])
    assert shown["pieces"] == [["a", -0.5, -0.25], [" ", -0.5, -0.25], ["b", None, None]]
    assert (shown["reward"], shown["advantage"], shown["tokens"], shown["cut"]) == (1.0, 0.25, 3, 0)
    from_a_file = gathered(False, list(b"ab"), [1, 1])
    assert from_a_file["pieces"] == [["a", -0.75, None], ["b", -0.75, None]] and not from_a_file["drawn"]
    ids = [ord("a") + place % 26 for place in range(HEAD + TAIL + 50)]  # the middle of a long response is left out
    shown = gathered(True, ids, [1] * len(ids))
    assert (shown["cut"], shown["cut_at"], len(shown["pieces"])) == (50, HEAD, HEAD + TAIL)
    assert [piece[0] for piece in shown["pieces"]] == [chr(i) for i in (*ids[:HEAD], *ids[HEAD + 50 :])]


def test_a_trajectory_is_a_dialogue_of_all_its_rows() -> None:
    """Two trajectories with 1 and MAX_SHOWN_ROWS + 1 rows, of which the second one is left out; turns of 2, 1 and 2 tokens."""
    indices = [0, 1, *(1 + b * BRANCH for b in range(1, MAX_SHOWN_ROWS + 1))]
    turns = [Turn(0, 2, "assistant", 0, 5, 0.5), Turn(2, 3, "observation", 0, 7), Turn(3, 5, "assistant", 0, 9)]
    euro = list("\u20ac".encode())  # its first two bytes end a turn: they are no part of a character of the next one
    samples = [
        Sample(prompt(0), 0, i, [*euro, 97, 98], [-0.5] * 5, "stop", 0, turns=turns, loss_mask=[1, 1, 0, 1, 1])
        for i in indices
    ]
    samples[0].turn_rewards, samples[0].trajectory_metrics = [(1, 0.25)], {"calls": 2.0}
    count, batch = len(indices), tiny.make_batch([([9], [1])], [[[0]]])
    table = GroupTable(
        [0] * count,
        indices,
        [float(i % BRANCH) for i in indices],
        [1] * count,
        [5] * count,
        [False] * count,
        [0] * count,
    )
    plan, mesh = Plan([0.25] * count, [1.0], []), LoneMesh()
    groups = ShownSamples(mesh, Bytes(), True).gather(samples, table, plan, batch)
    assert groups is not None
    one, *rows = groups()[0]["samples"]
    assert "row" not in one and one["metrics"] == {"calls": 2.0}
    assert [(row["index"], row["row"], row["rows"]) for row in rows] == [
        (1, n, count - 1) for n in (1, *range(3, count))
    ]
    assert [turn["end"] for turn in one["turns"]] == [1, 2, 4] and [piece[0] for piece in one["pieces"]][2:] == [
        "a",
        "b",
    ]
    first = {"kind": "assistant", "end": 1, "tokens": 2, "trained": 2, "reward": 0.25, "clock": 5, "seconds": 0.5}
    assert one["turns"][0] == first and [t["trained"] for t in one["turns"]] == [2, 0, 2]


def test_tokens_that_are_one_character_together_have_its_text_and_their_sums() -> None:
    """The euro sign has three bytes; a lone byte of another character stays what it is."""
    ids = [*b"1", *"\u20ac".encode(), 0xFF, *b"x"]
    pieces = TokenTexts(Bytes()).pieces(ids, [-1.0] * 6, [0.5] * 6)
    assert [piece[0] for piece in pieces][:2] == ["1", "\u20ac"] and pieces[1][1:] == [-3.0, 1.5]
    assert "".join(piece[0] for piece in pieces).endswith("x")


def test_a_run_that_fails_and_resumes_has_a_report_and_its_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, browser: Browser
) -> None:
    """Five steps, ended after the third one. The policy's log-probability falls by 0.01 with each update."""
    sections = {"trainer": {"total_training_steps": 5, "save_freq": 2, "logger": ["jsonl"]}}
    run(tmp_path, stop_after=3, has_report=True, **sections)
    assert '"state":"failed"' in (tmp_path / "report.html").read_text()
    run(tmp_path, has_report=True, **sections)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["step"]) for event in events] == [
        *(("started", 0), ("failed", None), ("resumed", 3)),
    ]
    page = (tmp_path / "report.html").read_text()
    assert '"state":"running"' in page and '"steps":[0,1,2,3,4]' in page and "critic/score/mean" in page
    kept = [json.loads(line) for line in (tmp_path / "report_samples.jsonl").read_text().splitlines()]
    assert kept[-1]["step"] == 4
    gaps = {piece[2] for group in kept[-1]["groups"] for sample in group["samples"] for piece in sample["pieces"]}
    assert gaps == {-0.04} and not caplog.records
    for width in WIDTHS:
        with browser.open(tmp_path / "report.html", width) as shown:
            assert shown.faults() == [] and "token" in shown.text(".card .text")
