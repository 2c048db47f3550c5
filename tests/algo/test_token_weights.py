"""Aggregation: weights by hand, on the published token losses.

Rows [1, 2] and [3, 4, 5, 6]: token-mean 21/6 = 3.5; means 1.5 and 4.5 -> 3; sums 3 and 18 -> 10.5; / L = 4 -> 2.625.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algo.plan import dupo_copies, overlong_penalty, token_weightings, token_weights
from tests.algo.tables import make_table, run

MODES = ["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean", "token-sum"]


def aggregate(mode: str, rows: list[list[float]], norm_length: float = 4) -> float:
    weights = token_weights(mode, [len(row) for row in rows], norm_length)
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
    assert aggregate(mode, rows[:1]) == pytest.approx(first_only, abs=1e-12)
    assert aggregate(mode, [[], *rows, []]) == pytest.approx(both, abs=1e-12)  # an empty row counts nowhere
    assert token_weights(mode, [0, 0], 4) == [0.0, 0.0] and token_weights(mode, [], 4) == []


def test_vectors_of_other_codebases() -> None:
    # Rows on ranks {0, 1} and {2}: 22 / 6, not the mean of rank means; means 2, 3, 8 -> 13/3.
    assert aggregate("token-mean", [[1, 2], [3, 4, 5], [7]]) == pytest.approx(22 / 6)
    assert aggregate("seq-mean-token-mean", [[1, 3], [2, 4], [8]]) == pytest.approx(13 / 3)
    # Micro-batches {1, 2} and {3,4,5},{6,7}: 28 / 7 = 4, where the mean of micro-batch means (1.5 and 5) is 3.25.
    assert aggregate("token-mean", [[1, 2], [3, 4, 5], [6, 7]]) == pytest.approx(4)
    # A plain sum: no factor for the data-parallel size (verl's local 52 on 4 ranks averages to this 13).
    assert aggregate("token-sum", [[1, 2], [4, 6]]) == pytest.approx(13)


def test_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown loss aggregation mode 'token_mean'; did you mean 'token-mean'\?"):
        token_weights("token_mean", [1], 1)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(lengths=st.lists(st.integers(0, 50), max_size=20), norm=st.integers(1, 100))
def test_sums_of_weights(lengths: list[int], norm: int) -> None:
    counted = [n for n in lengths if n]
    total = {
        mode: math.fsum(w * n for w, n in zip(token_weights(mode, lengths, norm), lengths, strict=True))
        for mode in MODES
    }
    num_tokens, num_sequences = sum(counted), len(counted)
    assert total["token-mean"] == pytest.approx(1 if counted else 0)
    assert total["seq-mean-token-mean"] == pytest.approx(1 if counted else 0)
    assert total["token-sum"] == pytest.approx(num_tokens)
    if counted:
        assert total["seq-mean-token-sum"] == pytest.approx(num_tokens / num_sequences)
        assert total["seq-mean-token-sum-norm"] == pytest.approx(num_tokens / num_sequences / norm)


# -- The overlong penalty and DUPO's copies by hand --------------------------------------------------------------------
# L = 20480, c = 4096: the penalty begins at 16384; 18432 is half way. Group [1,0,0,1] has advantages +-.8660239; two copies
# of it in one group of eight would have std sqrt(2 / 7) and +-.9354126: a copy must not enter the statistics.


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(15000, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1), (20481, -1)],
)
def test_overlong_penalty(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 20480, 4096) == penalty


def test_copies_fill_the_places_of_equal_groups() -> None:
    a = [1.0, 0.0, 0.0, 1.0]
    groups = [[1.0] * 4, a, [0.1] * 4, [0.0, math.nan, 1.0, 0.0], [0.0] * 4]
    assert dupo_copies(make_table(groups)) == [0] * 4 + [3] * 4 + [0] * 4 + [2] * 4 + [0] * 4
    assert dupo_copies(make_table([[0.3] * 8, [0.9] * 6])) == [0] * 14
    assert run(make_table(groups), "grpo")[4:8] == pytest.approx(
        [0.8660239, -0.8660239, -0.8660239, 0.8660239], abs=1e-6
    )
    assert run(make_table([a + a]), "grpo")[0] == pytest.approx(0.9354126, abs=2e-6)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(groups=st.lists(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=4), max_size=7))
def test_copies_keep_the_number_of_groups(groups: list[list[float]]) -> None:
    table = make_table(groups)
    copies = dupo_copies(table)
    per_group = [{copies[row] for row in rows} for rows in table.groups()]
    assert all(len(values) == 1 for values in per_group)
    counts = [values.pop() for values in per_group]
    assert [count > 0 for count in counts] == [len(set(group)) > 1 for group in groups]
    kept = [count for count in counts if count]
    assert not kept or (sum(kept) == len(groups) and max(kept) - min(kept) <= 1)


@pytest.mark.parametrize("mode", token_weightings.names())
def test_a_copy_weighs_what_a_second_row_would(mode: str) -> None:
    # Lengths 2 and 4, the second twice: its tokens carry the weights of both rows, in every aggregation.
    single, first, second = token_weights(mode, [2, 4, 4], 8)
    expected = {"token-mean": 0.1, "seq-mean-token-sum": 1 / 3, "token-sum": 1.0, "seq-mean-token-sum-norm": 1 / 24}
    assert first == second
    assert single == pytest.approx(expected.get(mode, 1 / 6))
