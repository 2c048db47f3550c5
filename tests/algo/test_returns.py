"""Estimators that whiten over every token of the batch, and ReMax.

Returns over all tokens, rewards [1,0,0,1 | 1,1,1,0], lengths [3,2,3,3 | 3,3,3,1]: 15 tokens of 1 and 6 of 0, mean 5/7,
variance 15 * 6 / 21 / 20 = .2142857, std .4629100: (2/7) / .46291 = .6172134 and -(5/7) / .46291 = -1.5430335. With
discount .5, a reward 2 on the third of three tokens: .5, 1, 2.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algo.plan import critic_plan, make_plan, weigh
from grpo_megatron.algo.ppo import (
    ValueInputs,
    advantages_of,
    explained_variance,
    length_adaptive_lams,
    value_loss,
    value_targets,
)
from grpo_megatron.config import ActorConfig, AlgorithmConfig, CriticConfig
from grpo_megatron.types import GroupTable
from tests.algo.tables import make_table, per_token, run

NAN = math.nan
QUICK = settings(deadline=None, derandomize=True, max_examples=50)
GROUPS, LENGTHS = [[1, 0, 0, 1], [1, 1, 1, 0]], [[3, 2, 3, 3], [3, 3, 3, 1]]
WHITENED = ["reinforce_plus_plus", "reinforce_plus_plus_baseline"]


def whitened(numbers: list[float]) -> list[float]:
    mean = math.fsum(numbers) / len(numbers)
    variance = math.fsum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)
    return [(number - mean) / math.sqrt(variance + 1e-8) for number in numbers]


def test_published_vectors() -> None:
    table = make_table(GROUPS, LENGTHS)
    high, low = 0.6172134, -1.5430335
    expected = [high, low, low, high, high, high, high, low]
    assert run(table, "reinforce_plus_plus") == pytest.approx(expected, abs=1e-6)
    high, low = 0.9430266, -1.3868038
    expected = [high, low, low, high, 0.3605690, 0.3605690, 0.3605690, -1.9692614]
    assert run(table, "reinforce_plus_plus_baseline") == pytest.approx(expected, abs=1e-6)


def test_a_discount_skips_tokens_outside_the_loss() -> None:
    # Mask [1, 1, 0, 0, 1], reward 2: returns [.5, 1, 0, 0, 2] (a gap is no step of the discount), and 0 of the other
    # response's single token. Whitened over the four loss tokens; tokens outside the loss get 0.
    table = replace(make_table([[2, 0]], [[5, 3]]), loss_spans=[[(0, 2), (4, 5)], [(1, 2)]])
    a, b, c, d = whitened([0.5, 1.0, 2.0, 0.0])
    got = per_token(table, run(table, "reinforce_plus_plus", gamma=0.5))
    assert got == [pytest.approx([a, b, 0, 0, c]), pytest.approx([0, d, 0])]


def test_rewards_of_turns_fall_on_their_turns() -> None:
    # Generated tokens 0-1 and 4-5; the first turn has earned 1, the second one -0.5, and the outcome is 2: 2.5 in all.
    table = make_table([[2.5, 0]], [[6, 1]])
    table = replace(table, loss_spans=[[(0, 2), (4, 6)], [(0, 1)]], turn_rewards=[[(1, 1.0), (5, -0.5)], []])

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
    # Rewards per token [-.1, 0, .7]: returns [.6, .7, .7].
    penalised = make_table([[1, 0]], greedy=[0.25], penalties=[[[0.1, 0.0, 0.3], [0.0] * 3]])
    assert per_token(penalised, run(penalised, "remax"))[0] == pytest.approx([0.35, 0.45, 0.45])


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


# -- GAE against a published vector, against sums that are written out, and over tokens outside the loss; the value loss
# Published (verl): gamma 1, lambda .95, rewards [0, 0, 1], values [.1, .2, .3]. delta = [.1, .1, .7], so
# A_2 = .7, A_1 = .1 + .95 * .7 = .765, A_0 = .1 + .95 * .765 = .82675. Targets A + V = [.92675, .965, 1]. Whitened over the
# three tokens: [.9913431, .0170921, -1.0084353].

# Seven tokens, of which 0, 1, 4 and 6 are the model's own; one response without gaps.
GAPS = [[(0, 2), (4, 5), (6, 7)], [(0, 3)]]
VALUES = [[0.5, -1.0, NAN, NAN, 0.25, NAN, 2.0], [0.1, 0.2, 0.3]]


def gappy(**columns: object) -> GroupTable:
    """A table of one group: the response with gaps (reward 2), and the published one (reward 1)."""
    table = make_table([[2, 1]], [[7, 3]])
    return replace(table, loss_spans=GAPS, values=VALUES, **columns)


def discounted_sum(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t as a mean of k-step advantages, (1 - lambda) sum of lambda^(k - 1) (r_t + ... + gamma^k V_{t+k} - V_t).

    All steps beyond the end give the return, so the weights of the last are summed: lambda^(n - t - 1).
    """
    n = len(rewards)
    result = []
    for t in range(n):
        steps = []
        for k in range(1, n - t + 1):
            bootstrap = gamma**k * values[t + k] if t + k < n else 0.0
            steps.append(math.fsum(gamma**j * rewards[t + j] for j in range(k)) + bootstrap - values[t])
        weights = [(1 - lam) * lam**k for k in range(len(steps) - 1)] + [lam ** (len(steps) - 1)]
        result.append(math.fsum(w * a for w, a in zip(weights, steps, strict=True)))
    return result


