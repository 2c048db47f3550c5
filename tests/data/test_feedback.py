"""The generated feedback: labels agree with the reward function that checks every sum."""

from __future__ import annotations

import json
from pathlib import Path

from grpo_megatron.data.arithmetic import STEP_SEPARATOR, pair_rows, step_rows, worked_response, write_feedback
from grpo_megatron.rewards.process_rewards import equations


def is_right(step: str) -> bool:
    return bool(holds := equations(step)) and all(holds)


def test_labels_are_those_of_the_sums() -> None:
    rows = list(step_rows(0, 400, held_out=False))
    for row in rows:
        assert [is_right(step.partition("</think>")[0]) for step in row["completions"]] == row["labels"]
        assert not any(STEP_SEPARATOR in step for step in row["completions"])
    assert {len(row["labels"]) for row in rows} == {1, 2}
    assert {tuple(row["labels"]) for row in rows} == {(False,), (True, True), (True, False), (False, True)}


def test_pairs_prefer_the_worked_answer() -> None:
    rows = list(pair_rows(0, 400, held_out=True))
    for row in rows:
        a, b = (int(word) for word in row["prompt"].replace(".", " ").replace(",", " ").split() if word.isdigit())
        assert row["chosen"] == worked_response(a, b) != row["rejected"]
    bare = sum("<think>" not in row["rejected"] for row in rows)
    assert 260 < bare < 340


def test_files_are_written_and_hold_out_sums(tmp_path: Path) -> None:
    write_feedback(tmp_path, seed=0, num_train=64, num_val=16)
    prompts = {}
    for name in ("pairs", "pairs_val", "steps", "steps_val"):
        prompts[name] = {json.loads(line)["prompt"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()}
    assert not prompts["pairs"] & prompts["pairs_val"] and not prompts["steps"] & prompts["steps_val"]
    assert (tmp_path / "tokenizer" / "tokenizer.json").exists()
