"""The end tokens of a model, and what ends with them: rollouts' turns and written responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.tokenizer import TurnRenderer, read_end_tokens
from grpo_megatron.data.written import load_supervised
from tests.data.test_conversation import LLAMA3, tokenizer_with


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """As early Llama 3: its eos_token is not the token that ends a turn."""
    tokenizer = tokenizer_with(LLAMA3, "<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot_id|>"]})
    return tokenizer


def model(folder: Path, config: Any, generation: Any = None) -> Path:
    (folder / "config.json").write_text(json.dumps({"eos_token_id": config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return folder


def test_the_tokens_come_from_three_places(tokenizer: Any, tmp_path: Path) -> None:
    eos, turn = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")
    found = read_end_tokens(tokenizer, model(tmp_path, turn, [turn, 3, eos]))
    assert found.ids == sorted([eos, turn, 3]) and found.sources[3] == ("generation_config.json",)
    assert found.sources[turn] == ("config.json", "generation_config.json")
    assert f"{eos} '<eos>' (tokenizer, generation_config.json)" in list(found.lines(tokenizer))
    (tmp_path / "generation_config.json").unlink()
    assert read_end_tokens(tokenizer, model(tmp_path, None)).ids == [eos]


def test_what_is_no_token_is_named(tokenizer: Any, tmp_path: Path) -> None:
    for wrong in (-1, 1000, "<eos>", True, [3, [4]], 2.0):
        with pytest.raises(ConfigError, match="generation_config.json: eos_token_id holds .*the vocabulary's 1000"):
            read_end_tokens(tokenizer, model(tmp_path, 3, wrong), 1000)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON .*; correct or remove it"):
        read_end_tokens(tokenizer, tmp_path)


def test_written_responses_and_turns_end_with_any_of_them(tokenizer: Any, tmp_path: Path) -> None:
    """A text that ends with an end token gets no second one; a template may end its turns with any of them."""
    eos, turn = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")
    file = tmp_path / "sft.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1+1", "response": text}) + "\n" for text in ("2", "2<|eot_id|>")))
    data = DataConfig(task="jsonl", max_prompt_length=2000, max_response_length=2000)
    (_, plain), (_, ended) = load_supervised(data, [file], tokenizer, None, [eos, turn])
    assert plain.ids[-1] == eos and ended.ids == [*plain.ids[:-1], turn] and ended.loss_mask() == [1, 1]
    with pytest.raises(ConfigError, match="generation stops at"):
        TurnRenderer(tokenizer).check()
    renderer = TurnRenderer(tokenizer, end_token_ids=[turn])
    renderer.check()
    assert renderer.end_of_turn == turn
