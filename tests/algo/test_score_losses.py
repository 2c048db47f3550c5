"""Losses of a scalar head against formulas, and the estimators that hold their labels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import LossInputs, policy_losses, total_loss
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.types import GroupTable


def inputs_of(scores: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> LossInputs:
    zeros = torch.zeros_like(scores)
    return LossInputs(scores, zeros, zeros, zeros, None, labels, mask, weights)


def table_of(reward: list[float], **columns: Any) -> GroupTable:
    n = len(reward)
    lengths = {name: [3] * n for name in ("prompt_length", "response_length")}
    index = {"prompt_index": [row // 2 for row in range(n)], "index": [row % 2 for row in range(n)]}
    return GroupTable(**index, reward=reward, **lengths, truncated=[False] * n, holder=[0] * n, **columns)


def test_bradley_terry_is_the_likelihood_of_the_pairs() -> None:
    """Two pairs with margins 0 and 0.5, each row scored at one of three tokens; other scores must not count."""
    scores = torch.tensor([[9.0, 9, 1], [2, 9, 9], [9, -1, 9], [9, 9, -3]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.bool)
    labels = torch.tensor([1.0, -1.0, 1.5, -1.5], dtype=torch.float64)[:, None].expand(4, 3)
    weights = torch.full((4, 3), 0.25, dtype=torch.float64)
    loss, metrics = total_loss(
        inputs_of(scores, labels, mask, weights), ActorConfig(), policy_losses.get("bradley_terry"), None
    )
    margins = [1 - 2, (-1 + 3) - 0.5]  # s_chosen - s_rejected - margin
    assert loss.item() == pytest.approx(sum(math.log(1 + math.exp(-m)) for m in margins) / 2, rel=1e-12)
    assert metrics["actor/pair_accuracy"].total.item() == 0.5  # without the margin: -1 is wrong, 2 is right
    assert metrics["actor/score_margin"].total.item() == pytest.approx((-1 + 2) / 2)
    loss.backward()
    slope = [-1 / (1 + math.exp(m)) / 2 for m in margins]
    assert scores.grad is not None
    assert scores.grad[mask].tolist() == pytest.approx([slope[0], -slope[0], slope[1], -slope[1]], rel=1e-12)
    assert not scores.grad[~mask].any()


def test_step_labels_are_binary_cross_entropy() -> None:
    scores = torch.tensor([[2.0, 7, -1], [0, 3, 7]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.bool)
    labels = torch.tensor([[1.0, 0, 1], [1, -1, 0]], dtype=torch.float64)
    weights = torch.full((2, 3), 0.25, dtype=torch.float64)
    inputs = inputs_of(scores, labels, mask, weights)
    loss, metrics = total_loss(inputs, ActorConfig(), policy_losses.get("step_labels"), None)
    want = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.tensor([2.0, -1, 0, 3], dtype=torch.float64), torch.tensor([1.0, 1, 1, 0], dtype=torch.float64)
    )
    assert loss.item() == pytest.approx(want.item(), rel=1e-12)
    accuracy, right = metrics["actor/step_accuracy"], metrics["actor/step_right"]
    assert (accuracy.total.item(), accuracy.num_tokens) == (1.5, 4)  # right, wrong, a tie, wrong
    assert right.total.item() == 3


def test_labels_become_advantages() -> None:
    config = AlgorithmConfig()
    table = table_of([0.0, 1.0, 1.5, 0.0])
    assert advantage_estimators.get("preference")(table, config) == [-1.0, 1.0, 1.5, -1.5]
    assert advantage_estimators.get("preference")(table_of([1.0, 1.0]), config) == [None, None]
    steps = table_of([0.5, 1.0], step_rewards=[[(0, 1.0), (2, 0.0)], [(1, 1.0)]])
    assert advantage_estimators.get("step_labels")(steps, config) == [[1.0, 0.0, -1.0], [0.0, 1.0, 0.0]]
