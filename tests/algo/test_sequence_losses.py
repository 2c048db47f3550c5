"""Losses of whole responses: published vectors, finite differences, and micro-batches that change nothing.

DPO: log-ratios .5 and -.5, beta .1: margin 1, slope sigmoid(-.1) * .1 = .4750208 * .1.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import LossInputs, MetricSum, policy_losses, total_loss
from grpo_megatron.algo.plan import token_weightings
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.types import GroupTable
from tests.algo.inputs import (
    actor,
    central_difference,
    gradient_of,
    make_inputs,
    ratio_inputs,
    rows_of,
    run,
    value,
)

MODE = "seq-mean-token-mean"
NEED_SEQUENCE_MEAN = policy_losses.names_with(aggregation=(MODE,))
QUICK = settings(deadline=None, derandomize=True, max_examples=25)


def test_gspo_of_ratios_far_apart() -> None:
    # [.5, 1, 1.5]: s = .75^(1/3) = .9085603; A = [1, -1, 2] / 3 of it, -(2/3) s = -.6057069, nothing clipped.
    for name in ("gspo", "gspo_token"):
        inputs = ratio_inputs([[0.5, 1, 1.5]], [[1, -1, 2]], mode=MODE)
        assert run(inputs, actor(), name)[0].item() == pytest.approx(-0.6057069, abs=1e-6)


def test_gspo_clips_the_sequence_and_its_gradient() -> None:
    inputs = ratio_inputs([[2, 2], [2, 2]], [[1, 1], [-1, -1]], mode=MODE)
    for name in ("gspo", "gspo_token"):
        assert gradient_of(inputs, actor(), name).tolist() == [[0, 0], pytest.approx([0.5, 0.5])]


def test_names_and_aggregations_exist() -> None:
    assert policy_losses.get("geo_mean") is policy_losses.get("gmpo")
    assert NEED_SEQUENCE_MEAN == ["bradley_terry", "dpo", "geo_mean", "gmpo", "gspo", "gspo_token", "sapo"]
    needed = {mode for name in policy_losses.names() for mode in policy_losses.facts(name).aggregation}
    assert needed <= set(token_weightings.names())


def test_correction_enters_gmpo_as_a_geometric_mean() -> None:
    # Ratios 1, so a loss of -1 per sequence; weights 4 and 1/4 have geometric mean 1, and arithmetic mean 2.125.
    weights = [[4, 0.25], [2, 2], [0, 8]]
    inputs = make_inputs([[-1.0] * 2] * 3, advantages=1.0, correction=weights, mode=MODE)
    assert run(inputs, actor(), "gmpo")[0].item() == pytest.approx(-(1 + 2 + 0) / 3)
    assert run(inputs, actor(), "gspo")[0].item() == pytest.approx(-(2.125 + 2 + 4) / 3)
    padded = make_inputs(
        [[-1.0] * 3] * 3, advantages=1.0, correction=[[*row, 9] for row in weights], mask=[[1, 1, 0]] * 3, mode=MODE
    )
    assert run(padded, actor(), "gmpo")[0].item() == pytest.approx(-1)


# -- pairs ------------------------------------------------------------------------------------------------------------


def pair_inputs(logprobs: Tensor | list[list[float]], **values: object) -> LossInputs:
    signs = torch.tensor([[1.0 - 2 * (row % 2)] for row in range(len(logprobs))], dtype=torch.float64)
    return make_inputs(logprobs, advantages=signs, **{"mode": MODE, **values})  # type: ignore[arg-type]


def test_dpo_by_hand() -> None:
    # Log-ratios .5 over two tokens and -.5 over one; so margin 1; the second pair's margin is -1.
    inputs = pair_inputs(
        [[-0.5, -1.0], [-1.5, 0.0], [-1.5, 0], [-0.5, 0]], ref=-1.0, mask=[[1, 1], [1, 0]] + [[1, 0]] * 2
    )
    loss, metrics = run(inputs, actor(dpo_beta=0.1), "dpo")
    expected = (math.log1p(math.exp(-0.1)) + math.log1p(math.exp(0.1))) / 2
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert value(metrics["actor/pg_loss"]) == pytest.approx(expected, abs=1e-12)
    assert value(metrics["actor/dpo_accuracy"]) == 0.5
    assert value(metrics["actor/dpo_margin"]) == pytest.approx(0)
    gradient = gradient_of(inputs, actor(dpo_beta=0.1), "dpo")
    slope = 0.0475021 / 2  # two pairs
    assert gradient[:2].tolist() == [pytest.approx([-slope, -slope], abs=1e-7), pytest.approx([slope, 0], abs=1e-7)]


def test_dpo_refuses_rows_that_are_no_pairs() -> None:
    with pytest.raises(AssertionError, match="not chosen"):
        run(make_inputs([[-1.0], [-1.0]], ref=-1.0, advantages=[[-1.0], [1.0]]), actor(), "dpo")
    with pytest.raises(AssertionError, match="3 rows are no pairs"):
        run(make_inputs([[-1.0]] * 3, ref=-1.0, advantages=1.0), actor(), "dpo")
    with pytest.raises(AssertionError, match="needs ref_logprobs"):
        run(pair_inputs([[-1.0]] * 2), actor(), "dpo")


# -- gradients --------------------------------------------------------------------------------------------------------

MASK = [[1] * 5, [1] * 3 + [0] * 2, [1] * 4 + [0], [1] + [0] * 4]


def sequence_inputs(logprobs: Tensor) -> LossInputs:
    generator = torch.Generator().manual_seed(1)
    old, ref = (-2 * torch.rand(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    correction = torch.rand(4, 5, generator=generator, dtype=torch.float64)
    return pair_inputs(logprobs, old=old, ref=ref, mask=MASK, correction=correction)


def random_logprobs(spread: float) -> Tensor:
    """Log-ratios up to +-spread, some sequences clipped, some not."""
    generator = torch.Generator().manual_seed(2)
    old = sequence_inputs(torch.zeros(4, 5)).old_logprobs
    return (old + spread * (2 * torch.rand(4, 5, generator=generator, dtype=torch.float64) - 1)).requires_grad_()


@pytest.mark.parametrize("name", ["gspo", "gmpo", "dpo"])
def test_gradient_is_the_derivative(name: str) -> None:
    config = actor(clip_ratio_low=0.15, clip_ratio_high=0.15, dpo_beta=0.5)
    current = random_logprobs(0.6)
    numeric = central_difference(lambda x: run(sequence_inputs(x), config, name)[0], current)
    gradient = gradient_of(sequence_inputs(current), config, name)
    torch.testing.assert_close(gradient, numeric, rtol=1e-6, atol=1e-8)
    rows = gradient.abs().sum(-1)
    assert (rows > 0).any() and (name == "dpo" or (gradient[sequence_inputs(current).mask] == 0).any())


def test_gradient_of_gspo_token_is_the_derivative_at_a_frozen_ratio() -> None:
    # s_t = frozen * exp(logprobs - frozen logprobs): differentiate with the frozen parts constant.
    config = actor(clip_ratio_low=0.15, clip_ratio_high=0.15)
    current = random_logprobs(0.6)
    at = sequence_inputs(current.detach())
    lengths = at.mask.sum(-1, keepdim=True)
    frozen = ((at.logprobs - at.old_logprobs).sum(-1, keepdim=True) / lengths).exp().detach()

    def surrogate(logprobs: Tensor) -> Tensor:
        assert at.correction is not None
        ratio = frozen * (logprobs - current.detach()).exp()
        terms = torch.maximum(-at.advantages * ratio, -at.advantages * ratio.clamp(0.85, 1.15))
        return (at.token_weights * at.correction * terms).sum()

    numeric = central_difference(surrogate, current)
    torch.testing.assert_close(
        gradient_of(sequence_inputs(current), config, "gspo_token"), numeric, rtol=1e-6, atol=1e-8
    )


@QUICK
@given(seed=st.integers(0, 1000), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_gspo_and_its_token_form_have_one_gradient_where_the_advantage_is_one_number(
    seed: int, lengths: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    logprobs, old = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    signs = torch.randn(len(lengths), 1, generator=generator, dtype=torch.float64)
    mask = [[int(t < n) for t in range(shape[1])] for n in lengths]
    inputs = make_inputs(logprobs, old=old, advantages=signs, mask=mask, mode=MODE)
    a, b = (gradient_of(inputs, actor(), name) for name in ("gspo", "gspo_token"))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    owners=st.lists(st.integers(0, 2), min_size=2, max_size=2),
    name=st.sampled_from(policy_losses.names()),
    mode=st.sampled_from([MODE, "token-mean", "seq-mean-token-sum-norm"]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_micro_batches_and_padding_change_neither_loss_nor_gradient_nor_metrics(
    lengths: list[int], owners: list[int], name: str, mode: str, padding: int, seed: int
) -> None:
    """Pairs of rows (a pair stays together) over micro-batches or ranks, each trimmed to its own width. One may be empty."""
    generator = torch.Generator().manual_seed(seed)
    if policy_losses.facts(name).paired:
        lengths = [max(1, n) for n in lengths]
    shape = (4, max(1, *lengths) + padding)

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    config = actor(kl_loss_coef=0.1, entropy_coeff=0.01, clip_ratio_low=0.1, clip_ratio_high=0.1)
    leaf = draw().requires_grad_()
    mask = [[int(t < n) for t in range(shape[1])] for n in lengths]
    whole = pair_inputs(leaf, old=draw(), ref=draw(), mask=mask, correction=draw().abs(), mode=mode)
    expected, expected_metrics = run(whole, config, name, "k3")
    (expected_gradient,) = torch.autograd.grad(expected, leaf, retain_graph=True)

    total, gradient = 0.0, torch.zeros(shape, dtype=torch.float64)
    metrics: dict[str, MetricSum] = {}
    for owner in range(3):
        rows = [row for row in range(4) if owners[row // 2] == owner]
        share = rows_of(whole, rows, max([1, *(lengths[row] for row in rows)]))
        loss, parts = run(share, config, name, "k3")
        total += loss.item()
        gradient += torch.autograd.grad(loss, leaf, retain_graph=True)[0]
        metrics = {key: metrics[key].plus(part) if key in metrics else part for key, part in parts.items()}
    assert total == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)
    for key, metric in expected_metrics.items():
        assert float(metrics[key].total) == pytest.approx(float(metric.total), abs=1e-12)
        assert metrics[key].num_tokens == metric.num_tokens


# -- Losses of a scalar head against formulas, and the estimators that hold their labels -------------------------------


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
