"""KL estimates: values and gradients by hand.

With d = ref - cur: at (cur, ref) = (-1, -1.5), d = -0.5: k1 0.5, k2 0.125, k3 = e^-0.5 + 0.5 - 1 = 0.1065307 and its
gradient 1 - e^d = 0.3934693. At (-2, -1), d = 1: k1 -1, k2 0.5, k3 = e - 2 = 0.7182818, gradient 1 - e = -1.7182818.
Clamps: cur -1, ref -15: d = -14, k3 = 13 (+8e-7) -> 10; ref -30: d = -29 -> -20, k3 = 19 -> 10.

Adaptive coefficient .001, target .1, 1024 samples, horizon 10000: a KL of .3 is an error of 2, clamped to .2: times
1 + .2 * .1024 = 1.02048; .05: -.5, clamped to -.2; .11: .1, times 1.01024.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_megatron.algo.corrections import MetricRecords, correction_weights, importance_weights, rejection_mask
from grpo_megatron.algo.kl import KlController, kl_penalties, reward_penalty, sequence_kl
from grpo_megatron.config import KlCtrl, RolloutCorrection
from grpo_megatron.report.metrics import Metrics
from tests.algo.inputs import actor, make_inputs, run

LOGPROBS = [-1.0, -2.0, -0.5]
REF = [-1.5, -1.0, -0.5]
E = 2.718281828459045


def estimate(name: str, logprobs: list[float], ref: list[float]) -> tuple[list[float], list[float], dict[str, Tensor]]:
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
        got_value, got_gradient, _ = estimate(name, LOGPROBS, REF)
        assert got_value == pytest.approx(value, abs=1e-7)
        assert got_gradient == pytest.approx(gradient, abs=1e-7)


def test_far_from_the_reference() -> None:
    """The clamp of the value switches the gradient off. k3+ keeps it."""
    assert estimate("k1", [-1, -1, -1], [0, -15, -30])[0] == [-1, 14, 29]
    assert estimate("k2", [-1, -1, -1], [0, -15, -30])[0] == [0.5, 98, 420.5]
    value, gradient, metrics = estimate("k3", [-1, -1, -1], [0, -15, -30])
    assert value == pytest.approx([E - 2, 10, 10], abs=1e-7)
    assert gradient == pytest.approx([1 - E, 0, 0], abs=1e-7)
    assert metrics["actor/kl_clamp_frac"].tolist() == [[0, 1, 1]]
    assert estimate("k3+", [-30], [-1])[:2] == ([10], [-29])


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
    (value,), _, metrics = estimate("k3", [cur], [ref])
    assert 0 <= value <= 10
    assert bool(metrics["actor/kl_clamp_frac"]) == (value == 10)


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
    """Where the loss mask is 0, in the middle too, there is none."""
    old = torch.tensor([[-1.0, torch.nan, -2.0, -0.5], [-1.0, torch.inf, 0, 0], [0.0] * 4], requires_grad=True)
    ref = torch.tensor([[-1.5, -torch.inf, -1.0, -0.5], [-1.5, torch.nan, 0, 0], [1.0] * 4])
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0], [0] * 4]).bool()
    penalty = reward_penalty(kl_penalties.get(name), old, ref, mask)
    assert not penalty.requires_grad
    expected = estimate(name, LOGPROBS, REF)[0]
    first, *others = expected
    assert penalty.tolist() == [pytest.approx([first, 0, *others]), pytest.approx([first, 0, 0, 0]), [0.0] * 4]
    assert sequence_kl(penalty, mask).tolist() == pytest.approx([sum(expected) / 3, expected[0]])


# -- Correction of the rollout mismatch ---------------------------------------------------------------------------------
# Rollout correction by hand: old logprobs -1, rollout [-.5, -1.5, -.8, -2.5], so ratios e^[-.5, .5, -.2, 1.5].
#
# Product e^1.3 = 3.6692967, geometric mean e^.325 = 1.3840306. Cut at 2: mean (.6065307 + 1.6487213 + .8187308 + 2) / 4 =
# 1.2684957, variance (ddof 0) .3300391, std .5744903, effective sample size 1.2684957^2 / (1.2684957^2 + .3300391).

OLD = [-1.0] * 4
ROLLOUT = [-0.5, -1.5, -0.8, -2.5]
RATIOS = [0.6065307, 1.6487213, 0.8187308, 4.4816891]


def numbers(*records: MetricRecords) -> dict[str, float]:
    """The metrics of all `records` reduced together."""
    metrics = Metrics()
    for part in records:
        for name, (method, values) in part.items():
            getattr(metrics, method)(name, values)
    return {name.removeprefix("rollout_corr/rollout_"): value for name, value in metrics.reduce().items()}


def correct(
    old: list[list[float]], rollout: list[list[float]], mask: list[list[int]] | None = None, **config: object
) -> tuple[Tensor | None, dict[str, float]]:
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (old, rollout))
    keep = torch.ones_like(a, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    weights, records = correction_weights(a, b, keep, RolloutCorrection.model_validate(config))
    return weights, numbers(records)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [*RATIOS[:3], 2.0]),
        ({"rollout_is": "icepop"}, [*RATIOS[:3], 0.0]),
        ({"rollout_is": "icepop", "rollout_is_threshold": 5.0, "rollout_is_threshold_low": 0.5}, RATIOS),
        ({"rollout_is": "icepop", "rollout_is_threshold": 5.0, "rollout_is_threshold_low": 0.7}, [0.0, *RATIOS[1:]]),
        ({"rollout_is": "sequence"}, [2.0] * 4),
        ({"rollout_is": "sequence", "rollout_is_threshold": 10.0}, [3.6692967] * 4),
        ({"rollout_is": "geometric"}, [1.3840306] * 4),
    ],
)
def test_weights(config: dict[str, object], expected: list[float]) -> None:
    weights, _ = correct([OLD], [ROLLOUT], **config)
    assert weights is not None and weights.dtype == torch.float32
    assert weights[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_metrics_over_tokens_and_over_responses() -> None:
    _, metrics = correct([OLD], [ROLLOUT])
    expected = {"mean": 1.2684957, "std": 0.5744903, "eff_sample_size": 0.8297996}
    expected |= {"ratio_fraction_high": 0.25, "ratio_fraction_low": 0.0, "max": 2.0, "min": 0.6065307}
    assert metrics == pytest.approx({f"is_{name}": value for name, value in expected.items()}, abs=1e-6)
    # Two responses, products e^1.3 (cut to 2) and 1: over responses, not tokens; the extremes are raw.
    _, metrics = correct([OLD, OLD], [ROLLOUT, OLD], [[1] * 4, [1, 0, 0, 0]], rollout_is="sequence")
    expected = {"mean": 1.5, "std": 0.5, "eff_sample_size": 2.25 / 2.5}
    expected |= {"ratio_fraction_high": 0.5, "ratio_fraction_low": 0.0, "max": math.exp(1.3), "min": 1.0}
    assert metrics == pytest.approx({f"is_{name}": value for name, value in expected.items()}, abs=1e-12)


def test_off_is_nothing() -> None:
    off = RolloutCorrection(rollout_is=None)
    zeros = torch.zeros(1, 2)
    assert correction_weights(zeros, zeros, zeros == 0, off) == (None, {})
    assert rejection_mask(zeros, zeros, zeros == 0, zeros, off) == (None, {})
    assert correct([[0.0]], [[0.0]], [[0]])[1] == {}  # a micro-batch without tokens reports nothing


def test_infinite_logprobs_stay_finite() -> None:
    # Only the engine has -inf: the ratio is bounded by e^20, cut to 2, and outside every band. Both -inf: the ratio is 1.
    old, rollout = [[-1.0, -math.inf, -1.0]], [[-math.inf, -math.inf, -1.0]]
    for kind, expected in [
        ("token", [2, 1, 1]),
        ("icepop", [0, 1, 1]),
        ("sequence", [2, 2, 2]),
        ("geometric", [2, 2, 2]),
    ]:
        weights, metrics = correct(old, rollout, rollout_is=kind)
        assert weights is not None and weights[0].tolist() == pytest.approx(expected)
        assert all(map(math.isfinite, metrics.values()))
        inputs = make_inputs([[-1.0, -2.0, -1.0]], advantages=1.0, correction=weights)
        assert torch.isfinite(run(inputs, actor())[0])


def reject(
    old: list[list[float]], rollout: list[list[float]], advantages: list[list[float]] | None = None, **config: object
) -> tuple[list[list[int]], float]:
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (old, rollout))
    signs = torch.zeros_like(a) if advantages is None else torch.tensor(advantages, dtype=torch.float64).expand(a.shape)
    mask = ~a.isnan()
    kept, records = rejection_mask(a, b, mask, signs, RolloutCorrection.model_validate(config))
    assert kept is not None and not (kept & ~mask).any()
    return kept.int().tolist(), numbers(records)["rs_masked_fraction"]


def test_rejected_tokens_and_responses() -> None:
    old, rollout = [OLD, [-1.0, -1.0, math.nan, math.nan]], [ROLLOUT, [-1.5, -0.5, 0.0, 0.0]]
    assert reject(old, rollout, rollout_rs="token") == ([[1, 1, 1, 0], [1, 1, 0, 0]], 1 / 6)
    assert reject(old, rollout, rollout_rs="sequence") == ([[0] * 4, [1, 1, 0, 0]], 4 / 6)
    assert reject(old, rollout, rollout_rs="geometric") == ([[1] * 4, [1, 1, 0, 0]], 0)
    narrow = {"rollout_rs_threshold": 1.01, "rollout_rs_threshold_low": 0.99}
    assert reject(old, rollout, rollout_rs="geometric", **narrow) == ([[0] * 4, [1, 1, 0, 0]], 4 / 6)
    assert reject(old, rollout, rollout_rs="token", rollout_rs_threshold=5.0, rollout_rs_threshold_low=0.7) == (
        [[0, 1, 1, 1], [1, 0, 0, 0]],  # e^-.5 = .607 is below .7
        2 / 6,
    )


def test_binary_kl_rejects_tokens_in_both_directions() -> None:
    # D of (.25, .5): .1308 and .1438; a ratio of 2 at probabilities of e^-6: .00048 and .00038.
    old, rollout = [[math.log(0.25), math.log(0.5), -6.0]], [[math.log(0.5), math.log(0.25), -6.0 - math.log(2)]]
    for bound, kept in ((0.15, [1, 1, 1]), (0.14, [0, 0, 1]), (0.0004, [0, 0, 0])):
        assert reject(old, rollout, rollout_rs="binary_kl", rollout_rs_threshold=bound)[0] == [kept]


def test_off_policy_mask_spares_good_and_near_responses() -> None:
    # Drifts 2, .5 and 2 against 1, advantages +1, -1 and -1: only the last is both negative and above the threshold.
    old = [[-2.0], [-0.5], [-2.0]]
    kept, _ = reject(old, [[0.0]] * 3, [[1.0], [-1.0], [-1.0]], rollout_rs="off_policy", rollout_rs_threshold=1.0)
    assert kept == [[1], [1], [0]]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=2, max_size=6),
    cut=st.integers(1, 5),
    kind=st.sampled_from(["token", "sequence", "geometric", "icepop"]),
    seed=st.integers(0, 1000),
)
def test_splitting_rows_changes_neither_weights_nor_metrics(lengths: list[int], cut: int, kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, rollout = (-torch.rand(len(lengths), 5, generator=generator) for _ in range(2))
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    config = RolloutCorrection.model_validate({"rollout_is": kind})
    whole, records = correction_weights(old, rollout, mask, config)
    parts = [
        correction_weights(old[part], rollout[part], mask[part], config) for part in (slice(cut), slice(cut, None))
    ]
    assert whole is not None
    assert torch.equal(whole, torch.cat([weights for weights, _ in parts if weights is not None]))
    rows, width = [len(lengths) - 1, 0], max(lengths[-1], lengths[0])  # as in a micro-batch: some rows, fewer columns
    micro_batch = importance_weights(*(tensor[rows, :width] for tensor in (old, rollout, mask)), config)
    assert micro_batch is not None and torch.equal(micro_batch, whole[rows, :width])
    assert (whole[~mask] == 0).all() and (whole <= config.rollout_is_threshold).all()
    together, expected = numbers(*(part for _, part in parts)), numbers(records)
    assert together == pytest.approx(expected, rel=1e-9, abs=1e-9)
