"""The generated data: correct answers, held-out problems, the warm-ups' curricula, tokenizers that lose no text."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.tokenizer import TurnRenderer, load_tokenizer
from grpo_megatron.rewards.numeric import arithmetic_reward
from grpo_megatron.starting import generated
from grpo_megatron.starting.generated import (
    ANSWERING_SHARE,
    ANSWERING_STEPS,
    CALLING_STEPS,
    LARGEST,
    ROWS_PER_STEP,
    VOCABULARY_SIZE,
    build_tokenizer,
    is_held_out,
    problem_rows,
    worked_response,
    write_example,
)
from tests.files import load_supervised

# as in examples/agents/calculator.yaml and search.yaml
LIMITS = {"products": (32, 48), "two_hops": (32, 96)}
TRAJECTORIES = {
    "products": r"[\w ,.]*\d+ [\w ,.]*\d+[\w ,.]*\?<sep>"
    r'<tool_call>\{"name": "calculator", "arguments": \{"expression": "\d+\*\d+"\}\}</tool_call><eos>'
    r"<tool_response>\d+</tool_response><sep><answer>\d+</answer><eos>",
    "two_hops": r"[\w ]*\d+[\w .]*\?<sep>"
    r'(<tool_call>\{"name": "search", "arguments": \{"query": "[\w ]+"\}\}</tool_call><eos>'
    r"<tool_response>\[1\] [\w ]+\.</tool_response><sep>){2}<answer>\d+</answer><eos>",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generated")
    for example in generated.EXAMPLES:
        (root / example).mkdir()
        write_example(example, root / example, 0)
    return root


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def question(row: dict[str, Any]) -> str:
    return str(row["prompt"] if "prompt" in row else row["messages"][0]["content"])


def numbers(text: str) -> list[int]:
    return list(map(int, re.findall("[0-9]+", text)))


# -- The quickstart's sums ---------------------------------------------------------------------------------------------


def test_worked_responses_show_units_then_tens_with_the_carry() -> None:
    assert worked_response(18, 73) == "<think>8+3=11,1+7+1=9</think><answer>91</answer>"
    assert worked_response(5, 2) == "<think>5+2=7,0+0+0=0</think><answer>7</answer>"
    for a, b in itertools.product(range(1, LARGEST + 1), repeat=2):
        thought = re.findall(r"([0-9+]+)=([0-9]+)", worked_response(a, b))
        assert all(sum(map(int, left.split("+"))) == int(right) for left, right in thought)
        assert int(thought[1][1]) * 10 + int(thought[0][1]) % 10 == a + b


def test_a_tenth_of_the_pairs_is_held_out_in_both_orders(folder: Path) -> None:
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(a, LARGEST + 1)]
    assert 0.09 < sum(is_held_out(a, b) for a, b in pairs) / len(pairs) < 0.11
    assert all(is_held_out(a, b) == is_held_out(b, a) for a, b in pairs)
    for example, name, held_out in (
        *(("arithmetic", name, name == "val") for name in ("sft", "train", "val", "written")),
        *(("feedback", name, name.endswith("val")) for name in ("pairs", "pairs_val", "steps", "steps_val")),
        *(("products", name, name == "val") for name in ("sft", "train", "val")),
    ):
        for row in read(folder / example / f"{name}.jsonl"):
            a, b = numbers(question(row))
            assert is_held_out(a, b) == held_out
            if "answer" in row:
                assert int(row["answer"]) == (a * b if example == "products" else a + b)
            if example == "products":
                assert min(a, b) >= 32 and max(a, b) <= 99


def test_the_curricula(folder: Path) -> None:
    """360 steps of worked rows, then 60 with 60 % bare: 1920 rows, standard error 1.1 %. Calls first, then 14 % of 1280 rows."""
    rows = read(folder / "arithmetic" / "sft.jsonl")
    assert len(rows) == 420 * 32
    assert all(row["response"].startswith("<think>") for row in rows[: 360 * 32])
    assert 0.55 < sum(row["response"].startswith("<answer>") for row in rows[360 * 32 :]) / 1920 < 0.65
    for row in rows:
        assert arithmetic_reward(row["response"], str(sum(numbers(row["prompt"]))))["score"] == 1.0
    calls = [len(row["messages"]) == 4 for row in read(folder / "products" / "sft.jsonl")]
    first = CALLING_STEPS * ROWS_PER_STEP
    assert len(calls) == first + ANSWERING_STEPS * ROWS_PER_STEP and all(calls[:first])
    assert abs(sum(calls[first:]) / len(calls[first:]) - (1 - ANSWERING_SHARE)) < 0.05


def test_problems_are_different_and_follow_the_seed() -> None:
    assert len({row["prompt"] for row in problem_rows(0, 500, False)}) == 500
    assert problem_rows(0, 5, True) == problem_rows(0, 9, True)[:5] != problem_rows(1, 5, True)
    for problems in (problem_rows, generated.product_problems):
        with pytest.raises(ConfigError, match="cannot draw 1000000 different held-out rows; at most"):
            problems(0, 10**6, True)


def test_the_tokenizer_round_trips_everything(folder: Path, tmp_path: Path) -> None:
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
        texts = [row["prompt"] + row["response"] for row in read(folder / "arithmetic" / "sft.jsonl")[-500:]]
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


def test_labels_of_the_feedback_are_those_of_the_sums(folder: Path) -> None:
    rows = read(folder / "feedback" / "steps.jsonl")
    for row in rows:
        sums = [re.search(r"(\d+(?:\+\d+)+)=(\d+)", step.partition("</think>")[0]) for step in row["completions"]]
        assert [one is not None and sum(map(int, one[1].split("+"))) == int(one[2]) for one in sums] == row["labels"]
        assert not any("," in step for step in row["completions"])
    assert {tuple(row["labels"]) for row in rows} == {(False,), (True, True), (True, False), (False, True)}
    pairs = read(folder / "feedback" / "pairs.jsonl")
    assert all(row["chosen"] == worked_response(*numbers(row["prompt"])) != row["rejected"] for row in pairs)
    assert (
        0.72 < sum("<think>" not in row["rejected"] for row in pairs) / len(pairs) < 0.78
    )  # 4096: standard error 0.7 %


# -- The agents' examples ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["products", "two_hops"])
def test_rows_are_tokens_of_a_rollout_that_fits_the_example(folder: Path, task: str) -> None:
    data = DataConfig(task=task, max_prompt_length=LIMITS[task][0], max_response_length=LIMITS[task][1])
    tokenizer = load_tokenizer(folder / task / "tokenizer", data)
    renderer = TurnRenderer(tokenizer)
    renderer.check("tool")
    first = folder / task / "first.jsonl"
    first.write_text("".join((folder / task / "sft.jsonl").read_text().splitlines(keepends=True)[:100]))
    examples = load_supervised(data, [first], tokenizer, renderer)
    assert len(tokenizer) == 80 and len(examples) == 100  # none is too long
    whole = tokenizer.decode([*examples[0][0], *examples[0][1].ids])
    assert re.fullmatch(TRAJECTORIES[task], whole), whole
    kinds = [turn.kind for turn in examples[0][1].turns]
    assert kinds == ["assistant", "observation"] * (len(kinds) // 2) + ["assistant"]
    for prompt, response in examples:
        assert max(turn.end - turn.start for turn in response.turns if turn.kind == "observation") <= 32
        assert tokenizer.unk_token_id not in [*prompt, *response.ids]


def test_the_rows_show_what_the_search_tool_answers(folder: Path) -> None:
    pytest.importorskip("bm25s", reason="the search tool's library is not installed")
    from grpo_megatron.environments.tools.search import search

    for row in read(folder / "two_hops" / "sft.jsonl")[:20]:
        _, first, found, second, found_city, answer = row["messages"]
        for call, result in ((first, found), (second, found_city)):
            query = call["tool_calls"][0]["function"]["arguments"]["query"]
            assert search(query, corpus=str(folder / "two_hops" / "corpus.jsonl"), top_k=1) == result["content"]
        assert answer["content"] == f"<answer>{numbers(found_city['content'])[-1]}</answer>"


def test_validation_asks_of_other_persons(folder: Path) -> None:
    rows = {name: read(folder / "two_hops" / f"{name}.jsonl") for name in ("sft", "train", "val")}
    persons = {name: {numbers(question(row))[0] for row in own} for name, own in rows.items()}
    assert not persons["val"] & (persons["train"] | persons["sft"])
    assert len(persons["train"] | persons["val"]) == len(generated.PERSONS) and len(rows["val"]) > 100
    world = generated.World(0)
    assert all(int(row["answer"]) == world.answer(numbers(row["prompt"])[0]) for row in rows["val"])
