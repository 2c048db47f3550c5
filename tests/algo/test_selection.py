"""The unified view's estimators: which samples stay in the loss, and with which sign."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algo.tables import make_table, run

NAN = math.nan


def test_by_hand() -> None:
    groups = [[0.5, 1, 0, 1, NAN], [1, 1], [2, 0.9]]
    table = make_table(groups)
    assert run(table, "constant") == [1.0] * 9
    assert run(table, "rft") == [None, 1, None, 1, None, 1, 1, 1, None]
    assert run(table, "rft", rft_threshold=0.5) == [1, 1, None, 1, None, 1, 1, 1, 1]
    assert run(table, "best_worst") == [None, 1, -1, None, None, None, None, 1, -1]


def test_an_empty_response_is_in_no_pair() -> None:
    assert run(make_table([[1, 0, 0.5]], [[3, 0, 3]]), "best_worst") == [1, None, -1]
    assert run(make_table([[1, 0]], [[3, 0]]), "best_worst") == [None, None]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(groups=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=1, max_size=6), min_size=1, max_size=4))
def test_pairs_are_one_best_and_one_worst_of_a_group(groups: list[list[float]]) -> None:
    values = iter(run(make_table(groups), "best_worst"))
    for group in groups:
        sides = [next(values) for _ in group]
        scorable = [reward for reward in group if not math.isnan(reward)]
        if len(set(scorable)) < 2:
            assert sides == [None] * len(group)
            continue
        assert sorted(side for side in sides if side is not None) == [-1, 1]  # type: ignore[type-var]
        assert sides.index(1) == group.index(max(scorable))  # ties: the lowest index
        assert sides.index(-1) == group.index(min(scorable))