def test_published_vector() -> None:
    table = replace(make_table([[1]]), values=[[0.1, 0.2, 0.3]])
    assert per_token(table, run(table, "gae", lam=0.95)) == [
        pytest.approx([0.9913431, 0.0170921, -1.0084353], abs=1e-6)
    ]
    assert value_targets(table, 1.0, 0.95) == {0: pytest.approx([0.92675, 0.965, 1.0], abs=1e-12)}
    assert value_targets(table, 1.0, 1.0) == {0: pytest.approx([1, 1, 1])}  # Monte-Carlo returns
    assert value_targets(table, 0.5, 0.0) == {0: pytest.approx([0.1, 0.15, 1])}  # one step: r + gamma V'


numbers = st.integers(-40, 40).map(lambda k: k / 10)


@given(
    tokens=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=7),
    gamma=st.sampled_from([1.0, 0.9, 0.5]),
    lam=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
)
def test_the_recursion_is_the_sum(tokens: list[tuple[float, float]], gamma: float, lam: float) -> None:
    rewards, values = [r for r, _ in tokens], [v for _, v in tokens]
    assert advantages_of(rewards, values, gamma, lam) == pytest.approx(
        discounted_sum(rewards, values, gamma, lam), abs=1e-9
    )


REWARDS = {
    "turns": ({"turn_rewards": [[(1, 1.0), (5, -0.5)], []]}, [0, 1, -0.5, 1.5]),
    "steps": ({"step_rewards": [[(1, 0.25), (5, 0.75)], [(2, 1.0)]]}, [0, 0.25, 0.75, 0]),
    "steps and a penalty of the response": (
        {"step_rewards": [[(1, 0.25), (6, 0.75)], [(2, 1.0)]], "raw_reward": [2.5, 1.0]},
        [0, 0.25, 0, 0.25],
    ),
    "steps that were not scored": ({"step_rewards": [[], [(2, 1.0)]]}, [0, 0, 0, 2]),
    "penalties": ({"token_penalties": [[0.1, 0.2, 9, 9, 0.3, 9, 0.4], [0.0] * 3]}, [-0.1, -0.2, -0.3, 1.6]),
}


@pytest.mark.parametrize("name", REWARDS)
def test_rewards_fall_on_their_tokens(name: str) -> None:
    """Token 5 is the environment's: what was earned there falls on token 4, the model's last one before it."""
    columns, rewards = REWARDS[name]
    table = gappy(**columns)
    returns = [math.fsum(rewards[t:]) for t in range(4)]
    assert value_targets(table, 1.0, 1.0)[0] == pytest.approx([returns[0], returns[1], 0, 0, returns[2], 0, returns[3]])
    assert value_targets(table, 1.0, 1.0)[1] == pytest.approx([1, 1, 1])
    one_step = [r + v for r, v in zip(rewards, [-1.0, 0.25, 2.0, 0.0], strict=True)]
    assert [value_targets(table, 1.0, 0.0)[0][t] for t in (0, 1, 4, 6)] == pytest.approx(one_step)


