"""Policy losses and their composition: values, gradients and metrics by hand; finite differences; micro-batches.

verl's vector: rho rows [1, 1.5, .5, 1.25] with A = 1 and [1, 1.5, .5, 4] with A = -1; clip .2 / .28, dual 3. Losses
max(-A rho, -A clip(rho)): row 1: -1, -1.28 (clipped), -.5, -1.25. Row 2: 1, 1.5, max(.5, .8) = .8 (clipped),
min(max(4, 1.28), 3) = 3 (dual). Sum 2.27; / 8 = .28375. d/dlogprob = loss * 1/8 where not clipped, 0 where clipped.

CISPO on it: weights [1, 1.28, .8, 1.25] (without a lower bound .5 for .8) and [1, 1.28, .8, 1.28], gradients -A w / 8;
5 of 8 ratios are outside the bounds, 3 without the lower one. SAPO: -A 4/tau sigmoid(tau (rho - 1)), gradient
-A 4 s (1 - s) rho / 8: at rho = 1.5, tau = 1: s = .6224593, 4 * .2350037 * 1.5 / 8 = .1762528. gpg: -A logprobs.
GSPO: mean log-ratios -.0161344 and .2746436: s = .9839950 and 1.3160614 (the unclipped loss is the larger): (-.9839950
+ 1.3160614) / 2 = .1660396 (the table's digits are float32's); gradients -A s / 8.
GMPO: row 1 log-ratios [0, .28, -.6931472, .2231436], mean -.0475009; row 2 [0, .4054651, -.2, 1.3862944], mean .3979399:
(-.9536096 + 1.4887544) / 2 = .2675724; the tokens at a bound have gradient 0.

DPO: log-ratios .5 and -.5, beta .1: margin 1, slope sigmoid(-.1) * .1 = .4750208 * .1.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_megatron.algo import grpo, ppo
from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import LossInputs, MetricSum, policy_losses, total_loss
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from tests.algo.inputs import (
    CLIP,
    RATIOS,
    SIGNS,
    actor,
    central_difference,
    gradient_of,
    make_inputs,
    ratio_inputs,
    rows_of,
    run,
    value,
)
from tests.algo.tables import make_table


@pytest.mark.parametrize("family", [grpo, ppo])
def test_a_loss_stands_in_the_file_of_its_family(family: ModuleType) -> None:
    names = {"grpo": ["gspo", "gspo_token", "gmpo", "cispo", "sapo"], "ppo": ["vanilla"]}
    for name in names[family.__name__.rpartition(".")[2]]:
        assert policy_losses.get(name) is vars(family)[name]


def test_published_vector() -> None:
    inputs = ratio_inputs(RATIOS, SIGNS)
    loss, metrics = run(inputs, actor(**CLIP))
    assert loss.item() == pytest.approx(0.28375, abs=1e-9)
    assert value(metrics["actor/pg_loss"]) == pytest.approx(0.28375, abs=1e-9)
    assert value(metrics["actor/pg_clipfrac"]) == 0.25
    assert value(metrics["actor/pg_clipfrac_lower"]) == 0.125
    assert value(metrics["actor/ppo_kl"]) == pytest.approx(-0.1292592, abs=1e-7)  # -mean log rho, log 1.40625^3 / 8
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    assert gradient[0].tolist() == pytest.approx([-0.125, 0, -0.0625, -0.15625])
    assert gradient[1].tolist() == pytest.approx([0.125, 0.1875, 0, 0])
    without_dual_clip = actor(**CLIP | {"clip_ratio_c": None})  # 4 instead of 3
    assert run(inputs, without_dual_clip)[0].item() == pytest.approx(3.27 / 8)


def test_log_ratio_is_clamped_and_reported_unclamped() -> None:
    inputs = make_inputs([[100.0]], old=0.0, advantages=1.0)
    per_token, metrics = policy_losses.get("vanilla")(inputs, actor(clip_ratio_high=1e12))
    assert per_token.item() == pytest.approx(-math.exp(20))
    assert metrics["actor/ppo_kl"].item() == -100
    assert metrics["actor/ratio_clamp_frac"].item() is True


VECTORS: dict[str, tuple[dict[str, float], float, list[float], list[float], tuple[float, float] | None]] = {
    "cispo": ({}, 0.1831909, [-0.125, -0.16, -0.0625, -0.15625], [0.125, 0.16, 0.0625, 0.16], (0.375, 0)),
    "cispo bounded below": (
        {"cispo_clip_ratio_low": 0.2},
        *(0.1831909, [-0.125, -0.16, -0.1, -0.15625], [0.125, 0.16, 0.1, 0.16], (0.625, 0)),
    ),
    "sapo": (
        {},
        *(0.1398207, [-0.125, -0.1762528, -0.0587509, -0.1538338], [0.125, 0.1751512, 0.0583837, 0.0788057], (0, 0)),
    ),
    **dict.fromkeys(("gpg", "sft"), ({}, 0.1453939, [-0.125] * 4, [0.125] * 4, None)),
    "gspo": ({}, 0.1660396, [-0.1229994] * 4, [0.1645093] * 4, (0, 0)),
    "gspo_token": ({}, 0.1660396, [-0.1229994] * 4, [0.1645093] * 4, (0, 0)),
    "gmpo": (
        {},
        *(0.2675724, [-0.1192012, 0, -0.1192012, -0.1192012], [0.1860943, 0.1860943, 0, 0.1860943], (0.25, 0.375)),
    ),
}  # config, loss, gradients of the two rows, clipped and clipped below


@pytest.mark.parametrize("case", VECTORS)
def test_published_vector_of_other_losses(case: str) -> None:
    """token-mean and seq-mean-token-mean are the same here: both rows have four tokens."""
    config, expected, first, second, clipped = VECTORS[case]
    inputs = ratio_inputs(RATIOS, SIGNS)
    loss, metrics = run(inputs, actor(**CLIP, **config), case.split()[0])
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert gradient.tolist() == [pytest.approx(first, abs=1e-6), pytest.approx(second, abs=1e-6)]
    if clipped is not None:
        assert (value(metrics["actor/pg_clipfrac"]), value(metrics["actor/pg_clipfrac_lower"])) == clipped
        assert value(metrics["actor/ppo_kl"]) == pytest.approx(-0.1292592, abs=1e-7)


def test_correction_multiplies_the_policy_loss_alone() -> None:
    # Losses [-.5, 1, -2.4] times w = e^(-1 - mu), mu = [-.5, -1.5, -.8]: sum -.6194980, mean -.2064993.
    weights = [[math.exp(-1 + mu) for mu in (0.5, 1.5, 0.8)]]
    inputs = ratio_inputs([[0.5, 1, 1.5]], [[1, -1, 2]], correction=weights)
    assert run(inputs, actor())[0].item() == pytest.approx(-0.2064993, abs=1e-7)
    # At weight 0 only KL and entropy remain.
    config = actor(kl_loss_coef=0.1, entropy_coeff=0.2)
    silent = make_inputs([[-1.0, -3.0]], ref=-2.0, advantages=5.0, correction=[[0.0, 0.0]])
    rest = make_inputs([[-1.0, -3.0]], ref=-2.0, advantages=0.0)
    assert gradient_of(silent, config, "vanilla", "k3").tolist() == gradient_of(rest, config, "vanilla", "k3").tolist()
    # Masked entries do not matter, and weight 1 is no correction.
    ones = make_inputs([[-1.0, -3.0]], advantages=2.0, mask=[[1, 0]], correction=[[1.0, math.nan]])
    plain = make_inputs([[-1.0, -3.0]], advantages=2.0, mask=[[1, 0]])
    assert run(ones, actor())[0].item() == run(plain, actor())[0].item()


def test_observations_are_learnt_outside_the_mask() -> None:
    """ECHO: the sum of the weighed terms, with their gradient, beside the loss of the masked rest."""
    inputs = make_inputs([[-1.0, -2.0, -3.0]], advantages=0.0, mask=[[1, 0, 0]])
    weights = torch.tensor([[0.0, 0.25, 0.0]])
    leaf = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    loss, metrics = run(replace(inputs, observation_loss=-weights * leaf), actor())
    assert loss.item() == value(metrics["actor/observation_loss"]) == 0.5
    assert torch.autograd.grad(loss, leaf)[0].tolist() == [[0, -0.25, 0]]


def test_kl_and_entropy_alone() -> None:
    # k3 of d = ref - cur = [-1, 0, 1]: 1/e, 0, e - 2; mean 0.3620537, times 0.1.
    inputs = make_inputs([[0.0, -1.0, -2.0]], old=-1.0, ref=-1.0)
    loss, metrics = run(inputs, actor(kl_loss_coef=0.1), kl="low_var_kl")
    assert loss.item() == pytest.approx(0.0362054, abs=1e-7)
    assert value(metrics["actor/kl_loss"]) == pytest.approx(0.3620537, abs=1e-7)
    assert value(metrics["actor/kl_clamp_frac"]) == 0
    # Coefficient 0: a metric only, even where it is infinite.
    infinite = make_inputs([[0.0]], old=0.0, ref=-math.inf)
    assert run(infinite, actor(kl_loss_coef=0.0), kl="k2")[0].item() == 0
    loss, metrics = run(make_inputs([[-1.0, -2.0]]), actor(entropy_coeff=0.1))  # entropies 0.5 and 2
    assert loss.item() == pytest.approx(-0.125)
    assert value(metrics["actor/entropy_loss"]) == 1.25


@pytest.mark.parametrize("shape", [(2, 3), (0, 1)])
@pytest.mark.parametrize("name", policy_losses.names())
def test_nothing_in_the_loss_is_zero_with_zero_gradient(shape: tuple[int, int], name: str) -> None:
    leaf = torch.full(shape, -math.inf, requires_grad=True)
    inputs = make_inputs(leaf.double(), ref=-1.0, advantages=1.0, mask=torch.zeros(shape))
    loss, metrics = run(inputs, actor(kl_loss_coef=0.1, entropy_coeff=0.1), name, kl="k3")
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == 0
    assert gradient.tolist() == torch.zeros(shape).tolist()
    assert all(float(metric.total) == 0 for metric in metrics.values())


def test_infinite_rollout_and_old_logprobs_keep_the_loss_finite() -> None:
    # The engine returns -inf for a token that its truncated distribution excludes; exp(20) bounds the ratio to old.
    for values in ({"rollout": -math.inf}, {"old": -math.inf}):
        for name in policy_losses.names_with(paired=False):  # pairs have no old policy
            inputs = make_inputs([[-1.0, -2.0]], advantages=[[1.0, -1.0]], **values)  # type: ignore[arg-type]
            loss, _ = run(inputs, actor(), name)
            (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
            assert torch.isfinite(loss) and torch.isfinite(gradient).all(), name


def test_a_user_loss_has_the_same_protection() -> None:
    def reinforce(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, dict[str, Tensor]]:
        # log(0) = -inf where masked: the loss itself makes it.
        return inputs.advantages.log() - inputs.advantages * inputs.logprobs, {"own": inputs.logprobs}

    inputs = make_inputs([[-3.0, math.nan]], advantages=1.0, mask=[[1, 0]])
    loss, metrics = total_loss(inputs, actor(), reinforce, None)
    assert loss.item() == 3
    assert value(metrics["own"]) == -3


def test_wrong_shapes_do_not_broadcast() -> None:
    inputs = make_inputs([[-1.0, -2.0]] * 2)
    with pytest.raises((AssertionError, TypeError), match="advantages"):
        replace(inputs, advantages=torch.zeros(2, 1))


# -- losses of whole responses -----------------------------------------------------------------------------------------

MODE = "seq-mean-token-mean"
QUICK = settings(deadline=None, derandomize=True, max_examples=25)


def test_gspo_clips_the_sequence_and_its_gradient() -> None:
    inputs = ratio_inputs([[2, 2], [2, 2]], [[1, 1], [-1, -1]], mode=MODE)
    for name in ("gspo", "gspo_token"):
        assert gradient_of(inputs, actor(), name).tolist() == [[0, 0], pytest.approx([0.5, 0.5])]


def test_correction_enters_gmpo_as_a_geometric_mean() -> None:
    # Ratios 1, so a loss of -1 per sequence; weights 4 and 1/4 have geometric mean 1, and arithmetic mean 2.125.
    weights = [[4, 0.25], [2, 2], [0, 8]]
    inputs = make_inputs([[-1.0] * 2] * 3, advantages=1.0, correction=weights, mode=MODE)
    assert run(inputs, actor(), "gmpo")[0].item() == pytest.approx(-(1 + 2 + 0) / 3)
    assert run(inputs, actor(), "gspo")[0].item() == pytest.approx(-(2.125 + 2 + 4) / 3)


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
DIFFERENTIABLE = [
    *(("vanilla", "k1"), ("vanilla", "k3"), ("sapo", "abs"), ("gpg", "k2")),
    *(("gspo", "k3"), ("gmpo", "k3"), ("dpo", "k3"), ("dro", "k3")),
]


def random_inputs(logprobs: Tensor) -> LossInputs:
    """Two pairs: advantages 1 and -1."""
    generator = torch.Generator().manual_seed(1)
    old, ref = (-2 * torch.rand(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    correction = torch.rand(4, 5, generator=generator, dtype=torch.float64)
    return pair_inputs(logprobs, old=old, ref=ref, mask=MASK, correction=correction)


def random_logprobs() -> Tensor:
    """Log-ratios from -1.5 to 1.5: inside, above and below the clip, beyond the dual clip."""
    generator = torch.Generator().manual_seed(7)
    old = random_inputs(torch.zeros(4, 5)).old_logprobs
    return (old + 3 * torch.rand(4, 5, generator=generator, dtype=torch.float64) - 1.5).requires_grad_()


@pytest.mark.parametrize(("name", "kl"), DIFFERENTIABLE)
def test_gradient_is_the_derivative(name: str, kl: str) -> None:
    config = actor(clip_ratio_c=2.0, kl_loss_coef=0.3, entropy_coeff=0.2, dpo_beta=0.5)
    current = random_logprobs()
    numeric = central_difference(lambda x: run(random_inputs(x), config, name, kl)[0], current)
    loss, metrics = run(random_inputs(current), config, name, kl)
    (gradient,) = torch.autograd.grad(loss, current)
    torch.testing.assert_close(gradient, numeric, rtol=1e-6, atol=1e-8)
    if name in ("vanilla", "gspo", "gmpo"):
        assert 0 < value(metrics["actor/pg_clipfrac"]) < 1
    assert name != "vanilla" or value(metrics["actor/pg_clipfrac_lower"]) > 0


@pytest.mark.parametrize("name", ["cispo", "gspo_token"])
def test_gradient_is_the_derivative_at_frozen_weights(name: str) -> None:
    """cispo: w A log p. gspo_token: s_t = frozen * exp(logprobs - frozen logprobs)."""
    config, current = actor(clip_ratio_high=0.28), random_logprobs()
    inputs = random_inputs(current)
    log_ratio = (current.detach() - inputs.old_logprobs) * inputs.mask
    mean_ratio = (log_ratio.sum(-1, keepdim=True) / inputs.mask.sum(-1, keepdim=True)).exp()

    def surrogate(logprobs: Tensor) -> Tensor:
        assert inputs.correction is not None
        if name == "cispo":
            terms = -log_ratio.exp().clamp(0, 1.28) * inputs.advantages * logprobs
        else:
            ratio = mean_ratio * (logprobs - current.detach()).exp()
            terms = torch.maximum(-inputs.advantages * ratio, -inputs.advantages * ratio.clamp(0.8, 1.28))
        return (inputs.token_weights * inputs.correction * terms * inputs.mask).sum()

    numeric = central_difference(surrogate, current)
    torch.testing.assert_close(gradient_of(inputs, config, name), numeric, rtol=1e-6, atol=1e-8)


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
    table = make_table([[0.0, 1.0], [1.5, 0.0]])
    assert advantage_estimators.get("preference")(table, config) == [-1.0, 1.0, 1.5, -1.5]
    assert advantage_estimators.get("preference")(make_table([[1.0, 1.0]]), config) == [None, None]
    steps = make_table([[0.5, 1.0]], steps=[[[(0, 1.0), (2, 0.0)], [(1, 1.0)]]])
    assert advantage_estimators.get("step_labels")(steps, config) == [[1.0, 0.0, -1.0], [0.0, 1.0, 0.0]]
