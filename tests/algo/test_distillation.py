"""Distillation on [B, R] tensors: advantages with the sampled reverse KL, and their metrics, by hand.

Row 1: log teacher -1, -3, -5, -1 and log policy -2, -1, -4, -2 at tokens 0 to 3, of which token 1 is an observation:
d = 1, ., -1, 1. With discount .5 the sums over loss tokens are 1 - .5 + .25 = .75, ., -1 + .5 = -.5, 1. Token-mean over 5 loss
tokens: w = .2. Coefficient 2 and seq-mean-token-mean as the teacher's weights: w' = 2 / 3 for a single row with a teacher.
Row 2 has no teacher.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo_megatron.algo.distillation import with_teachers
from grpo_megatron.algo.losses import LossInputs
from grpo_megatron.training.correction import build_loss
from tests.algo.inputs import actor, make_inputs, rows_of, value

MASK = [[1, 0, 1, 1], [1, 1, 0, 0]]
NAN = math.nan


def sampled(advantages: list[list[float]] | float = 0.0) -> LossInputs:
    policy = torch.tensor([[-2.0, -1, -4, -2], [-1, -1, NAN, NAN]], dtype=torch.float64)
    teacher = torch.tensor([[-1.0, -3, -5, -1], [NAN, NAN, NAN, NAN]], dtype=torch.float64)
    inputs = make_inputs(policy.clone(), old=policy, advantages=advantages, mask=MASK)
    weights = torch.tensor([[2 / 3] * 4, [0.0] * 4], dtype=torch.float64)
    index = torch.tensor([[0.0] * 4, [-1.0] * 4], dtype=torch.float64)
    return replace(inputs, teacher_logprobs=teacher, teacher_weights=weights, teacher_index=index)


@pytest.mark.parametrize(("discount", "sums"), [(0.0, [1, 0, -1, 1]), (0.5, [0.75, 0, -0.5, 1]), (1.0, [1, 0, 0, 1])])
def test_sampled_reverse_kl_by_hand(discount: float, sums: list[float]) -> None:
    """The loss is -sum of w A, and its gradient by the log-probabilities -w A, as at every ratio of 1."""
    inputs = sampled([[0.3] * 4, [-0.5] * 4])
    got, metrics = with_teachers(inputs, ("one", "two"), discount)
    added = [0.3 + 2 / 3 / 0.2 * d for d in sums]
    want = torch.tensor([[added[0], 0, *added[2:]], [-0.5, -0.5, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(got.advantages, want, rtol=0, atol=1e-12)
    assert torch.equal(got.advantages[1], inputs.advantages[1])
    assert not got.advantages.requires_grad

    loss, _ = build_loss(actor(), teachers=("one", "two"), discount=discount)(inputs)
    assert loss.item() == pytest.approx(-0.2 * want.sum().item())
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    torch.testing.assert_close(gradient, -0.2 * want, rtol=0, atol=1e-12)

    assert {name: value(part) for name, part in metrics.items() if not math.isnan(value(part))} == pytest.approx(
        {name: -1 / 3 for name in metrics if not name.endswith("/two")}
    )


def test_micro_batches_do_not_change_it() -> None:
    inputs = sampled([[0.3] * 4, [-0.5] * 4])
    loss = build_loss(actor(), teachers=("one",), discount=0.5)
    whole, _ = loss(inputs)
    parts = [loss(rows_of(inputs, [row], width))[0] for row, width in ((0, 4), (1, 2))]
    assert whole.item() == pytest.approx(sum(part.item() for part in parts), abs=1e-15)


def test_equal_scores_change_nothing() -> None:
    inputs = sampled(0.0)
    inputs = replace(inputs, teacher_logprobs=inputs.old_logprobs)
    loss, _ = build_loss(actor(), teachers=("one",))(inputs)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    assert loss.item() == 0 and not gradient.any()


def test_a_divergence_is_a_term_of_its_own() -> None:
    """.2 * (.25 + 1 + 2) + the rest: the sum of w' D, with w' = 2 / 3 and D = 3 tokens of .5; rows without a teacher: none."""
    inputs = sampled(0.0)
    divergence = torch.full((2, 4), 0.5, dtype=torch.float64, requires_grad=True)
    loss, metrics = build_loss(actor(), teachers=("one", "two"))(
        replace(inputs, divergence=divergence, agreement=torch.tensor([[1.0, 0, 0, 1], [0.0] * 4]))
    )
    (gradient,) = torch.autograd.grad(loss, divergence)
    want = torch.tensor([[2 / 3, 0, 2 / 3, 2 / 3], [0.0] * 4], dtype=torch.float64)
    assert torch.equal(gradient, want)
    assert loss.item() == pytest.approx(1.0) == value(metrics["distillation/loss"])
    assert value(metrics["distillation/divergence"]) == 0.5
    for name in ("agreement", "agreement/one", "agreement/from_token_0"):  # of tokens 0, 2 and 3
        assert value(metrics[f"distillation/{name}"]) == pytest.approx(2 / 3)
