"""The pairwise loss against finite differences and its closed form; which rows of a group make pairs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.algo.scores import pairwise_loss, ranked_pairs, ranking_accuracy


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
