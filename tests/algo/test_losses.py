"""Policy losses and their composition: values, gradients and metrics by hand; masks; finite differences.

The clip vector: A = [1, -1, 2], rho = [.5, 1, 1.5], clip .2. Losses max(-A rho, -A clip(rho)): max(-.5, -.8) = -.5;
1; max(-3, -2.4) = -2.4; mean -.6333333. Dual clip 3: A = [1, -1, -4], rho = [.5, 1, 10]: -.5; 1; max(40, 4.8) = 40 ->
min(40, 12) = 12; mean 4.1666667.

The big vector (verl's): rho rows [1, 1.5, .5, 1.25] with A = 1 and [1, 1.5, .5, 4] with A = -1; clip .2 / .28, dual 3.
Row 1: -1, -1.28 (clipped), -.5, -1.25. Row 2: 1, 1.5, max(.5, .8) = .8 (clipped), min(max(4, 1.28), 3) = 3 (dual).
Sum 2.27; / 8 = .28375. d/dlogprob = loss * 1/8 where not clipped, 0 where clipped.

CISPO on it: weights [1, 1.28, .8, 1.25] (without a lower bound .5 for .8) and [1, 1.28, .8, 1.28], gradients -A w / 8;
5 of 8 ratios are outside the bounds, 3 without the lower one. SAPO: -A 4/tau sigmoid(tau (rho - 1)), gradient
-A 4 s (1 - s) rho / 8: at rho = 1.5, tau = 1: s = .6224593, 4 * .2350037 * 1.5 / 8 = .1762528. gpg: -A logprobs.
GSPO: mean log-ratios -.0161344 and .2746436: s = .9839950 and 1.3160614 (the unclipped loss is the larger): (-.9839950
+ 1.3160614) / 2 = .1660396 (the table's digits are float32's); gradients -A s / 8.
GMPO: row 1 log-ratios [0, .28, -.6931472, .2231436], mean -.0475009; row 2 [0, .4054651, -.2, 1.3862944], mean .3979399:
(-.9536096 + 1.4887544) / 2 = .2675724; the tokens at a bound have gradient 0.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, policy_losses, total_loss
from grpo_megatron.config import ActorConfig
from tests.algo.inputs import (
    CLIP,
    RATIOS,
    SIGNS,
    actor,
    central_difference,
    gradient_of,
    make_inputs,
    ratio_inputs,
    run,
    value,
)


def test_clip_vector() -> None:
    inputs = ratio_inputs([[0.5, 1, 1.5]], [[1, -1, 2]])
    config = actor()
    per_token, _ = policy_losses.get("vanilla")(inputs, config)
    assert per_token[0].tolist() == pytest.approx([-0.5, 1, -2.4])
    assert run(inputs, config)[0].item() == pytest.approx(-0.6333333, abs=1e-7)
    # On-policy: every ratio 1, the loss is minus the mean advantage.
    on_policy, metrics = run(ratio_inputs([[1, 1, 1]], [[1, -1, 2]]), config)
    assert on_policy.item() == pytest.approx(-2 / 3)
    assert value(metrics["actor/pg_clipfrac"]) == value(metrics["actor/ppo_kl"]) == 0


def test_dual_clip_vector() -> None:
    inputs = ratio_inputs([[0.5, 1, 10]], [[1, -1, -4]])
    per_token, metrics = policy_losses.get("vanilla")(inputs, actor(clip_ratio_c=3.0))
    assert per_token[0].tolist() == pytest.approx([-0.5, 1, 12])
    assert metrics["actor/pg_clipfrac_lower"].tolist() == [[False, False, True]]
    assert run(inputs, actor(clip_ratio_c=3.0))[0].item() == pytest.approx(4.1666667, abs=1e-7)
    off, _ = policy_losses.get("vanilla")(inputs, actor(clip_ratio_c=None))
    assert off[0].tolist() == pytest.approx([-0.5, 1, 40])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 0.28375),
        ("seq-mean-token-mean", 0.28375),
        ("seq-mean-token-sum", 1.135),
        ("seq-mean-token-sum-norm", 0.28375),
        ("token-sum", 2.27),
    ],
)
def test_big_vector(mode: str, expected: float) -> None:
    config = actor(**CLIP)
    inputs = ratio_inputs(RATIOS, SIGNS, mode=mode)
    loss, metrics = run(inputs, config)
    assert loss.item() == pytest.approx(expected, abs=1e-9)
    assert value(metrics["actor/pg_loss"]) == pytest.approx(expected, abs=1e-9)
    assert value(metrics["actor/pg_clipfrac"]) == 0.25
    assert value(metrics["actor/pg_clipfrac_lower"]) == 0.125
    assert value(metrics["actor/ppo_kl"]) == pytest.approx(-0.1292592, abs=1e-7)  # -mean log rho, log 1.40625^3 / 8
    if mode == "token-mean":
        (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
        assert gradient[0].tolist() == pytest.approx([-0.125, 0, -0.0625, -0.15625])
        assert gradient[1].tolist() == pytest.approx([0.125, 0.1875, 0, 0])


def test_log_ratio_is_clamped_and_reported_unclamped() -> None:
    inputs = make_inputs([[100.0]], old=0.0, advantages=1.0)
    per_token, metrics = policy_losses.get("vanilla")(inputs, actor(clip_ratio_high=1e12))
    assert per_token.item() == pytest.approx(-math.exp(20))
    assert metrics["actor/ppo_kl"].item() == -100
    assert metrics["actor/ratio_clamp_frac"].item() is True


@pytest.mark.parametrize("name", ["sft", "gpg"])
def test_log_likelihood(name: str) -> None:
    inputs = make_inputs([[-1.0, -2.0, -9.0]], advantages=1.0, mask=[[1, 1, 0]])
    loss, _ = run(inputs, actor(), name)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    assert loss.item() == 1.5
    assert gradient.tolist() == [[-0.5, -0.5, 0.0]]
    weighted = make_inputs([[-0.5, -1.0, -1.5]], advantages=[[1, -1, 2]])  # .5 - 1 + 3 = 2.5
    assert run(weighted, actor(), name)[0].item() == pytest.approx(2.5 / 3)


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
    "gpg": ({}, 0.1453939, [-0.125] * 4, [0.125] * 4, None),
    "gspo": ({}, 0.1660396, [-0.1229994] * 4, [0.1645093] * 4, (0, 0)),
    "gspo_token": ({}, 0.1660396, [-0.1229994] * 4, [0.1645093] * 4, (0, 0)),
    "gmpo": (
        {},
        *(0.2675724, [-0.1192012, 0, -0.1192012, -0.1192012], [0.1860943, 0.1860943, 0, 0.1860943], (0.25, 0.375)),
    ),
}  # config, loss, gradients of the two rows, clipped and clipped below


@pytest.mark.parametrize("case", VECTORS)
def test_big_vector_of_other_losses(case: str) -> None:
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
    # Clip vector losses [-.5, 1, -2.4] times w = e^(-1 - mu), mu = [-.5, -1.5, -.8]: sum -.6194980, mean -.2064993.
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


def test_kl_only_loss() -> None:
    # k3 of d = ref - cur = [-1, 0, 1]: 1/e, 0, e - 2; mean 0.3620537, times 0.1.
    inputs = make_inputs([[0.0, -1.0, -2.0]], old=-1.0, ref=-1.0)
    loss, metrics = run(inputs, actor(kl_loss_coef=0.1), kl="low_var_kl")
    assert loss.item() == pytest.approx(0.0362054, abs=1e-7)
    assert value(metrics["actor/kl_loss"]) == pytest.approx(0.3620537, abs=1e-7)
    assert value(metrics["actor/kl_clamp_frac"]) == 0
    # Coefficient 0: a metric only, even where it is infinite.
    infinite = make_inputs([[0.0]], old=0.0, ref=-math.inf)
    assert run(infinite, actor(kl_loss_coef=0.0), kl="k2")[0].item() == 0


def test_entropy_bonus() -> None:
    inputs = make_inputs([[-1.0, -2.0]])  # entropies 0.5 and 2
    loss, metrics = run(inputs, actor(entropy_coeff=0.1))
    assert loss.item() == pytest.approx(-0.125)
    assert value(metrics["actor/entropy_loss"]) == 1.25


@pytest.mark.parametrize(("gap", "coefficient"), [(0.5, 0.8919728), (-0.5, 0.8502851)])
def test_gradient_coefficient_of_grpo(gap: float, coefficient: float) -> None:
    # DeepSeekMath eq. 21 at rho = 1: GC = A + beta (e^gap - 1), gap = ref - current: .8660239 + .04 (e^.5 - 1) =
    # .8919728. With seq-mean-token-mean, d loss / d logprob = -GC / (N_seq n_i): lengths 3 and 1, N_seq 2.
    inputs = make_inputs(
        [[-1.0] * 3] * 2, ref=-1.0 + gap, advantages=0.8660239, mask=[[1, 1, 1], [1, 0, 0]], mode="seq-mean-token-mean"
    )
    loss, _ = run(inputs, actor(kl_loss_coef=0.04), kl="k3")
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    assert gradient[0].tolist() == pytest.approx([-coefficient / 6] * 3, abs=1e-7)
    assert gradient[1].tolist() == pytest.approx([-coefficient / 2, 0, 0], abs=1e-7)


@pytest.mark.parametrize("poison", [math.nan, -math.inf, math.inf, 1e30])
@pytest.mark.parametrize("loss_name", policy_losses.names())
@pytest.mark.parametrize("kl", ["k1", "k3+"])
def test_masked_entries_never_reach_value_or_gradient(poison: float, loss_name: str, kl: str) -> None:
    config = actor(kl_loss_coef=0.1, entropy_coeff=0.1)
    clean = torch.tensor([[-1.0, -2.0], [-1.5, -0.5]], dtype=torch.float64, requires_grad=True)
    signs = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    expected, expected_metrics = run(make_inputs(clean, ref=-2.0, advantages=signs), config, loss_name, kl)
    (expected_gradient,) = torch.autograd.grad(expected, clean)

    def rows(numbers: Tensor) -> Tensor:
        return torch.cat([numbers.expand(2, 2), torch.full((2, 1), poison, dtype=torch.float64)], dim=1)

    def constant(number: float) -> Tensor:
        return rows(torch.tensor(number, dtype=torch.float64))

    leaf = rows(clean.detach()).requires_grad_()
    inputs = make_inputs(
        leaf,
        old=constant(-1),
        rollout=constant(-1),
        ref=constant(-2),
        advantages=rows(signs),
        correction=constant(1),
        mask=[[1, 1, 0]] * 2,
    )
    inputs = replace(inputs, token_weights=constant(0.25))
    loss, metrics = run(inputs, config, loss_name, kl)
    (gradient,) = torch.autograd.grad(loss, leaf)
    # Not to the last bit: torch sums three columns in another order than two.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    assert gradient.tolist() == [pytest.approx([*row.tolist(), 0.0], rel=1e-14) for row in expected_gradient]
    numbers, expected_numbers = ({n: value(m) for n, m in part.items()} for part in (metrics, expected_metrics))
    assert numbers == pytest.approx(expected_numbers, rel=1e-13)


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
    with pytest.raises(AssertionError, match="advantages is"):
        replace(inputs, advantages=torch.zeros(2, 1))


def random_inputs(logprobs: Tensor, seed: int = 1) -> LossInputs:
    """With `random_logprobs`, log-ratios from -1.5 to 1.5: inside, above and below the clip, beyond the dual clip."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 6)
    old, ref = (-2 * torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    correction = torch.rand(shape, generator=generator, dtype=torch.float64)
    return make_inputs(logprobs, old=old, ref=ref, advantages=advantages, correction=correction)


def random_logprobs() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    old = random_inputs(torch.zeros(4, 6)).old_logprobs
    return (old + 3 * torch.rand(4, 6, generator=generator, dtype=torch.float64) - 1.5).requires_grad_()


@pytest.mark.parametrize("kl", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("name", ["vanilla", "sapo", "gpg"])
def test_gradient_is_the_derivative(name: str, kl: str) -> None:
    config = actor(clip_ratio_c=2.0, kl_loss_coef=0.3, entropy_coeff=0.2)
    current = random_logprobs()
    numeric = central_difference(lambda x: run(random_inputs(x), config, name, kl)[0], current)
    (gradient,) = torch.autograd.grad(run(random_inputs(current), config, name, kl)[0], current)
    torch.testing.assert_close(gradient, numeric, rtol=1e-6, atol=1e-8)
    _, metrics = run(random_inputs(current), config, "vanilla", kl)
    assert value(metrics["actor/pg_clipfrac"]) > 0 and value(metrics["actor/pg_clipfrac_lower"]) > 0


def test_gradient_of_cispo_is_the_derivative_at_frozen_weights() -> None:
    config = actor(clip_ratio_high=0.28)
    current = random_logprobs()
    inputs = random_inputs(current)
    weights = (current.detach() - inputs.old_logprobs).exp().clamp(0, 1.28)

    def surrogate(logprobs: Tensor) -> Tensor:
        assert inputs.correction is not None
        terms = -weights * inputs.advantages * logprobs * inputs.correction
        return (inputs.token_weights * terms).sum()

    numeric = central_difference(surrogate, current)
    torch.testing.assert_close(gradient_of(inputs, config, "cispo"), numeric, rtol=1e-6, atol=1e-8)


def test_on_policy_every_ratio_loss_has_the_gradient_of_reinforce() -> None:
    # At ratio 1 nothing is clipped and every surrogate's slope is -A: sapo with any tau, too.
    generator = torch.Generator().manual_seed(3)
    advantages = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    inputs = make_inputs(torch.full((4, 6), -1.0), advantages=advantages)
    expected = gradient_of(inputs, actor(), "gpg")
    for name in ("vanilla", "cispo", "sapo"):
        torch.testing.assert_close(gradient_of(inputs, actor(tau_pos=3.0), name), expected, rtol=1e-12, atol=1e-12)