def test_rows_without_a_reward_or_values_are_in_no_statistic() -> None:
    """The second has no reward, the third no values (no rank trains on it), the last no token."""
    rows = make_table([[1, NAN, 1, 0, 5]], [[3, 3, 3, 2, 0]])
    table = replace(rows, values=[[0.1, 0.2, 0.3], [9.0] * 3, [], [0.5, 0.25], []])
    plain = replace(make_table([[1, 0]], [[3, 2]]), values=[[0.1, 0.2, 0.3], [0.5, 0.25]])
    want = per_token(plain, run(plain, "gae", lam=0.5))
    got = per_token(table, run(table, "gae", lam=0.5))
    assert got == [want[0], [0.0] * 3, [0.0] * 3, want[1], []]
    assert sorted(value_targets(table, 1.0, 0.5)) == [0, 3]


def test_lambda_by_length_and_lambda_of_the_targets() -> None:
    """alpha 1/2: 4 own tokens have 1 - 1/2, three have 1 - 2/3; one token would have less than 0."""
    assert length_adaptive_lams(gappy(), 0.5) == pytest.approx([0.5, 1 / 3])
    assert length_adaptive_lams(make_table([[1, 1]], [[1, 0]]), 0.5) == [0.0, 0.0]
    table = gappy(lams=length_adaptive_lams(gappy(), 0.5))
    own = discounted_sum([0, 0, 0, 2], [0.5, -1.0, 0.25, 2.0], 1.0, 0.5)
    other = discounted_sum([0, 0, 1], [0.1, 0.2, 0.3], 1.0, 1 / 3)
    got = per_token(table, run(table, "gae", lam=0.9))
    assert [got[0][t] for t in (0, 1, 4, 6)] + got[1] == pytest.approx(whitened([*own, *other]), abs=1e-12)


def test_explained_variance() -> None:
    table = replace(make_table([[1, 0]], [[1, 1]]), values=[[0.75], [0.25]])
    targets = value_targets(table, 1.0, 1.0)
    assert explained_variance(table, targets) == pytest.approx(1 - 0.125 / 0.5)  # targets 1, 0; errors .25, -.25
    assert explained_variance(replace(table, reward=[1.0, 1.0]), {0: [1.0], 1: [1.0]}) is None


def test_refusals() -> None:
    with pytest.raises(ValueError, match="'gae' needs the values of a critic"):
        run(make_table([[1, 0]]), "gae")
    with pytest.raises(ValueError, match="values that are not finite to table row 1; lower critic.optim.lr"):
        run(replace(make_table([[1, 0]]), values=[[0.0] * 3, [0.0, NAN, 0.0]]), "gae")


