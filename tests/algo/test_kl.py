"""KL estimates: values and gradients by hand.

With d = ref - cur: at (cur, ref) = (-1, -1.5), d = -0.5: k1 0.5, k2 0.125, k3 = e^-0.5 + 0.5 - 1 = 0.1065307 and its
gradient 1 - e^d = 0.3934693. At (-2, -1), d = 1: k1 -1, k2 0.5, k3 = e - 2 = 0.7182818, gradient 1 - e = -1.7182818.
Clamps: cur -1, ref -15: d = -14, k3 = 13 (+8e-7) -> 10; ref -30: d = -29 -> -20, k3 = 19 -> 10.

Adaptive coefficient .001, target .1, 1024 samples, horizon 10000: a KL of .3 is an error of 2, clamped to .2: times
1 + .2 * .1024 = 1.02048; .05: -.5, clamped to -.2; .11: .1, times 1.01024.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_megatron.algo.divergence import KlController, kl_penalties, reward_penalty, sequence_kl
from grpo_megatron.config import KlCtrl
from tests.algo.inputs import central_difference

LOGPROBS = [-1.0, -2.0, -0.5]
REF = [-1.5, -1.0, -0.5]
E = 2.718281828459045


def run(name: str, logprobs: list[float], ref: list[float]) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Values, gradients on logprobs, metrics of one row in float64."""
    current = torch.tensor([logprobs], dtype=torch.float64, requires_grad=True)
    value, metrics = kl_penalties.get(name)(current, torch.tensor([ref], dtype=torch.float64))
    assert value.shape == current.shape
    (gradient,) = torch.autograd.grad(value.sum(), current)
    return value[0].tolist(), gradient[0].tolist(), metrics


@pytest.mark.parametrize(
    ("names", "value", "gradient"),
    [
        (["kl", "k1"], [0.5, -1.0, 0.0], [1.0, 1.0, 1.0]),
        (["abs"], [0.5, 1.0, 0.0], [1.0, -1.0, 0.0]),
        (["mse", "k2"], [0.125, 0.5, 0.0], [0.5, -1.0, 0.0]),
        (["low_var_kl", "k3"], [0.10653066, E - 2, 0.0], [0.39346934, 1 - E, 0.0]),
        (["kl+", "k1+"], [0.5, -1.0, 0.0], [0.5, -1.0, 0.0]),
        (["abs+"], [0.5, 1.0, 0.0], [0.5, -1.0, 0.0]),
        (["low_var_kl+", "k3+"], [0.10653066, E - 2, 0.0], [0.5, -1.0, 0.0]),
    ],
)
def test_values_and_gradients(names: list[str], value: list[float], gradient: list[float]) -> None:
    for name in names:
        got_value, got_gradient, _ = run(name, LOGPROBS, REF)
        assert got_value == pytest.approx(value, abs=1e-7)
        assert got_gradient == pytest.approx(gradient, abs=1e-7)


def test_far_from_the_reference() -> None:
    assert run("k1", [-1, -1, -1], [0, -15, -30])[0] == [-1, 14, 29]
    assert run("k2", [-1, -1, -1], [0, -15, -30])[0] == [0.5, 98, 420.5]
    value, gradient, metrics = run("k3", [-1, -1, -1], [0, -15, -30])
    assert value == pytest.approx([E - 2, 10, 10], abs=1e-7)
    assert gradient == pytest.approx([1 - E, 0, 0], abs=1e-7)
    assert metrics["actor/kl_clamp_frac"].tolist() == [[0, 1, 1]]


def test_value_clamp_switches_the_gradient_off_and_k3_plus_keeps_it() -> None:
    assert run("k3", [-30], [-1])[:2] == ([10], [0])
    value, gradient, metrics = run("k3+", [-30], [-1])
    assert (value, gradient) == ([10], [-29])
    assert metrics["actor/kl_clamp_frac"].tolist() == [[1]]


def test_k3_in_float32_is_finite_everywhere_and_exact_near_zero() -> None:
    current = torch.tensor([[-1e4, 0.0, 0.0, -1.0]], requires_grad=True)
    ref = torch.tensor([[0.0, -1e4, -torch.inf, -1.0 + 2**-12]])
    value, _ = kl_penalties.get("k3")(current, ref)
    (gradient,) = torch.autograd.grad(value.sum(), current)
    assert torch.isfinite(value).all() and torch.isfinite(gradient).all()
    # d = 2^-12: d^2/2 + d^3/6 = 2.98e-8. exp(d) - 1 - d in float32 has steps of 1.2e-7 and returns 0.
    assert value[0, 3].item() == pytest.approx(2**-25, rel=1e-3)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(cur=st.floats(-40, 0), ref=st.floats(-40, 0))
def test_k3_lies_between_zero_and_its_clamp(cur: float, ref: float) -> None:
    (value,), _, metrics = run("k3", [cur], [ref])
    assert 0 <= value <= 10
    assert bool(metrics["actor/kl_clamp_frac"]) == (value == 10)


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_gradient_is_the_derivative(name: str) -> None:
    torch.manual_seed(0)
    current = (-torch.rand(3, 5, dtype=torch.float64) * 3).requires_grad_()
    ref = -torch.rand(3, 5, dtype=torch.float64) * 3
    for form in (name, name + "+"):
        (gradient,) = torch.autograd.grad(kl_penalties.get(form)(current, ref)[0].sum(), current)
        # Straight-through: value - sg(value) is frozen, what moves is k2.
        moving = kl_penalties.get("k2" if form.endswith("+") else name)
        numeric = central_difference(lambda x, moving=moving: moving(x, ref)[0].sum(), current)  # type: ignore[misc]
        torch.testing.assert_close(gradient, numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("kl", "expected"), [(0.3, 0.00102048), (0.05, 0.00097952), (0.11, 0.00101024), (0.1, 0.001)])
def test_adaptive_coefficient(kl: float, expected: float) -> None:
    config = KlCtrl(type="adaptive", kl_coef=0.001, target_kl=0.1, horizon=10000)
    controller = KlController(config)
    controller.update(kl, 1024)
    assert controller.kl_coef == pytest.approx(expected, abs=1e-12)
    resumed = KlController(config)
    resumed.load_state(controller.state())
    controller.update(kl, 7)
    resumed.update(kl, 7)
    assert resumed.kl_coef == controller.kl_coef


def test_fixed_coefficient_is_the_configs() -> None:
    controller = KlController(KlCtrl(kl_coef=0.04))
    controller.update(9.0, 10**6)
    assert controller.kl_coef == 0.04
    controller.load_state({"kl_coef": 0.001})  # saved before the config was changed
    assert controller.kl_coef == 0.04


@pytest.mark.parametrize("name", ["kl", "k3+", "mse"])
def test_penalty_in_the_reward_is_the_same_estimate(name: str) -> None:
    old = torch.tensor([[*LOGPROBS, torch.nan], [-1.0, torch.inf, 0, 0], [0.0] * 4], requires_grad=True)
    ref = torch.tensor([[*REF, -torch.inf], [-1.5, torch.nan, 0, 0], [1.0] * 4])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0] * 4]).bool()
    penalty = reward_penalty(kl_penalties.get(name), old, ref, mask)
    assert not penalty.requires_grad
    expected = run(name, LOGPROBS, REF)[0]
    assert penalty.tolist() == [pytest.approx([*expected, 0]), pytest.approx([expected[0], 0, 0, 0]), [0.0] * 4]
    assert sequence_kl(penalty, mask).tolist() == pytest.approx([sum(expected) / 3, expected[0]])


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_penalties.get("k4")
