"""Responses of several turns in data files: the tokens of a rollout of the same texts, and a loss on the model's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.data.written import load_offline_groups, load_supervised
from tests.data.test_conversation import CHATML, QWEN3, TOOLS, pieces, tokenizer_with

DATA = DataConfig(task="jsonl", max_prompt_length=2000, max_response_length=2000)
CALL = {"function": {"name": "calculator", "arguments": {"expression": "2*3"}}}
CALL_TEXT = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*3"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "What is 2*3?"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULTS = [{"role": "tool", "content": "6"}, {"role": "tool", "content": "7"}]
ANSWER = {"role": "assistant", "content": "It is 6."}
ROW = {"messages": [QUESTION, CALLING, *RESULTS, ANSWER]}


def write(path: Path, *rows: dict[str, Any]) -> list[Path]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [path]


def test_messages_become_the_tokens_of_a_rollout(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML, "<|im_end|>")
    renderer = TurnRenderer(tokenizer, TOOLS)
    [(prompt, response)] = load_supervised(DATA, write(tmp_path / "sft.jsonl", ROW), tokenizer, renderer)
    assert prompt == renderer.prompt([QUESTION])
    end = [renderer.end_of_turn]
    own = [tokenizer(text)["input_ids"] + end for text in (CALL_TEXT, "It is 6.")]
    observation = renderer.observation(RESULTS, ended_with_eos=True)
    assert response.ids == own[0] + observation + own[1]
    assert response.loss_mask() == [1] * len(own[0]) + [0] * len(observation) + [1] * len(own[1])
    assert [(turn.kind, turn.end - turn.start) for turn in response.turns] == [
        ("assistant", len(own[0])),
        ("observation", len(observation)),
        ("assistant", len(own[1])),
    ]
    assert response.num_loss_tokens == len(own[0]) + len(own[1]) == sum(response.loss_mask())
    # The same row as the chat template renders it at once, but for the newline after the last turn.
    whole = tokenizer.apply_chat_template(ROW["messages"], tools=TOOLS, tokenize=False)
    assert prompt + response.ids == tokenizer(whole)["input_ids"][:-1]


def test_prompt_and_turns_in_separate_fields(tmp_path: Path) -> None:
    """The same conversation as "prompt" and a list in "response"; preferences between two trajectories."""
    tokenizer = tokenizer_with(CHATML, "<|im_end|>")
    renderer = TurnRenderer(tokenizer, TOOLS)
    turns = ROW["messages"][1:]
    files = write(tmp_path / "sft.jsonl", ROW, {"prompt": QUESTION["content"], "response": turns})
    whole, split = load_supervised(DATA, files, tokenizer, renderer)
    assert whole == split
    row = {"prompt": [QUESTION], "chosen": turns, "rejected": "It is 5."}
    fields = {"chosen": 1.0, "rejected": 0.0}
    [(prompt, (chosen, rejected), rewards)] = load_offline_groups(
        DATA, write(tmp_path / "dpo.jsonl", row), tokenizer, fields, renderer
    )
    assert (list(prompt.prompt_ids), chosen, rewards) == (*whole, [1.0, 0.0])
    assert (tokenizer.decode(rejected.ids), rejected.turns) == ("It is 5.<|im_end|>", [])
    assert rejected.loss_mask() == [1] * len(rejected)


def test_rows_with_messages_need_no_environment(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(QWEN3, "<|im_end|>")
    messages = [QUESTION, ANSWER, {"role": "tool", "content": "7"}, ANSWER]
    [(prompt, response)] = load_supervised(DATA, write(tmp_path / "sft.jsonl", {"messages": messages}), tokenizer)
    assert prompt + response.ids == pieces(TurnRenderer(tokenizer), messages)
    rewritten = [QUESTION, ANSWER, QUESTION, ANSWER]  # its template drops earlier thinking when the user speaks again
    with pytest.raises(ConfigError, match="rows with messages: the chat template changes earlier turns"):
        load_supervised(DATA, write(tmp_path / "chat.jsonl", {"messages": rewritten}), tokenizer)
    with pytest.raises(ConfigError, match="several turns .* set data.apply_chat_template=true"):
        plain = DataConfig(task="jsonl", apply_chat_template=False)
        row = {"prompt": "What is 2*3?", "response": [ANSWER]}
        load_supervised(plain, write(tmp_path / "plain.jsonl", row), tokenizer)


GENERATION = (  # ChatML with the marks by which transformers knows the assistant's tokens
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_the_loss_mask_is_that_of_transformers(tmp_path: Path) -> None:
    """For a template with generation marks. Transformers' rendering has one newline more, after the last turn."""
    tokenizer = tokenizer_with(GENERATION, "<|im_end|>")
    turns = [ANSWER, {"role": "user", "content": "And 2*4?"}, {"role": "assistant", "content": "8"}]
    messages = [{"role": "system", "content": "Be brief."}, QUESTION, *turns, QUESTION, ANSWER]
    [(prompt, response)] = load_supervised(DATA, write(tmp_path / "sft.jsonl", {"messages": messages}), tokenizer)
    expected = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert [*prompt, *response.ids] == expected["input_ids"][:-1]
    assert [0] * len(prompt) + response.loss_mask() == expected["assistant_masks"][:-1]
    assert 0 < response.num_loss_tokens < len(response)


def test_rows_that_are_no_trajectory(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML, "<|im_end|>")
    for row, message in (
        ({"messages": "hello"}, "must be a list of messages, not a string"),
        ({"messages": [QUESTION]}, "must have a question, and then a turn of the assistant"),
        ({"messages": [ANSWER]}, "must have a question, and then a turn of the assistant"),
        ({"messages": [QUESTION, CALLING, *RESULTS]}, "begins or ends with a message of role 'tool'"),
        ({"messages": [QUESTION, CALLING, ANSWER]}, "two turns of the assistant without a message between them"),
        ({"messages": [QUESTION, {"role": "assistant"}]}, "message 1 has no content .a text., nor tool_calls"),
        ({"messages": [QUESTION, {**CALLING, "tool_calls": ["2*3"]}]}, "tool_calls of message 1 must be a list of"),
        ({"messages": [QUESTION, "It is 6."]}, "message 1 must be an object with role and content"),
        ({"answer": "6"}, "none of the fields 'prompt', 'messages' is there"),
    ):
        with pytest.raises(ConfigError, match=f"line 1: .*{message}"):
            load_supervised(DATA, write(tmp_path / "sft.jsonl", row), tokenizer)