def test_the_plan_waits_for_the_values_and_keeps_the_rows() -> None:
    """Before the critic has read the rows: zeros. `mask_truncated_samples` takes row 3 out of both."""
    algorithm = AlgorithmConfig.model_validate({"adv_estimator": "gae", "lam": 0.9, "mask_truncated_samples": True})
    actor = ActorConfig(ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1)
    table = make_table([[1, 0], [1, 1]], [[3, 2], [4, 5]])
    table = replace(table, truncated=[False, False, False, True])
    sizes = {"train_batch_size": 2, "max_response_length": 9}
    plan = make_plan(table, algorithm, actor, dp=2, **sizes)
    assert plan.advantages == [0.0] * 4 and sorted(plan.owner()) == [0, 1, 2]
    valued = replace(table, values=[[0.1] * 3, [0.2] * 2, [0.3] * 4, []])
    revised = weigh(plan, valued, algorithm, actor, max_response_length=9)
    assert revised.mini_batches == plan.mini_batches and revised.token_weights == plan.token_weights
    assert math.fsum(a for row in per_token(valued, revised.advantages) for a in row) == pytest.approx(0, abs=1e-9)

    # The critic's own mini-batches: both prompts in one, by sequences. Rows stay on their ranks.
    critic = CriticConfig(ppo_mini_batch_size=2, loss_agg_mode="seq-mean-token-mean")
    own = critic_plan(revised, valued, algorithm, actor, critic, **sizes)
    assert own.owner() == plan.owner() and [len(minis) for minis in own.mini_batches] == [1, 1]
    assert len({len(minis[0]) for minis in own.mini_batches}) == 1  # as many micro-batches on both ranks
    assert own.token_weights == pytest.approx([1 / 9, 1 / 6, 1 / 12, 0])
    same = critic_plan(revised, valued, algorithm, actor, CriticConfig(), **sizes)
    assert same.mini_batches == plan.mini_batches and same.token_weights == plan.token_weights
    rejected = replace(valued, num_kept_tokens=[0, 0, 4, 0])
    own = critic_plan(revised, rejected, algorithm, actor, CriticConfig(ppo_mini_batch_size=1), **sizes)
    assert own.token_weights == [0, 0, 0.25, 0] and [len(minis) for minis in own.mini_batches] == [1, 1]


# -- the value loss ----------------------------------------------------------------------------------------------------


def loss_inputs(values: torch.Tensor) -> ValueInputs:
    """Rows of one value each: inside the range; beyond it, away from the target and towards it; masked."""
    column = torch.tensor([[0.0], [0.0], [0.0], [0.0]], dtype=torch.float64)
    return ValueInputs(
        values=values,
        old_values=column,
        returns=torch.tensor([[1.0], [-1.0], [2.0], [NAN]], dtype=torch.float64),
        mask=torch.tensor([[True], [True], [True], [False]]),
        token_weights=torch.tensor([[0.5], [0.25], [0.125], [7.0]], dtype=torch.float64),
    )


def test_value_loss() -> None:
    """c = .5. v .2 -> 1: .8^2. v .9 -> -1: (1.9)^2 > 1.5^2, kept. v .9 -> 2: 1.1^2 < 1.5^2, clipped, without a gradient."""
    values = torch.tensor([[0.2], [0.9], [0.9], [NAN]], dtype=torch.float64, requires_grad=True)
    loss, metrics = value_loss(loss_inputs(values), 0.5)
    assert loss.item() == pytest.approx(0.5 * (0.5 * 0.64 + 0.25 * 3.61 + 0.125 * 2.25))
    (gradient,) = torch.autograd.grad(loss, values)
    assert gradient.flatten().tolist() == pytest.approx([0.5 * (0.2 - 1), 0.25 * (0.9 + 1), 0, 0])
    read = {name: float(part.total) / float(part.num_tokens or 1) for name, part in metrics.items()}
    assert read == pytest.approx(
        {"critic/vf_loss": loss.item(), "critic/vf_clipfrac": 1 / 3, "critic/vpred_mean": 2 / 3}
    )
    plain, metrics = value_loss(loss_inputs(values), None)
    assert plain.item() == pytest.approx(0.5 * (0.5 * 0.64 + 0.25 * 3.61 + 0.125 * 1.21))
    assert float(metrics["critic/vf_clipfrac"].total) == 0


@pytest.mark.parametrize("cliprange", [0.5, None])
def test_value_loss_against_finite_differences(cliprange: float | None) -> None:
    point = torch.tensor([[0.2], [0.9], [0.9], [0.4]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda values: value_loss(loss_inputs(values), cliprange)[0], (point,))


def test_a_batch_without_a_loss_token_has_a_loss_of_zero() -> None:
    empty = torch.zeros(2, 3, requires_grad=True)
    nothing = torch.zeros(2, 3)
    loss, _ = value_loss(ValueInputs(empty, nothing, nothing, nothing.bool(), nothing), 0.5)
    (gradient,) = torch.autograd.grad(loss, empty)
    assert loss.item() == 0 and not gradient.any()
