"""The calculator example's generated task: rows that a rollout could give, held-out pairs, and what the warm-up teaches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data import products
from grpo_megatron.data.arithmetic import is_held_out
from grpo_megatron.data.conversation import TurnRenderer
from grpo_megatron.data.prompts import load_prompts
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.data.written import load_supervised

DATA = DataConfig(
    task="products", max_prompt_length=32, max_response_length=48
)  # as in examples/agents/calculator.yaml


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("products")
    products.write_products(root, seed=0, num_train=64, num_val=32)
    return root


def test_the_warm_up_shows_calls_first_and_then_mostly_bare_answers(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "sft.jsonl").read_text().splitlines()]
    size = products.ROWS_PER_STEP
    assert len(rows) == (products.CALLING_STEPS + products.MIXED_STEPS) * size
    calls = [len(row["messages"]) == 4 for row in rows]
    first = products.CALLING_STEPS * size
    assert all(calls[:first])
    share = sum(calls[first:]) / len(calls[first:])  # 1280 rows: the standard error is 0.011
    assert abs(share - (1 - products.BARE_SHARE)) < 0.05


def test_rows_are_tokens_of_a_rollout(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer", DATA)
    renderer = TurnRenderer(tokenizer)
    renderer.check("tool")
    examples = load_supervised(DATA, [folder / "sft.jsonl"], tokenizer, renderer)
    assert len(tokenizer) == 80
    prompt, response = examples[0]
    whole = tokenizer.decode([*prompt, *response.ids])
    assert re.fullmatch(
        r"[\w ,.]*\d+ [\w ,.]*\d+[\w ,.]*\?<sep>"
        r'<tool_call>\{"name": "calculator", "arguments": \{"expression": "\d+\*\d+"\}\}</tool_call><eos>'
        r"<tool_response>\d+</tool_response><sep><answer>\d+</answer><eos>",
        whole,
    ), whole
    assert [turn.kind for turn in response.turns] == ["assistant", "observation", "assistant"]
    unknown = tokenizer.convert_tokens_to_ids("<unk>")
    assert not any(unknown in [*prompt, *response.ids] for prompt, response in examples[:500])


def test_more_rows_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot draw 1000000 different held-out rows; at most"):
        products.product_problems(0, 1_000_000, held_out=True)


def test_held_out_pairs_are_in_no_other_file(folder: Path) -> None:
    def pairs(name: str) -> list[tuple[int, int]]:
        rows: list[dict[str, Any]] = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        texts = [row["prompt"] if "prompt" in row else row["messages"][0]["content"] for row in rows]
        return [(int(a), int(b)) for a, b in (re.findall(r"\d+", text) for text in texts)]

    for name, count, held_out in (("train.jsonl", 64, False), ("val.jsonl", 32, True), ("sft.jsonl", None, False)):
        found = pairs(name)
        assert count in (None, len(found))
        assert all(is_held_out(a, b) == held_out and min(a, b) >= 32 and max(a, b) <= 99 for a, b in found)
    tokenizer = load_tokenizer(folder / "tokenizer", DATA)
    prompts = load_prompts(DATA, [folder / "val.jsonl"], tokenizer)
    assert [int(prompt.answer) for prompt in prompts] == [a * b for a, b in pairs("val.jsonl")]
