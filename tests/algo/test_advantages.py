"""Estimators that compare a prompt's samples, against hand arithmetic and published vectors.

[1,0,0,1]: mean 1/2, squared deviations 4 * 1/4 = 1, std sqrt(1/3) = 0.5773503, 0.5 / 0.5773513 = 0.8660239.
[1,1,1,0]: mean 3/4, squared deviations 3/16 + 9/16 = 3/4, std 1/2: 0.25 / 0.500001 = 0.4999990, -0.75 / 0.500001.
One winner among n, any gap g: deviations g(n-1)/n and -g/n, std g/sqrt(n), so the winner gets (n-1)/sqrt(n) (minus the
epsilon's share): 7/sqrt(8) = 2.4748737 for 8. No sample can ever get more, which bounds every group.
[1, 1.00001]: deviations 5e-6, std 5e-6 * sqrt(2): 5e-6 / (7.0710678e-6 + 1e-6) = 0.6194967.

Length-weighted baselines: rewards [1,0,0,1], lengths [3,2,3,3]: 6/11; [1,1,1,0] with [3,3,3,1]: 9/10. gpg: 8 samples, 5
rewards that are not 0: 8/5 of the deviations. Lite PPO: the 8 rewards have squared deviations 5 * 9/64 + 3 * 25/64 = 15/8, std
sqrt(15/56) = .5175492. pass@k: [1,.2,.7,.1]: 1 - .7 = .3, std sqrt(.18) = .4242641.

Process: steps .1 and .9 of one sample, .4 and 0 of the other: mean .35, squared deviations .0625 + .3025 + .0025 + .1225
= .49, std sqrt(.49 / 3) = .4041452; z = -.6185880, 1.3608937, .1237176, -.8660233, summed from the end.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algo import grpo, reinforce
from grpo_megatron.algo.advantages import (
    MAX_ABSOLUTE,
    advantage_estimators,
    informative_groups,
    is_informative,
    penalised_rewards,
    with_length_reward,
)
from grpo_megatron.algo.plan import make_plan
from grpo_megatron.config import ActorConfig, AlgorithmConfig, LengthReward
from grpo_megatron.rewards.reward import MAX_REWARD
from grpo_megatron.types import GroupTable
from tests.algo.tables import Step, make_table, per_token, run

NAN = math.nan
QUICK = settings(deadline=None, derandomize=True, max_examples=50)
WHITENED = ["reinforce_plus_plus", "reinforce_plus_plus_baseline"]  # over all tokens of the batch
BY_GROUP = [
    "grpo",
    "rloo",
    "opo",
    "gpg",
    "grpo_passk",
    "lite_ppo",
    "maxrl",
]  # one number per row, from the prompt's rewards
LENGTHS = [[3, 2, 3, 3], [3, 3, 3, 1]]


def test_the_optimal_token_baseline_weighs_returns_by_what_came_before() -> None:
    """Rewards 1 and 0, norms (1, 1) and (.5, 1.5, 2), summed (1, 2) and (.5, 2, 4): B = 1 / 1.5, 2 / 4, and 0 for one alone.

    The second response has an observation behind its first token. Of the first reward, .4 of the first turn: G = (1, .6).
    """
    table = make_table([[1, 0], [1, 1]], [[2, 4], [1, 1]])
    assert run(table, "grpo")[0] != 0
    table = replace(
        table,
        loss_spans=[[(0, 2)], [(0, 1), (2, 4)], [(0, 1)], [(0, 1)]],
        score_norms=[[1, 1], [0.5, 9, 1.5, 2], [1], [1]],
    )
    want = [[1 / 3, 1 / 2], [-2 / 3, 0, -1 / 2, 0], [0.0], [0.0]]
    for turns, second in (([], 1.0), ([[(0, 0.4)], [], [], []], 0.6)):
        got = per_token(
            replace(table, turn_rewards=turns), run(replace(table, turn_rewards=turns), "optimal_token_baseline")
        )
        want[0][1], want[1][2] = second / 2, -second / 2
        assert [pytest.approx(row) for row in want] == got
    unread = replace(table, score_norms=[[1, 1], [0] * 4, [1], [1]])  # the second is in no batch: the first is alone
    assert run(unread, "optimal_token_baseline")[0] == [1.0, 1.0]
    silent = replace(table, score_norms=[[0] * 2, [0] * 4, [0], [0]])  # every token was certain: no baseline
    assert run(silent, "optimal_token_baseline")[:2] == [[1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]


def test_an_estimator_stands_in_the_file_of_its_family() -> None:
    for name in BY_GROUP:
        assert advantage_estimators.get(name) is vars(reinforce if name in ("rloo", "opo", "gpg") else grpo)[name]


def estimate(
    groups: list[list[float]], name: str = "grpo", by_std: bool = True, lengths: list[list[int]] | None = None
) -> list[float]:
    values = run(make_table(groups, lengths), name, norm_adv_by_std_in_grpo=by_std)
    assert all(isinstance(value, float) for value in values)
    return values  # type: ignore[return-value]


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


@pytest.mark.parametrize(
    ("name", "by_std", "expected"),
    [
        ("grpo", True, [0.8660239, -0.8660239, -0.8660239, 0.8660239, 0.4999990, 0.4999990, 0.4999990, -1.4999970]),
        ("grpo", False, [0.5, -0.5, -0.5, 0.5, 0.25, 0.25, 0.25, -0.75]),
        ("rloo", True, [2 / 3, -2 / 3, -2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3, -1.0]),
        ("opo", True, [0.4545455, -0.5454545, -0.5454545, 0.4545455, 0.1, 0.1, 0.1, -0.9]),
        ("lite_ppo", True, [0.9660899, -0.9660899, -0.9660899, 0.9660899, 0.4830450, 0.4830450, 0.4830450, -1.4491349]),
        ("maxrl", True, [1, -1, -1, 1, 1 / 3, 1 / 3, 1 / 3, -1]),
        ("gpg", True, [0.8, -0.8, -0.8, 0.8, 0.4, 0.4, 0.4, -1.2]),
    ],
)
def test_published_vectors(name: str, by_std: bool, expected: list[float]) -> None:
    assert estimate([[1, 0, 0, 1], [1, 1, 1, 0]], name, by_std, LENGTHS) == pytest.approx(expected, abs=1e-7)


def test_gdpo_normalises_each_part() -> None:
    """Parts [1,0,0,1] (z = +-.8660239) and [0,4,0,0] (mean 1, std 2: z 3/2, -1/2; minus the epsilon), the second at weight .1.

    Sums .8160239, -.7160239, -.9160239, .8160239 in about; a second prompt of equal parts adds four 0 to the step's std.
    """
    table = replace(
        make_table([[1, 4, 0, 1], [7, 7, 7, 7]]),
        reward_parts=[[1, 0], [0, 4], [0, 0], [1, 0], *[[3, 4]] * 4],
    )
    z = [[0.5, -0.5, -0.5, 0.5], [-1, 3, -1, -1]]
    sums = [a / (3**-0.5 + 1e-6) + 0.1 * b / (2 + 1e-6) for a, b in zip(*z, strict=True)]
    scale = math.sqrt(sum(s * s for s in sums) / 7) + 1e-6
    settings = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.1]}
    assert run(table, "gdpo", **settings) == pytest.approx([*(s / scale for s in sums), 0, 0, 0, 0], abs=1e-12)
    penalised = replace(
        table, raw_reward=table.reward, reward=[0.5, 4, 0, 1, 7, 7, 7, 7]
    )  # one more part: [-1/2, 0, 0, 0]
    assert run(penalised, "gdpo", **settings)[0] < run(table, "gdpo", **settings)[0]  # type: ignore[operator]
    unscorable = replace(table, reward=[NAN, 4, 0, 1, 7, 7, 7, 7])
    assert run(unscorable, "gdpo", **settings)[0] == 0
    with pytest.raises(ValueError, match="needs the parts"):
        run(make_table([[1, 0]]), "gdpo", **settings)


def test_rewards_for_lengths() -> None:
    """Lengths 2, 4, 6: shares 1/2, 0, -1/2, of which a wrong response gets at most 0. One length: nothing."""
    table = make_table([[1, 1, 0], [0, 1, 1], [1, NAN, 0]], [[2, 4, 6], [2, 4, 6], [3, 9, 3]])
    config = LengthReward(kind="group", coefficient=0.2)
    changed = with_length_reward(table, config)
    assert changed.reward[:7] == pytest.approx([1.1, 1.0, -0.1, 0.0, 1.0, 0.9, 1.0])
    assert math.isnan(changed.reward[7]) and changed.reward[8] == 0
    assert changed.raw_reward[:7] == table.reward[:7]
    partly = with_length_reward(table, LengthReward(kind="group", correct_from=0.0))
    assert partly.reward[:4] == [1.5, 1, -0.5, 0.5]
    target = with_length_reward(table, LengthReward(kind="target", target_len=5, coefficient=0.25))
    assert target.reward[:3] == [0.25, 0.75, -0.25]
    assert with_length_reward(table, LengthReward()) is table


def test_pass_at_k() -> None:
    assert estimate([[1, 0.2, 0.7, 0.1]], "grpo_passk", by_std=False) == pytest.approx([0.3, 0, 0, 0])
    assert estimate([[1, 0.2, 0.7, 0.1]], "grpo_passk") == pytest.approx([0.7071051, 0, 0, 0], abs=1e-7)
    assert estimate([[1, 1, 0]], "grpo_passk") == [0, 0, 0]


def test_process_supervision() -> None:
    steps: list[list[list[Step]]] = [[[(1, 0.1), (3, 0.9)], [(1, 0.4), (2, 0.0)]]]
    table = make_table([[1, 0]], [[4, 4]], steps)
    expected = [[0.7423057] * 2 + [1.3608937] * 2, [-0.7423057] * 2 + [-0.8660233, 0]]  # after the last step: 0
    got = per_token(table, run(table, "grpo_process"))
    assert got[0] == pytest.approx(expected[0], abs=1e-6)
    assert got[1] == pytest.approx(expected[1], abs=1e-6)
    # A sample without an outcome, a sample without steps and another order change nothing.
    wider = make_table([[0, NAN, 1, 1]], [[4, 4, 4, 2]], [[steps[0][1], [(0, 9.0)], steps[0][0], []]])
    assert per_token(wider, run(wider, "grpo_process")) == [got[1], [0] * 4, got[0], [0, 0]]
    equal = make_table([[1, 0]], steps=[[[(0, 0.1), (2, 0.1)], [(1, 0.1)]]])
    assert run(equal, "grpo_process") == [0, 0]
    dr = run(table, "grpo_process", norm_adv_by_std_in_grpo=False)
    assert per_token(table, dr)[0] == pytest.approx([0.3, 0.3, 0.55, 0.55])


@pytest.mark.parametrize(("steps", "ends"), [([(2, 1.0), (1, 1.0)], "2, 1"), ([(3, 1.0)], "3"), ([(-1, 1.0)], "-1")])
def test_steps_outside_their_response_are_refused(steps: list[Step], ends: str) -> None:
    with pytest.raises(ValueError, match=rf"table row 1: steps end at response tokens \[{ends}\], of 3"):
        run(make_table([[1, 0]], steps=[[[(0, 1.0)], steps]]), "grpo_process")
    with pytest.raises(ValueError, match="'grpo_process' needs step rewards"):
        run(make_table([[1, 0]]), "grpo_process")


def test_penalties_of_tokens_are_part_of_the_reward() -> None:
    # 1 - .3 = .7 and 1 - .5 = .5: equal rewards, but not after the KL penalty.
    table = make_table([[1, 1], [NAN, 1]], penalties=[[[0.1, 0.1, 0.1], [0.5, 0, 0]], [[1.0] * 3] * 2])
    assert penalised_rewards(table)[:2] == pytest.approx([0.7, 0.5])
    assert math.isnan(penalised_rewards(table)[2])
    assert run(table, "rloo") == pytest.approx([0.2, -0.2, 0, 0])
    for name in BY_GROUP:
        assert run(table, name) != run(make_table([[1, 1], [NAN, 1]]), name) == [0.0] * 4


def test_the_filter_of_dynamic_sampling_drops_every_equal_group() -> None:
    groups: list[list[float]] = [[0.1] * 8, [0.3] * 8, [0.9] * 6, [0.1] * 7, [NAN, 0.5], [NAN], [float32(0.1)] * 5]
    assert not any(is_informative(group) for group in groups)
    assert list(informative_groups(make_table(groups))) == []
    assert is_informative([0.1, 0.1 + 2**-56, NAN])  # the next float64


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.9, 0.7, 0.35, 1e9, -1e-30])
@pytest.mark.parametrize("n", [2, 6, 7, 8])
def test_equal_rewards_give_exactly_zero(reward: float, n: int) -> None:
    for name in (*BY_GROUP, *WHITENED):
        assert estimate([[reward] * n, [reward]], name, lengths=[[1 + i % 3 for i in range(n)], [8]]) == [0.0] * (n + 1)
    assert run(make_table([[reward] * n], greedy=[reward]), "remax") == [0.0] * n


def test_ddof_and_leave_one_out() -> None:
    assert estimate([[0.35] * 7 + [0.95]]) == pytest.approx([-0.3535517] * 7 + [2.4748621], abs=1e-6)
    assert estimate([[1, 1.00001], [2, 2.00001]]) == pytest.approx([-0.6194967, 0.6194967] * 2, abs=1e-6)
    # [-1, 1]: std sqrt(2): 1 / 1.4142146 = 0.7071063 (the population form would give 1); [4, 4] gives 0.
    assert estimate([[-1, 1], [4, 4]]) == pytest.approx([-0.7071063, 0.7071063, 0, 0], abs=1e-7)
    # Baselines [2.5, 2, 1.5] and [5.5, 5, 4.5], subtracted from the rewards.
    assert estimate([[1, 2, 3], [4, 5, 6]], "rloo") == pytest.approx([-1.5, 0, 1.5] * 2, abs=1e-12)


def test_unscorable_samples_leave_the_statistics() -> None:
    assert estimate([[1, NAN, 3]], "rloo") == pytest.approx([-2, 0, 2])  # baselines 3 and 1
    with_nan, without = estimate([[1, NAN, 0, 0, 1]]), estimate([[1, 0, 0, 1]])
    assert with_nan == [without[0], 0.0, *without[1:]]
    assert estimate([[1, math.inf, 0, 0, 1]]) == with_nan
    assert estimate([[1.0], [NAN, 1.0], [NAN, NAN], [1.0, 1.0, NAN]]) == [0.0] * 8


rewards = st.floats(-100, 100, width=32)
# Tenths: sums of them depend on the order unless they are correctly rounded.
tenths = st.integers(-50, 50).map(lambda k: k / 10)
groups_of_rewards = st.lists(st.lists(tenths | rewards | st.just(NAN), min_size=1, max_size=9), min_size=1, max_size=4)


@QUICK
@given(groups=groups_of_rewards, data=st.data())
def test_order_of_samples_and_groups_does_not_change_a_bit(groups: list[list[float]], data: st.DataObject) -> None:
    """Nor of process supervision, nor of what is whitened over all tokens, with a discount too."""
    places = data.draw(st.permutations(range(len(groups))))
    order = [[(p, i) for i in data.draw(st.permutations(range(len(groups[p]))))] for p in places]
    lengths = [[len(str(reward)) for reward in group] for group in groups]  # some lengths
    steps = [[[(0, reward), (2, -reward / 3)] for reward in group] for group in groups]
    table, moved = (
        make_table(groups, lengths, steps),
        make_table(*(moved_by(order, x) for x in (groups, lengths, steps))),
    )
    rows = iter(range(len(table)))
    number = [[next(rows) for _ in group] for group in groups]
    for name, gamma in [*((name, 1.0) for name in (*BY_GROUP, "grpo_process", *WHITENED)), (WHITENED[0], 0.9)]:
        expected = run(table, name, gamma=gamma)
        got = run(moved, name, gamma=gamma)
        assert repr(got) == repr([expected[number[p][i]] for group in order for p, i in group]), name


def moved_by(order: list[list[tuple[int, int]]], values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [[values[p][i] for p, i in group] for group in order]


eighths = st.lists(st.integers(-64, 64).map(lambda k: k / 8), min_size=2, max_size=8)


@QUICK
@given(group=eighths, shift=st.integers(-1000, 1000))
def test_shift_of_rewards_changes_nothing(group: list[float], shift: int) -> None:
    # Multiples of 1/8 are shifted without rounding; only the mean rounds, at 1e-13 of 1000.
    shifted = [reward + shift for reward in group]
    cases = [("grpo", True), ("grpo", False), ("rloo", True), ("opo", True), ("grpo_passk", True)]
    for name, by_std in cases:  # not gpg: it counts the rewards that are 0
        assert estimate([shifted], name, by_std) == pytest.approx(estimate([group], name, by_std), abs=1e-11)


@QUICK
@given(group=eighths, scale=st.sampled_from([0.5, 3.0, 1000.0]))
def test_scale_of_rewards(group: list[float], scale: float) -> None:
    scaled = [reward * scale for reward in group]
    for name, by_std in [("grpo", False), ("rloo", True), ("opo", True), ("gpg", True), ("grpo_passk", False)]:
        expected = [scale * value for value in estimate([group], name, by_std)]
        assert estimate([scaled], name, by_std) == pytest.approx(expected, rel=1e-12, abs=1e-9)
    # With the std: unchanged but for the epsilon. The smallest std of unequal eighths is 1/8 / sqrt(8) = 0.044, times
    # 0.5 for the smallest scale, so epsilon moves a value of at most 2.5 by less than 2.5 * 1e-6 / 0.022 = 1.2e-4.
    assert estimate([scaled]) == pytest.approx(estimate([group]), abs=1.2e-4)


@QUICK
@given(base=st.floats(0.015625, 100, width=32), steps=st.lists(st.integers(0, 2), min_size=2, max_size=16))
def test_near_equal_float32_rewards_never_exceed_the_bound(base: float, steps: list[int]) -> None:
    # Rewards a few float32 steps apart, as rounding makes them. (n-1)/sqrt(n) is the exact bound.
    group = [float32(base * (1 + step * 2**-23)) for step in steps]
    n = len(group)
    values = estimate([group])
    assert max(map(abs, values)) <= (n - 1) / math.sqrt(n)
    assert abs(math.fsum(values)) < 1e-6


@QUICK
@given(groups=st.lists(st.lists(rewards, min_size=1, max_size=9), min_size=1, max_size=4))
def test_advantages_of_a_group_sum_to_zero(groups: list[list[float]]) -> None:
    for group in groups:
        for name in ("grpo", "rloo", "gpg"):
            assert abs(math.fsum(estimate([group], name))) < 1e-6


# -- The unified view's estimators: which samples stay in the loss, and with which sign --------------------------------


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


# -- No reward can overflow in an advantage: each estimator refuses 1e308 by name, and is finite in float32 at the bound

ESTIMATORS = advantage_estimators.names()
IGNORE_REWARDS = ("constant", "rft", "best_worst", "zero")  # they compare rewards and compute nothing with them
BY_STD = [(name, by_std) for name in ESTIMATORS for by_std in ((True, False) if name.startswith("grpo") else (True,))]


def table_of(size: float, penalty: float | None = None) -> GroupTable:
    """Rewards of both signs up to `size`, in a response, in single steps and in the greedy response."""
    rewards = [[size, -size, 0.0, size], [-size, -size, size, 0.0]]
    steps = [[[(0, reward), (2, -reward)] for reward in group] for group in rewards]
    penalties = [[[penalty] * 3 for _ in group] for group in rewards] if penalty is not None else None
    table = make_table(rewards, steps=steps, greedy=[-size, size], penalties=penalties)
    return replace(table, values=[[0.5, -0.5, 0.25]] * len(table), reward_parts=[[reward] for reward in table.reward])


@pytest.mark.parametrize("size", [1e308, -1e308, 1.1e15])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_would_overflow_is_refused(name: str, size: float) -> None:
    """By the plan, and by each estimator that computes with rewards."""
    words, algorithm = "too large to compute with", AlgorithmConfig.model_validate({"adv_estimator": name})
    with pytest.raises(ValueError, match=words):
        make_plan(table_of(size), algorithm, ActorConfig(), dp=1, train_batch_size=2, max_response_length=8)
    if name not in IGNORE_REWARDS:
        with pytest.raises(ValueError, match=rf"a reward of -?1(e\+308|\.1e\+15) is {words}"):
            run(table_of(size), name)


@pytest.mark.parametrize(("name", "by_std"), BY_STD)
@pytest.mark.parametrize("penalty", [None, 5e12])  # 5e12: the largest coefficient times the largest KL of a token
def test_at_the_bound_all_is_finite(name: str, by_std: bool, penalty: float | None) -> None:
    table = table_of(MAX_ABSOLUTE, penalty)
    table = replace(table, score_norms=[[1.0] * length for length in table.response_length])
    values = per_token(table, run(table, name, norm_adv_by_std_in_grpo=by_std, gamma=0.5))
    numbers = torch.tensor([value for row in values for value in row], dtype=torch.float32)
    assert numbers.isfinite().all() and numbers.square().isfinite().all()
    assert name in ("rft", "best_worst", "zero") or any(value != 0 for row in values for value in row)


def test_rewards_of_functions_are_bounded_further_below() -> None:
    """So that a penalty or the score of a reward model can be added, and the bound of the table is never met."""
    assert 1000 * MAX_REWARD <= MAX_ABSOLUTE < math.sqrt(3.4e38)
