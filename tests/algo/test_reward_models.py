"""The pairwise loss against finite differences and its closed form; which rows of a group make pairs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.algo.reward_models import (
    ModelScores,
    calibration,
    calibration_table,
    combined,
    pairwise_loss,
    process_scores,
    ranked_pairs,
    ranking_accuracy,
)
from tests.algo.tables import make_table


def test_gradient_equals_finite_differences_and_the_closed_form() -> None:
    """d/dm -log sigmoid(m) = -sigmoid(-m), of the margin m = chosen - rejected."""
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (torch.randn(6, dtype=torch.float64, generator=generator, requires_grad=True) for _ in "cr")
    pairwise_loss(chosen, rejected).sum().backward()
    with torch.no_grad():
        want = -torch.sigmoid(-(chosen - rejected))
        h = 1e-5
        numeric = (pairwise_loss(chosen + h, rejected) - pairwise_loss(chosen - h, rejected)) / (2 * h)
    torch.testing.assert_close(numeric, want, rtol=0, atol=1e-9)
    torch.testing.assert_close(chosen.grad, want)
    torch.testing.assert_close(rejected.grad, -want)


def test_values_at_any_margin() -> None:
    """log 2 at 0; m itself where sigmoid(-m) underflows in float32; 0 with a finite gradient on the other side."""
    chosen = torch.tensor([0.0, -1000.0, 1000.0], requires_grad=True)
    loss = pairwise_loss(chosen, torch.zeros(3))
    assert loss.tolist() == [pytest.approx(math.log(2)), 1000.0, 0.0]
    loss.sum().backward()
    assert chosen.grad is not None and chosen.grad.tolist() == [-0.5, -1.0, 0.0]


def test_pairs_go_from_both_ends_and_use_no_row_twice() -> None:
    labels = [0.2, 1.0, float("nan"), 0.9, 0.2, 0.5, 9.0]
    group = [0, 1, 2, 3, 4, 5]  # 2 has no label; in order: 1, 3, 5, 0, 4
    assert ranked_pairs(labels, group) == [(1, 4), (3, 0)]
    assert ranked_pairs(labels, group, limit=1) == [(1, 4)]
    assert ranked_pairs([1.0, 1.0, 1.0], [0, 1, 2]) == []
    assert ranked_pairs([0.0, 1.0, 1.0, 1.0], [0, 1, 2, 3]) == [(1, 0)]


@given(st.lists(st.sampled_from([0.0, 1.0]), max_size=12))
def test_right_and_wrong_answers_make_as_many_pairs_as_the_fewer_of_them(labels: list[float]) -> None:
    pairs = ranked_pairs(labels, range(len(labels)))
    assert len(pairs) == min(labels.count(0.0), labels.count(1.0))
    assert all(labels[chosen] == 1.0 and labels[rejected] == 0.0 for chosen, rejected in pairs)
    assert len({row for pair in pairs for row in pair}) == 2 * len(pairs)


def test_accuracy_counts_a_tie_half() -> None:
    assert ranking_accuracy([3.0, 1.0, 1.0, 2.0], [(0, 1), (1, 2), (1, 3), (3, 1)]) == 2.5 / 4


# -- Accuracy, calibration error and bins of a reward model's predictions, by hand -------------------------------------


def log_odds(p: float) -> float:
    return math.log(p / (1 - p))


def test_bins_compare_confidence_with_accuracy() -> None:
    """0.52 and 0.54 are in the first bin of ten from 0.5 to 1; 0.93 and, for the other side, 0.07 in the ninth."""
    found = calibration([log_odds(p) for p in (0.52, 0.54, 0.93, 0.07)], [True, False, True, True])
    assert found.count == 4 and found.accuracy == 0.5
    first, ninth = found.bins[0], found.bins[8]
    assert (first.count, first.accuracy, first.confidence) == (2, 0.5, pytest.approx(0.53))
    assert (ninth.count, ninth.accuracy, ninth.confidence) == (2, 0.5, pytest.approx(0.93))
    assert found.ece == pytest.approx(0.5 * 0.03 + 0.5 * 0.43)
    assert found.log_loss == pytest.approx(-sum(map(math.log, (0.52, 0.46, 0.93, 0.07))) / 4)
    assert found.brier == pytest.approx((0.48**2 + 0.54**2 + 0.07**2 + 0.93**2) / 4)
    assert [b.count for b in found.bins] == [2, 0, 0, 0, 0, 0, 0, 0, 2, 0] and math.isnan(found.bins[1].accuracy)
    assert calibration_table(found).splitlines()[2].split() == ["0.900", "-", "0.950", "2", "0.500", "0.930"]


def test_ties_and_large_scores() -> None:
    found = calibration([0.0, 900.0, -900.0], [True, True, True])
    assert found.accuracy == pytest.approx(0.5) and found.log_loss == pytest.approx((math.log(2) + 900) / 3)
    assert (found.bins[0].count, found.bins[9].count) == (1, 2)
    assert found.brier == pytest.approx((0.25 + 0 + 1) / 3)


def test_the_order_changes_no_bit() -> None:
    odds = [0.1 * i - 3 for i in range(61)]
    labels = [i % 3 == 0 for i in range(61)]
    assert calibration(odds, labels) == calibration(odds[::-1], labels[::-1])


# -- The sum of rules and models: rewards and step rewards, by hand ----------------------------------------------------

NAN = math.nan


def test_scores_replace_the_rule_or_are_added() -> None:
    """Two models with coefficients 2 and 0.5. Penalties of -1 and -3 stay; where no rule is known, there are none."""
    models = [ModelScores([1.0, 2.0, 3.0], 2.0), ModelScores([10.0, 20.0, 40.0], 0.5)]
    table = replace(make_table([[9.0, 5.0, NAN]]), raw_reward=[10.0, 8.0, NAN])
    replaced = combined(table, models, adds_rule=False)
    assert replaced.raw_reward == [2 + 5, 4 + 10, 6 + 20] and replaced.reward == [7 - 1, 14 - 3, 26]
    added = combined(table, models, adds_rule=True)
    assert added.raw_reward[:2] == [17, 22] and added.reward[:2] == [16, 19] and math.isnan(added.reward[2])
    plain = combined(make_table([[1.0, NAN, 0.0]]), models[:1], adds_rule=False)
    assert plain.reward == [2, 4, 6] and plain.raw_reward == [] and plain.step_rewards == []


def test_a_process_model_gives_probabilities_of_steps() -> None:
    """Log-odds 0, ln 3 and -ln 3 are 1/2, 3/4 and 1/4; far from 0 they are 1 and 0. The score is the smallest."""
    scores = process_scores([[(0, 0.0), (4, math.log(3))], [(2, -math.log(3))], [(1, 800.0), (2, -800.0)], []], 1.0)
    assert scores.steps is not None
    assert [value for row in scores.steps for _, value in row] == pytest.approx([0.5, 0.75, 0.25, 1.0, 0.0])
    assert scores.values[:3] == pytest.approx([0.5, 0.25, 0.0]) and math.isnan(scores.values[3])


def test_step_rewards_are_sums_and_the_last_has_what_is_of_the_whole_response() -> None:
    outcome, process = ModelScores([1.0, 1.0], 3.0), process_scores([[(0, 0.0), (4, 0.0)], [(2, 0.0)]], 0.5)
    table = make_table([[10.0, 20.0]], [[5, 5]], [[[(1, 7.0), (4, 8.0)], []]])
    replaced = combined(table, [outcome, process], adds_rule=False)
    assert replaced.step_rewards == [[(0, 0.25), (4, 0.25 + 3)], [(2, 0.25 + 3)]]
    added = combined(table, [outcome, process], adds_rule=True)
    # the first row's rule gives steps; the second's reward of 20 is of the whole response
    assert added.step_rewards == [[(0, 0.25), (1, 7.0), (4, 8 + 0.25 + 3)], [(2, 0.25 + 3 + 20)]]
    assert added.reward == [10 + 3 + 0.25, 20 + 3 + 0.25]
    assert combined(table, [outcome], adds_rule=True).step_rewards == table.step_rewards
    assert combined(table, [outcome], adds_rule=False).step_rewards == []
