"""The overlong penalty and DUPO's copies by hand.

L = 20480, c = 4096: the penalty begins at 16384; 18432 is half way. Group [1,0,0,1] has advantages +-.8660239; two copies
of it in one group of eight would have std sqrt(2 / 7) and +-.9354126: a copy must not enter the statistics.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algo.token_weights import dupo_copies, overlong_penalty, token_weightings, token_weights
from tests.algo.tables import make_table, run


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(15000, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1), (20481, -1)],
)
def test_overlong_penalty(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 20480, 4096) == penalty


def test_overlong_penalty_of_short_limits() -> None:
    assert [overlong_penalty(length, 100, 20) for length in (50, 90, 110)] == [0, -0.5, -1]


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
    single, first, second = token_weights(mode, [2, 4, 4], [True] * 3, 8)
    expected = {"token-mean": 0.1, "seq-mean-token-sum": 1 / 3, "token-sum": 1.0, "seq-mean-token-sum-norm": 1 / 24}
    assert first == second
    assert single == pytest.approx(expected.get(mode, 1 / 6))
