"""Estimators that whiten over every token of the batch, and ReMax.

Returns over all tokens, rewards [1,0,0,1 | 1,1,1,0], lengths [3,2,3,3 | 3,3,3,1]: 15 tokens of 1 and 6 of 0, mean 5/7,
variance 15 * 6 / 21 / 20 = .2142857, std .4629100: (2/7) / .46291 = .6172134 and -(5/7) / .46291 = -1.5430335. With
discount .5, a reward 2 on the third of three tokens: .5, 1, 2.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algo.returns import discounted_returns
from tests.algo.tables import make_table, per_token, run

NAN = math.nan
QUICK = settings(deadline=None, derandomize=True, max_examples=50)
GROUPS, LENGTHS = [[1, 0, 0, 1], [1, 1, 1, 0]], [[3, 2, 3, 3], [3, 3, 3, 1]]
WHITENED = ["reinforce_plus_plus", "reinforce_plus_plus_baseline"]


def test_published_vectors() -> None:
    table = make_table(GROUPS, LENGTHS)
    high, low = 0.6172134, -1.5430335
    expected = [high, low, low, high, high, high, high, low]
    assert run(table, "reinforce_plus_plus") == pytest.approx(expected, abs=1e-6)
    high, low = 0.9430266, -1.3868038
    expected = [high, low, low, high, 0.3605690, 0.3605690, 0.3605690, -1.9692614]
    assert run(table, "reinforce_plus_plus_baseline") == pytest.approx(expected, abs=1e-6)


def test_discounted_returns() -> None:
    assert discounted_returns([0, 0, 2], 0.5) == [0.5, 1, 2]
    assert discounted_returns([], 0.5) == []
    assert discounted_returns([-1, 2, 3], 1.0) == [4, 5, 3]


def test_a_discount_makes_numbers_per_token() -> None:
    # Returns [.25, .5, 1] and [0, 0, 0]: mean 1.75 / 6.
    table = make_table([[1, 0]])
    got = per_token(table, run(table, "reinforce_plus_plus", gamma=0.5))
    tokens = [0.25, 0.5, 1, 0, 0, 0]
    mean = sum(tokens) / 6
    std = math.sqrt(sum((r - mean) ** 2 for r in tokens) / 5 + 1e-8)
    assert [a for row in got for a in row] == pytest.approx([(r - mean) / std for r in tokens], abs=1e-12)


def test_a_discount_skips_tokens_outside_the_loss() -> None:
    # Mask [1, 1, 0, 0, 1], reward 2: returns [.5, 1, 0, 0, 2] (a gap is no step of the discount), and 0 of the other
    # response's single token. Whitened over the four loss tokens; tokens outside the loss get 0.
    table = replace(make_table([[2, 0]], [[5, 3]]), loss_spans=[[(0, 2), (4, 5)], [(1, 2)]])
    returns = [0.5, 1.0, 2.0, 0.0]
    mean = sum(returns) / 4
    std = math.sqrt(sum((value - mean) ** 2 for value in returns) / 3 + 1e-8)
    a, b, c, d = ((value - mean) / std for value in returns)
    got = per_token(table, run(table, "reinforce_plus_plus", gamma=0.5))
    assert got == [pytest.approx([a, b, 0, 0, c]), pytest.approx([0, d, 0])]


def test_penalties_fall_on_their_tokens() -> None:
    # Rewards per token [-.1, 0, .7] and [0, 0, 0]: returns [.6, .7, .7] and 0.
    penalties = [[[0.1, 0.0, 0.3], [0.0] * 3]]
    table = make_table([[1, 0]], penalties=penalties)
    got = per_token(table, run(table, "reinforce_plus_plus"))
    assert got[0][1] == got[0][2] > got[0][0] > 0 > got[1][0]
    remax = make_table([[1, 0]], greedy=[0.25], penalties=penalties)
    assert per_token(remax, run(remax, "remax"))[0] == pytest.approx([0.35, 0.45, 0.45])


def test_rewards_of_turns_fall_on_their_turns() -> None:
    # Generated tokens 0-1 and 4-5; the first turn has earned 1, the second one -0.5, and the outcome is 2: 2.5 in all.
    table = make_table([[2.5, 0]], [[6, 1]])
    table = replace(table, loss_spans=[[(0, 2), (4, 6)], [(0, 1)]], turn_rewards=[[(1, 1.0), (5, -0.5)], []])

    def whitened(returns: list[float]) -> list[float]:
        mean = sum(returns) / len(returns)
        std = math.sqrt(sum((value - mean) ** 2 for value in returns) / (len(returns) - 1) + 1e-8)
        return [(value - mean) / std for value in returns]

    for gamma, returns in ((1.0, [2.5, 2.5, 1.5, 1.5]), (0.5, [0.6875, 1.375, 0.75, 1.5])):
        a, b, c, d, e = whitened([*returns, 0.0])
        got = per_token(table, run(table, "reinforce_plus_plus", gamma=gamma))
        assert got == [pytest.approx([a, b, 0, 0, c, d]), pytest.approx([e])]
    remax = replace(table, greedy_reward=[1.0, 1.0])  # its baseline is the reward of a whole trajectory
    assert run(remax, "remax") == [1.5, -1.0]


def test_remax() -> None:
    assert run(make_table([[1, 0]], greedy=[0.25]), "remax") == [0.75, -0.25]
    # Samples of a prompt whose greedy response has no reward get None; a sample without a reward gets 0.
    assert run(make_table([[1, 0], [1, NAN]], greedy=[NAN, 0.5]), "remax") == [None, None, 0.5, 0.0]
    with pytest.raises(ValueError, match="'remax' needs the reward of each prompt's greedy response"):
        run(make_table([[1, 0]]), "remax")
    assert run(make_table([]), "remax") == []


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.9, 1e9])
@pytest.mark.parametrize("name", WHITENED)
def test_equal_rewards_give_exactly_zero(reward: float, name: str) -> None:
    assert run(make_table([[reward] * 7, [reward]], [[1, 2, 3, 4, 5, 6, 7], [8]]), name) == [0.0] * 8
    assert run(make_table([[reward, reward]], greedy=[reward]), "remax") == [0, 0]


def test_rows_without_a_reward_or_a_token_are_in_no_statistic() -> None:
    for name in WHITENED:
        plain = run(make_table([[1, 0, 1]]), name)
        assert run(make_table([[1, NAN, 0, 1]]), name) == [plain[0], 0.0, *plain[1:]]
    # An empty response is a sample of its group, not a token of the batch.
    rpp = run(make_table([[1, 0, 1, 0]], [[3, 3, 3, 0]]), "reinforce_plus_plus")
    assert rpp[:3] == run(make_table([[1, 0, 1]]), "reinforce_plus_plus")


tenths = st.integers(-50, 50).map(lambda k: k / 10)
samples = st.tuples(tenths | st.just(NAN), st.integers(0, 9))


@QUICK
@given(groups=st.lists(st.lists(samples, min_size=1, max_size=5), min_size=1, max_size=4), data=st.data())
def test_order_of_samples_and_groups_does_not_change_a_bit(
    groups: list[list[tuple[float, int]]], data: st.DataObject
) -> None:
    orders = [data.draw(st.permutations(range(len(group)))) for group in groups]
    places = data.draw(st.permutations(range(len(groups))))
    moved = [[groups[p][i] for i in orders[p]] for p in places]
    table, moved_table = (
        make_table([[r for r, _ in group] for group in part], [[n for _, n in group] for group in part])
        for part in (groups, moved)
    )
    starts = [sum(map(len, groups[:p])) for p in range(len(groups))]
    order = [starts[p] + i for p in places for i in orders[p]]
    for name, gamma in [(WHITENED[0], 1.0), (WHITENED[0], 0.9), (WHITENED[1], 1.0)]:
        expected = run(table, name, gamma=gamma)
        assert run(moved_table, name, gamma=gamma) == [expected[row] for row in order]


@QUICK
@given(groups=st.lists(st.lists(samples, min_size=2, max_size=5), min_size=1, max_size=4), shift=st.integers(-9, 9))
def test_whitened_tokens_have_mean_0_and_std_1_and_do_not_see_a_shift(
    groups: list[list[tuple[float, int]]], shift: int
) -> None:
    rewards, lengths = [[r for r, _ in group] for group in groups], [[n for _, n in group] for group in groups]
    table = make_table(rewards, lengths)
    shifted = make_table([[r + shift for r in group] for group in rewards], lengths)
    for name in WHITENED:
        values = per_token(table, run(table, name))
        tokens = [a for row, r in zip(values, table.reward, strict=True) if math.isfinite(r) for a in row]
        if any(tokens):
            assert math.fsum(tokens) == pytest.approx(0, abs=1e-9)
            assert math.fsum(a * a for a in tokens) / (len(tokens) - 1) == pytest.approx(1, abs=1e-4)
        # Tenths do not shift exactly: 1e-15 where the smallest std is 0.1 / sqrt(180).
        flat = [a for row in per_token(shifted, run(shifted, name)) for a in row]
        if any(tokens):
            assert flat == pytest.approx([a for row in values for a in row], abs=1e-9)
