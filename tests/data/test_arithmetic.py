"""The quickstart's data: correct sums, held-out pairs, the curriculum, a tokenizer that loses no text."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from grpo_megatron.data.generated import (
    LARGEST,
    MIXED_STEPS,
    ROWS_PER_STEP,
    STEP_SEPARATOR,
    VOCABULARY_SIZE,
    WORKED_STEPS,
    build_tokenizer,
    is_held_out,
    pair_rows,
    problem_rows,
    step_rows,
    supervised_rows,
    worked_response,
    write_example,
)
from grpo_megatron.rewards.numeric import arithmetic_reward
from grpo_megatron.rewards.process_rewards import equations


@pytest.fixture(scope="module")
def supervised() -> list[dict[str, str]]:
    return list(supervised_rows(0))


def _numbers(prompt: str) -> tuple[int, int]:
    a, b = map(int, re.findall("[0-9]+", prompt))
    return a, b


def test_worked_responses_show_units_then_tens_with_the_carry() -> None:
    assert worked_response(18, 73) == "<think>8+3=11,1+7+1=9</think><answer>91</answer>"
    assert worked_response(5, 2) == "<think>5+2=7,0+0+0=0</think><answer>7</answer>"
    assert worked_response(99, 99) == "<think>9+9=18,9+9+1=19</think><answer>198</answer>"
    for a, b in itertools.product(range(1, LARGEST + 1), repeat=2):
        thought = re.findall(r"([0-9+]+)=([0-9]+)", worked_response(a, b))
        assert all(sum(map(int, left.split("+"))) == int(right) for left, right in thought)
        assert int(thought[1][1]) * 10 + int(thought[0][1]) % 10 == a + b


def test_a_tenth_of_the_pairs_is_held_out_in_both_orders() -> None:
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(a, LARGEST + 1)]
    assert 0.09 < sum(is_held_out(a, b) for a, b in pairs) / len(pairs) < 0.11
    assert all(is_held_out(a, b) == is_held_out(b, a) for a, b in pairs)


def test_the_curriculum(supervised: list[dict[str, str]]) -> None:
    """360 steps of worked rows, then 60 with 60 % bare: 1920 rows, standard error 1.1 %."""
    worked, mixed = supervised[: WORKED_STEPS * ROWS_PER_STEP], supervised[WORKED_STEPS * ROWS_PER_STEP :]
    assert (len(worked), len(mixed)) == (360 * 32, 60 * 32) and MIXED_STEPS == 60
    assert all(row["response"].startswith("<think>") for row in worked)
    assert 0.55 < sum(row["response"].startswith("<answer>") for row in mixed) / len(mixed) < 0.65
    for row in supervised:
        a, b = _numbers(row["prompt"])
        assert not is_held_out(a, b)
        assert arithmetic_reward(row["response"], str(a + b))["score"] == 1.0


def test_problems_are_right_different_and_on_their_side_of_the_split() -> None:
    for held_out in (False, True):
        rows = problem_rows(0, 500, held_out)
        assert len({row["prompt"] for row in rows}) == len(rows) == 500
        for row in rows:
            a, b = _numbers(row["prompt"])
            assert int(row["answer"]) == a + b and is_held_out(a, b) == held_out
    assert problem_rows(0, 5, True) == problem_rows(0, 9, True)[:5]
    assert problem_rows(0, 5, True) != problem_rows(1, 5, True)
    with pytest.raises(ValueError, match="cannot draw 1000000 different held-out rows; at most 1"):
        problem_rows(0, 10**6, True)


def test_the_tokenizer_round_trips_everything(supervised: list[dict[str, str]], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    build_tokenizer().save_pretrained(tmp_path)
    # beside a qwen2 config.json, transformers chooses the class by model_type, not by tokenizer_config.json
    for config in (None, {"model_type": "qwen2"}):
        if config:
            (tmp_path / "config.json").write_text(json.dumps(config))
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert len(tokenizer) == VOCABULARY_SIZE == len(set(tokenizer.get_vocab().values()))
        assert all(tokenizer.decode([index]) for index in range(VOCABULARY_SIZE))
        special = {*tokenizer.all_special_ids}
        assert len(special) == 4
        texts = [row["prompt"] + row["response"] for row in supervised[-500:]]
        for text, ids in zip(texts, tokenizer(texts)["input_ids"], strict=True):
            whole = tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True)
            assert tokenizer.decode(ids) == text == whole and not special & {*ids}
            assert len(ids) <= 18 + 22  # prompt, response without <eos>
        pieces = tokenizer.convert_ids_to_tokens(tokenizer("Tom has 23 apples<sep><think>")["input_ids"])
        assert pieces == ["Tom", " has", "\u0120", "2", "3", " apples", "<sep>", "<think>"]


def test_files_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        write_example("arithmetic", tmp_path / name, seed, num_train=64, num_val=16)
    for file in ("sft.jsonl", "train.jsonl", "val.jsonl", "written.jsonl", "tokenizer/tokenizer.json"):
        a, b, c = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert a == b and (a != c) == file.endswith(".jsonl")
    first = json.loads((tmp_path / "a" / "sft.jsonl").read_text().partition("\n")[0])
    assert first["prompt"] == "There are 14 pens here, Ben adds 66. How many?<sep>"  # recorded
    assert first["response"] == "<think>4+6=10,1+6+1=8</think><answer>80</answer>"


# -- The generated feedback: labels agree with the reward function that checks every sum ------------------------------


def test_labels_are_those_of_the_sums() -> None:
    rows = list(step_rows(0, 400, held_out=False))
    for row in rows:
        holds = [equations(step.partition("</think>")[0]) for step in row["completions"]]
        assert [bool(found) and all(found) for found in holds] == row["labels"]
        assert not any(STEP_SEPARATOR in step for step in row["completions"])
    assert {len(row["labels"]) for row in rows} == {1, 2}
    assert {tuple(row["labels"]) for row in rows} == {(False,), (True, True), (True, False), (False, True)}


def test_pairs_prefer_the_worked_answer() -> None:
    rows = list(pair_rows(0, 400, held_out=True))
    for row in rows:
        assert row["chosen"] == worked_response(*_numbers(row["prompt"])) != row["rejected"]
    bare = sum("<think>" not in row["rejected"] for row in rows)
    assert 260 < bare < 340


def test_files_are_written_and_hold_out_sums(tmp_path: Path) -> None:
    write_example("feedback", tmp_path, seed=0, num_train=64, num_val=16)
    prompts = {}
    for name in ("pairs", "pairs_val", "steps", "steps_val"):
        prompts[name] = {json.loads(line)["prompt"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()}
    assert not prompts["pairs"] & prompts["pairs_val"] and not prompts["steps"] & prompts["steps_val"]
    assert (tmp_path / "tokenizer" / "tokenizer.json").exists()
