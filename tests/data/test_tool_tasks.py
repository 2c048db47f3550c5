"""The generated tasks of the agents' examples: rows that a rollout could give, held-out problems, what the warm-up teaches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data import tool_tasks
from grpo_megatron.data.arithmetic import ROWS_PER_STEP, is_held_out
from grpo_megatron.data.tokenizer import TurnRenderer, load_tokenizer
from grpo_megatron.data.written import load_supervised

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


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tool_tasks")
    for task, write in (("products", tool_tasks.write_products), ("two_hops", tool_tasks.write_two_hops)):
        (root / task).mkdir()
        write(root / task, 0)
    return root


def test_the_warm_up_shows_calls_first_and_then_mostly_bare_answers(folder: Path) -> None:
    calls = [len(row["messages"]) == 4 for row in read(folder / "products" / "sft.jsonl")]
    first = tool_tasks.CALLING_STEPS * ROWS_PER_STEP
    assert len(calls) == first + tool_tasks.BARE_STEPS * ROWS_PER_STEP and all(calls[:first])
    share = sum(calls[first:]) / len(calls[first:])  # 1280 rows: the standard error is 0.011
    assert abs(share - (1 - tool_tasks.BARE_SHARE)) < 0.05


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
    unknown = tokenizer.unk_token_id
    for prompt, response in examples:
        assert max(turn.end - turn.start for turn in response.turns if turn.kind == "observation") <= 32
        assert unknown not in [*prompt, *response.ids]


def test_held_out_pairs_are_in_no_other_file(folder: Path) -> None:
    for name, held_out in (("train.jsonl", False), ("val.jsonl", True), ("sft.jsonl", False)):
        for row in read(folder / "products" / name):
            text = row["prompt"] if "prompt" in row else row["messages"][0]["content"]
            a, b = map(int, re.findall(r"\d+", text))
            assert is_held_out(a, b) == held_out and min(a, b) >= 32 and max(a, b) <= 99
            assert "answer" not in row or int(row["answer"]) == a * b
    with pytest.raises(ConfigError, match="cannot draw 1000000 different held-out rows; at most"):
        tool_tasks.product_problems(0, 1_000_000, held_out=True)


def test_the_rows_show_what_the_search_tool_answers(folder: Path) -> None:
    pytest.importorskip("bm25s", reason="the search tool's library is not installed")
    from grpo_megatron.environments.tools.search import search

    for row in read(folder / "two_hops" / "sft.jsonl")[:20]:
        _, first, found, second, found_city, answer = row["messages"]
        for call, result in ((first, found), (second, found_city)):
            query = call["tool_calls"][0]["function"]["arguments"]["query"]
            assert search(query, corpus=str(folder / "two_hops" / "corpus.jsonl"), top_k=1) == result["content"]
        assert answer["content"] == f"<answer>{re.findall(r'[0-9]+', found_city['content'])[-1]}</answer>"


def test_validation_asks_of_other_persons(folder: Path) -> None:
    def persons(texts: list[str]) -> set[int]:
        return {int(re.findall("[0-9]+", text)[0]) for text in texts}

    train, val = ([row["prompt"] for row in read(folder / "two_hops" / name)] for name in ("train.jsonl", "val.jsonl"))
    warm_up = [row["messages"][0]["content"] for row in read(folder / "two_hops" / "sft.jsonl")]
    assert not persons(val) & (persons(train) | persons(warm_up))
    assert len(persons(train) | persons(val)) == len(tool_tasks.PERSONS) and len(val) > 100
    world = tool_tasks.World(0)
    for row in read(folder / "two_hops" / "val.jsonl"):
        assert int(row["answer"]) == world.answer(persons([row["prompt"]]).pop())
