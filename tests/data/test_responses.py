"""Rows with responses: the tokens of a rollout of the same texts, what is in the loss or scored, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.prompts import step_ends
from grpo_megatron.data.responses import (
    load_offline_groups,
    load_pairs,
    load_steps,
    read_pairs,
    read_steps,
    step_labels,
)
from grpo_megatron.data.tokenizer import TurnRenderer, read_end_tokens
from grpo_megatron.starting.generated import build_tokenizer
from tests.data.test_conversation import CHATML, LLAMA3, QWEN3, TOOLS, pieces, tokenizer_with
from tests.files import load_supervised, row_files

DATA = DataConfig(task="jsonl", max_prompt_length=2000, max_response_length=2000)
CALL = {"function": {"name": "calculator", "arguments": {"expression": "2*3"}}}
CALL_TEXT = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*3"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "What is 2*3?"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULTS = [{"role": "tool", "content": "6"}, {"role": "tool", "content": "7"}]
ANSWER = {"role": "assistant", "content": "It is 6."}
ROW = {"messages": [QUESTION, CALLING, *RESULTS, ANSWER]}


def test_messages_become_the_tokens_of_a_rollout(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML, "<|im_end|>")
    renderer = TurnRenderer(tokenizer, TOOLS)
    [(prompt, response)] = load_supervised(DATA, row_files(tmp_path / "sft.jsonl", ROW), tokenizer, renderer)
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


@pytest.mark.parametrize("begins", [False, True])
def test_plain_text_is_cut_into_rows_that_learn_each_token_once(tmp_path: Path, begins: bool) -> None:
    """Seven tokens and the end in parts of three. The context of a part is the token before it. No template is applied."""
    tokenizer = tokenizer_with(CHATML, "<|im_end|>")
    tokenizer.bos_token = "<|im_start|>" if begins else None
    text = "1 2 3 4"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    data = DATA.model_copy(update={"max_response_length": 3})
    rows = load_supervised(
        data, row_files(tmp_path / "text.jsonl", {"text": text}, {"prompt": "1", "response": "2"}), tokenizer
    )
    *parts, (prompt, response) = list(rows)
    assert len(prompt) > 1 and len(response) == 2
    whole = [*([tokenizer.bos_token_id] if begins else []), *ids, tokenizer.eos_token_id]
    assert [p for p, _ in parts] == [[token] for token in whole[:-1:3]]
    assert [token for _, part in parts for token in part.ids] == whole[1:]
    assert {len(part) for _, part in parts[:-1]} == {3} and all(part.num_loss_tokens == len(part) for _, part in parts)


def test_prompt_and_turns_in_separate_fields(tmp_path: Path) -> None:
    """The same conversation as "prompt" and a list in "response"; preferences between two trajectories."""
    tokenizer = tokenizer_with(CHATML, "<|im_end|>")
    renderer = TurnRenderer(tokenizer, TOOLS)
    turns = ROW["messages"][1:]
    files = row_files(tmp_path / "sft.jsonl", ROW, {"prompt": QUESTION["content"], "response": turns})
    whole, split = load_supervised(DATA, files, tokenizer, renderer)
    assert whole == split
    row = {"prompt": [QUESTION], "chosen": turns, "rejected": "It is 5."}
    fields = {"chosen": 1.0, "rejected": 0.0}
    [(prompt, (chosen, rejected), rewards)] = load_offline_groups(
        DATA, row_files(tmp_path / "dpo.jsonl", row), tokenizer, fields, renderer
    )
    assert (list(prompt.prompt_ids), chosen, rewards) == (*whole, [1.0, 0.0])
    assert (tokenizer.decode(rejected.ids), rejected.turns) == ("It is 5.<|im_end|>", [])
    assert rejected.loss_mask() == [1] * len(rejected)
    with pytest.raises(ConfigError, match="chosen and rejected are the same"):
        load_offline_groups(DATA, row_files(tmp_path / "same.jsonl", {**row, "chosen": "It is 5."}), tokenizer, fields)


def test_rows_with_messages_need_no_environment(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(QWEN3, "<|im_end|>")
    messages = [QUESTION, ANSWER, {"role": "tool", "content": "7"}, ANSWER]
    [(prompt, response)] = load_supervised(DATA, row_files(tmp_path / "sft.jsonl", {"messages": messages}), tokenizer)
    assert prompt + response.ids == pieces(TurnRenderer(tokenizer), messages)
    rewritten = [QUESTION, ANSWER, QUESTION, ANSWER]  # its template drops earlier thinking when the user speaks again
    with pytest.raises(ConfigError, match="rows with messages: the chat template changes earlier turns"):
        load_supervised(DATA, row_files(tmp_path / "chat.jsonl", {"messages": rewritten}), tokenizer)
    with pytest.raises(ConfigError, match="several turns .* set data.apply_chat_template=true"):
        plain = DataConfig(task="jsonl", apply_chat_template=False)
        row = {"prompt": "What is 2*3?", "response": [ANSWER]}
        load_supervised(plain, row_files(tmp_path / "plain.jsonl", row), tokenizer)


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
    [(prompt, response)] = load_supervised(DATA, row_files(tmp_path / "sft.jsonl", {"messages": messages}), tokenizer)
    expected = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert [*prompt, *response.ids] == expected["input_ids"][:-1]
    assert [0] * len(prompt) + response.loss_mask() == expected["assistant_masks"][:-1]
    assert 0 < response.num_loss_tokens < len(response)


def test_rows_that_are_no_trajectory(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML, "<|im_end|>")
    for row, message in (
        ({"messages": "hello"}, "must be a list of messages, not a string"),
        ({"messages": [QUESTION]}, "must have a question, and then a turn of the assistant"),
        ({"messages": [QUESTION, CALLING, *RESULTS]}, "begins or ends with a message of role 'tool'"),
        ({"messages": [QUESTION, CALLING, ANSWER]}, "two turns of the assistant without a message between them"),
        ({"messages": [QUESTION, {"role": "assistant"}]}, "message 1 has no content .a text., nor tool_calls"),
        ({"messages": [QUESTION, {**CALLING, "tool_calls": ["2*3"]}]}, "tool_calls of message 1 must be a list of"),
        ({"messages": [QUESTION, "It is 6."]}, "message 1 must be an object with role and content"),
    ):
        with pytest.raises(ConfigError, match=f"line 1: .*{message}"):
            load_supervised(DATA, row_files(tmp_path / "sft.jsonl", row), tokenizer)


# -- Rows that a reward model learns from: what is read, which token is scored, and what is refused ------------------

SUMS = DataConfig(task="arithmetic", apply_chat_template=False, max_prompt_length=24, max_response_length=16)
TOKENIZER = build_tokenizer()
EOS = TOKENIZER.eos_token_id


def test_pairs_are_scored_at_the_last_token_that_is_no_padding(tmp_path: Path) -> None:
    files = row_files(
        tmp_path / "rows.jsonl",
        {"prompt": "1+1=", "chosen": "2", "rejected": "33"},
        {"prompt": "2+2=", "chosen": ["4", "4"], "rejected": ["5", "16"], "margin": [0.5, 0]},
    )
    groups = load_pairs(SUMS, files, TOKENIZER, pad_token_id=None)
    assert [rewards for _, _, rewards in groups] == [[1.0, 0.0], [1.5, 0.0], [1.0, 0.0]]
    assert [[len(r) for r in responses] for _, responses, _ in groups] == [[2, 3], [2, 2], [2, 3]]
    assert next([r.loss_spans for r in responses] for _, responses, _ in groups) == [[(1, 2)], [(2, 3)]]
    assert all(response.ids[-1] == EOS for _, responses, _ in groups for response in responses)
    padded = load_pairs(SUMS, files, TOKENIZER, pad_token_id=EOS)  # a model that pads with the end of sequence
    assert next([r.loss_spans for r in responses] for _, responses, _ in padded) == [[(0, 1)], [(1, 2)]]


def test_steps_are_scored_where_they_end(tmp_path: Path) -> None:
    row = {"prompt": "8+3=", "completions": ["8+3=11", "0+0+1=1"], "labels": [True, False]}
    ((_, (response,), rewards),) = load_steps(SUMS, row_files(tmp_path / "rows.jsonl", row), TOKENIZER, ",")
    assert response.labels == [(6, 1.0), (14, 0.0)] and rewards == [0.5]  # the comma, and the end of the sequence
    assert response.loss_spans == [(6, 7), (14, 15)] and response.loss_mask()[5:8] == [0, 1, 0]
    assert response.ids[14] == EOS


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": -1}, "margin -1 is not a number from 0"),
        ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, "field 'rejected' is a string, not a list of texts"),
        ({"prompt": "a", "chosen": ["b"], "rejected": ["c", "d"]}, "must be lists of one length, here 1, 2 and 1"),
    ],
)
def test_wrong_pairs_are_refused(row: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        read_pairs(row)


def test_wrong_steps_are_refused() -> None:
    for row, expected in (
        ({"prompt": "a", "labels": [True]}, "field 'completions' is missing"),
        ({"prompt": "a", "completions": ["b"]}, "field 'labels' is missing"),
        ({"prompt": "a", "completions": ["b", "c"], "labels": [True]}, "has 2 steps and 'labels' 1 labels"),
        ({"prompt": "a", "completions": ["b"], "labels": ["+"]}, "must be a list of true and false"),
        ({"prompt": "a", "completions": ["b", " "], "labels": [True, True]}, "is empty"),
        ({"prompt": "a", "completions": ["b,c"], "labels": [True]}, "contains the separator ','"),
    ):
        with pytest.raises(ValueError, match=expected):
            read_steps(row, ",")


def test_an_error_names_the_row_of_tokens_without_a_score(tmp_path: Path) -> None:
    files = row_files(tmp_path / "rows.jsonl", {"prompt": "1+1=", "chosen": "2", "rejected": "<eos>"})
    with pytest.raises(ConfigError, match="row arithmetic/rows/0: the response has no token but the padding token"):
        load_pairs(SUMS, files, TOKENIZER, pad_token_id=EOS)


# -- Where steps end: on tokens, whatever the tokens hold -------------------------------------------------------------


PIECES = ["<eos>", "a", "b", "\n", "\n\n", "c\n", "\nd", " ", "e\nf\ng"]


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids if i != 0)


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        (["a", "\n", "b", "<eos>"], [1, 3]),
        (["a", "\n\n", "b"], [1, 2]),  # the first of two line ends is in the token that completes the step
        (["a", "\n", "\n", "b", "\n", "<eos>"], [1, 4]),  # a blank step is none, and nothing follows the last
        (["c\n", "a", "\nd", "<eos>"], [0, 2, 3]),  # a separator and the beginning of the next step in one token
        (["a", "e\nf\ng", "b"], [1, 2]),  # two steps end within one token
        (["<eos>"], [0]),  # a response without text has one step
        (["\n", " "], [1]),
    ],
)
def test_steps_end_on_tokens(pieces: list[str], ends: list[int]) -> None:
    assert step_ends([PIECES.index(piece) for piece in pieces], decode, "\n") == ends


def test_longer_separators_and_labels_without_a_step() -> None:
    ids = [PIECES.index(piece) for piece in ("a", "\n", "b", "<eos>")]
    longer = [PIECES.index(piece) for piece in ("a", "\n", "b", "\n", "\nd", "<eos>")]
    assert step_ends(longer, decode, "\n\n") == [4, 5]
    assert step_labels(ids, [True, False], decode, "\n") == [(1, 1.0), (3, 0.0)]
    with pytest.raises(ValueError, match="tokens have 2 steps, and the row 3 labels"):
        step_labels(ids, [True, False, True], decode, "\n")


# -- The end tokens of a model, and what ends with them: turns of rollouts and written responses ---------------------


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
    (tmp_path / "generation_config.json").write_text("[2]")
    with pytest.raises(ConfigError, match="generation_config.json holds no JSON object; correct or remove it"):
        read_end_tokens(tokenizer, tmp_path)


def test_written_responses_and_turns_end_with_any_of_them(tokenizer: Any, tmp_path: Path) -> None:
    """A text that ends with an end token gets no second one; a template may end its turns with any of them."""
    eos, turn = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")
    rows = [{"prompt": "1+1", "response": text} for text in ("2", "2<|eot_id|>")]
    (_, plain), (_, ended) = load_supervised(
        DATA, row_files(tmp_path / "sft.jsonl", *rows), tokenizer, None, [eos, turn]
    )
    assert plain.ids[-1] == eos and ended.ids == [*plain.ids[:-1], turn] and ended.loss_mask() == [1, 1]
    with pytest.raises(ConfigError, match="generation stops at"):
        TurnRenderer(tokenizer).check()
    renderer = TurnRenderer(tokenizer, end_token_ids=[turn])
    renderer.check()
    assert renderer.end_of_turn == turn
