"""What the report shows of a step: which groups, which tokens, and the log-probabilities of engine and policy beside each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.training.samples import HEAD, TAIL, ShownSamples, TokenTexts, kept_tokens, shown_rows
from grpo_megatron.types import GroupTable, Plan, Sample
from tests import tiny
from tests.browser import WIDTHS, Browser
from tests.sampling.fakes import LoneMesh, prompt
from tests.training.fake_run import run


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


def gathered(is_drawn: bool, ids: list[int], mask: list[int]) -> dict[str, Any]:
    sample = Sample(prompt(0), 0, 0, ids, [-0.5] * len(ids), "stop", 0, loss_mask=mask, reward=1.0)
    batch = tiny.make_batch([([9], ids)], [[[0]]])
    batch.rows = [0]
    batch.loss_mask = torch.tensor([mask]).bool()
    batch.rollout_logprobs = torch.full((1, len(ids)), -0.5)
    batch.old_logprobs = torch.full((1, len(ids)), -0.75)
    mesh: Any = LoneMesh()
    groups = ShownSamples(mesh, Bytes(), is_drawn).gather(
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


def test_the_middle_of_a_long_response_is_left_out() -> None:
    ids = [ord("a") + place % 26 for place in range(HEAD + TAIL + 50)]
    shown = gathered(True, ids, [1] * len(ids))
    assert (shown["cut"], shown["cut_at"], len(shown["pieces"])) == (50, HEAD, HEAD + TAIL)
    kept = kept_tokens(len(ids))
    assert [piece[0] for piece in shown["pieces"]] == [chr(ids[place]) for place in kept] and kept[HEAD] == HEAD + 50


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
