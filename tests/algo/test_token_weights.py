"""Aggregation: weights by hand, on the published token losses.

Rows [1, 2] and [3, 4, 5, 6]: token-mean 21/6 = 3.5; means 1.5 and 4.5 -> 3; sums 3 and 18 -> 10.5; / L = 4 -> 2.625.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algo.token_weights import token_weightings, token_weights

MODES = ["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean", "token-sum"]


def aggregate(mode: str, rows: list[list[float]], in_loss: list[bool] | None = None, norm_length: float = 4) -> float:
    weights = token_weights(mode, [len(row) for row in rows], in_loss or [True] * len(rows), norm_length)
    return math.fsum(weight * value for weight, row in zip(weights, rows, strict=True) for value in row)


def test_the_modes_are_the_documented_ones() -> None:
    assert token_weightings.names() == MODES


@pytest.mark.parametrize(
    ("mode", "both", "first_only"),
    [
        ("token-mean", 3.5, 1.5),
        ("seq-mean-token-mean", 3, 1.5),
        ("seq-mean-token-sum", 10.5, 3),
        ("seq-mean-token-sum-norm", 2.625, 0.75),
        ("token-sum", 21, 3),
    ],
)
def test_published_vectors(mode: str, both: float, first_only: float) -> None:
    rows: list[list[float]] = [[1, 2], [3, 4, 5, 6]]
    assert aggregate(mode, rows) == pytest.approx(both, abs=1e-12)
    # A row that is left out and an empty row count nowhere.
    assert aggregate(mode, rows, [True, False]) == pytest.approx(first_only, abs=1e-12)
    assert aggregate(mode, [[], *rows, []]) == pytest.approx(both, abs=1e-12)


def test_vectors_of_other_codebases() -> None:
    # Rows on ranks {0, 1} and {2}: 22 / 6, not the mean of rank means; means 2, 3, 8 -> 13/3.
    assert aggregate("token-mean", [[1, 2], [3, 4, 5], [7]]) == pytest.approx(22 / 6)
    assert aggregate("seq-mean-token-mean", [[1, 3], [2, 4], [8]]) == pytest.approx(13 / 3)
    assert aggregate("token-mean", [[1, 3], [5, 7]], [True, False]) == pytest.approx(2)
    # Micro-batches {1, 2} and {3,4,5},{6,7}: 28 / 7 = 4, where the mean of micro-batch means (1.5 and 5) is 3.25.
    assert aggregate("token-mean", [[1, 2], [3, 4, 5], [6, 7]]) == pytest.approx(4)
    # A plain sum: no factor for the data-parallel size (verl's local 52 on 4 ranks averages to this 13).
    assert aggregate("token-sum", [[1, 2], [4, 6]]) == pytest.approx(13)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_in_the_loss(mode: str) -> None:
    assert token_weights(mode, [3, 0], [False, True], 4) == [0.0, 0.0]
    assert token_weights(mode, [], [], 4) == []


def test_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown loss aggregation mode 'token_mean'; did you mean 'token-mean'\?"):
        token_weights("token_mean", [1], [True], 1)


rows_of_step = st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=20)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(rows=rows_of_step, norm=st.integers(1, 100))
def test_sums_of_weights(rows: list[tuple[int, bool]], norm: int) -> None:
    lengths, in_loss = [n for n, _ in rows], [kept for _, kept in rows]
    counted = [n for n, kept in rows if kept and n > 0]
    total = {
        mode: math.fsum(w * n for w, n in zip(token_weights(mode, lengths, in_loss, norm), lengths, strict=True))
        for mode in MODES
    }
    num_tokens, num_sequences = sum(counted), len(counted)
    assert total["token-mean"] == pytest.approx(1 if counted else 0)
    assert total["seq-mean-token-mean"] == pytest.approx(1 if counted else 0)
    assert total["token-sum"] == pytest.approx(num_tokens)
    if counted:
        assert total["seq-mean-token-sum"] == pytest.approx(num_tokens / num_sequences)
        assert total["seq-mean-token-sum-norm"] == pytest.approx(num_tokens / num_sequences / norm)
