"""Rows that a reward model learns from: what is read, which token is scored, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.arithmetic import build_tokenizer
from grpo_megatron.data.prompts import step_ends
from grpo_megatron.data.written import load_pairs, load_steps, read_pairs, read_steps, step_labels

DATA = DataConfig(task="arithmetic", apply_chat_template=False, max_prompt_length=24, max_response_length=16)
TOKENIZER = build_tokenizer()
EOS = TOKENIZER.eos_token_id


def write(folder: Path, *rows: dict[str, Any]) -> list[Path]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [file]


def test_pairs_are_scored_at_the_last_token_that_is_no_padding(tmp_path: Path) -> None:
    files = write(
        tmp_path,
        {"prompt": "1+1=", "chosen": "2", "rejected": "33"},
        {"prompt": "2+2=", "chosen": ["4", "4"], "rejected": ["5", "16"], "margin": [0.5, 0]},
    )
    groups = load_pairs(DATA, files, TOKENIZER, pad_token_id=None)
    assert [rewards for _, _, rewards in groups] == [[1.0, 0.0], [1.5, 0.0], [1.0, 0.0]]
    assert [[len(r) for r in responses] for _, responses, _ in groups] == [[2, 3], [2, 2], [2, 3]]
    assert next([r.loss_spans for r in responses] for _, responses, _ in groups) == [[(1, 2)], [(2, 3)]]
    assert all(response.ids[-1] == EOS for _, responses, _ in groups for response in responses)
    padded = load_pairs(DATA, files, TOKENIZER, pad_token_id=EOS)  # a model that pads with the end of sequence
    assert next([r.loss_spans for r in responses] for _, responses, _ in padded) == [[(0, 1)], [(1, 2)]]


def test_steps_are_scored_where_they_end(tmp_path: Path) -> None:
    row = {"prompt": "8+3=", "completions": ["8+3=11", "0+0+1=1"], "labels": [True, False]}
    ((_, (response,), rewards),) = load_steps(DATA, write(tmp_path, row), TOKENIZER, ",")
    assert response.labels == [(6, 1.0), (14, 0.0)] and rewards == [0.5]  # the comma, and the end of the sequence
    assert response.loss_spans == [(6, 7), (14, 15)] and response.loss_mask()[5:8] == [0, 1, 0]
    assert response.ids[14] == EOS


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "chosen": "b"}, "field 'rejected' is missing"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": -1}, "margin -1 is not a number from 0"),
        ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, "field 'rejected' is a string, not a list of texts"),
        ({"prompt": "a", "chosen": ["b"], "rejected": ["c", "d"]}, "must be lists of one length, here 1, 2 and 1"),
        ({"prompt": "a", "chosen": ["b"], "rejected": ["c"], "margin": 1.0}, "here 1, 1 and float"),
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
    files = write(tmp_path, {"prompt": "1+1=", "chosen": "2", "rejected": "<eos>"})
    with pytest.raises(ConfigError, match="row arithmetic/rows/0: the response has no token but the padding token"):
        load_pairs(DATA, files, TOKENIZER, pad_token_id=EOS)


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
        (["\n", "a", " ", "\n"], [3]),
        (["c\n", "a", "\nd", "<eos>"], [0, 2, 3]),  # a separator and the beginning of the next step in one token
        (["a", "e\nf\ng", "b"], [1, 2]),  # two steps end within one token
        (["<eos>"], [0]),  # a response without text has one step
        (["\n", " "], [1]),
        ([], []),
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
