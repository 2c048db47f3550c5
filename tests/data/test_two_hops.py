"""The search example's generated task: its rows are what the `search` tool answers, and validation asks of other persons."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.data import two_hops
from grpo_megatron.data.conversation import TurnRenderer
from grpo_megatron.data.written import render_written


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two_hops")
    two_hops.write_two_hops(root, seed=0)
    return root


def test_the_rows_show_what_the_tool_answers(folder: Path) -> None:
    pytest.importorskip("bm25s", reason="the search tool's library is not installed")
    from grpo_megatron.environments.tools.search import search

    for row in read(folder / "sft.jsonl")[:20]:
        _, first, found, second, found_city, answer = row["messages"]
        for call, result in ((first, found), (second, found_city)):
            query = call["tool_calls"][0]["function"]["arguments"]["query"]
            assert search(query, corpus=str(folder / "corpus.jsonl"), top_k=1) == result["content"]
        assert answer["content"] == f"<answer>{re.findall(r'[0-9]+', found_city['content'])[-1]}</answer>"


def test_rows_are_tokens_of_a_rollout_that_fits_the_example(folder: Path) -> None:
    tokenizer = two_hops.build_hop_tokenizer()
    renderer = TurnRenderer(tokenizer)
    renderer.check("tool")
    assert len(tokenizer) == 80
    for row in read(folder / "sft.jsonl")[:50]:
        prompt, response = renderer.prompt(row["messages"][:1]), render_written(row["messages"][1:], renderer)
        assert len(prompt) <= 32 and len(response) <= 96 and len(response.turns) == 5
        assert max(turn.end - turn.start for turn in response.turns if turn.kind == "observation") <= 32
        assert tokenizer.unk_token_id not in [*prompt, *response.ids]


def test_validation_asks_of_other_persons(folder: Path) -> None:
    def persons(texts: list[str]) -> set[int]:
        return {int(re.findall("[0-9]+", text)[0]) for text in texts}

    train, val = ([row["prompt"] for row in read(folder / name)] for name in ("train.jsonl", "val.jsonl"))
    warm_up = [row["messages"][0]["content"] for row in read(folder / "sft.jsonl")]
    assert not persons(val) & (persons(train) | persons(warm_up))
    assert len(persons(train) | persons(val)) == len(two_hops.PERSONS) and len(val) > 100
    world = two_hops.World(0)
    assert all(int(row["answer"]) == world.answer(persons([row["prompt"]]).pop()) for row in read(folder / "val.jsonl"))
