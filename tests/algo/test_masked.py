"""Losses with a mask or a weight as trust region, by hand and by finite differences.

mu = e^-2 = .1353353 everywhere; rho rows [1, 1.5, .5, 1.25] with A = 1 and [1, 1.5, .5, 4] with A = -1. pi - mu = (rho - 1) mu:
0, .0676676, -.0676676, .0338338, and .4060058 at 4. A kept token has gradient -A min(rho, c) / 8.
D(mu, pi) at 1.5: .1353353 * -.4054651 + .8646647 * .0815097 = .0156044; at .5: .0938073 - .0651488 = .0286585; at 1.25 .0043.
D(pi, mu) at 1.5: .2030029 * .4054651 - .7969971 * .0815097 = .0173474; at .5: -.0469036 + .0702458 = .0233422; at 4 above .5.
VESPO: W = .9375: W^2 e^(3 * .0625) = 1.0601633; W = 3: 27 e^-4 = .4945223.
FIPO, half-life 1: sums from the end of [0, .4054651, -.6931472, .2231436]: .2231436, -.5815754, .1146774, .0573387: weights 1.2
(cut), .559 or its bound, 1.1215116, 1.0590144. Row 2 without its last token, whose ratio is above c = 3: 0, -.6931472, .0588915,
.0294457. They multiply the gradients of `vanilla`, [-1, 0, -.5, -1.25] / 8 and [1, 1.5, 0, 0] / 8. DRO adds beta log rho / 8.
"""

from __future__ import annotations

import math

import pytest
import torch

from grpo_megatron.algo.kl import binary_kl
from tests.algo.inputs import CLIP, RATIOS, SIGNS, actor, central_difference, gradient_of, make_inputs, run, value
from tests.algo.test_losses import MASK, random_inputs, random_logprobs

LOG_RATIOS = torch.tensor(RATIOS, dtype=torch.float64).log()
BOTH = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 3.0}
NATS = {"clip_ratio_low": 0.02, "clip_ratio_high": 0.02, "clip_ratio_c": None}
FIPO = {**CLIP, "fipo_decay_rate": 1.0}
VECTORS: dict[str, tuple[dict[str, object], list[float], list[float]]] = {  # config, 8 x gradients of the rows
    "dppo_tv": (BOTH, [-1, 0, -0.5, -1.25], [1, 1.5, 0, 3]),
    "dppo_kl": (NATS, [-1, -1.5, -0.5, -1.25], [1, 1.5, 0, 4]),
    "dppo_kl narrow": ({**NATS, "clip_ratio_high": 0.01}, [-1, 0, -0.5, -1.25], [1, 1.5, 0, 4]),
    "ipo": (BOTH, [-1, 0, 0, -1.25], [1, 0, 0, 0]),
    "icepop": (
        {"clip_ratio_low": 0.4, "clip_ratio_high": 1.0, "clip_ratio_c": None},
        [-1, -1.5, 0, -1.25],
        [1, 1.5, 0, 0],
    ),
    "kpop": (NATS, [-1, -1.5, 0, -1.25], [1, 1.5, 0, 0]),
    "kpop narrow": ({**NATS, "clip_ratio_high": 0.0165}, [-1, 0, 0, -1.25], [1, 0, 0, 0]),
    "vespo": ({}, [-1.0601633] * 4, [0.4945223] * 4),
    "fipo": (FIPO, [-1.0590144, 0, -0.5, -1.5], [1.0298835, 1.5909903, 0, 0]),
    "fipo both sides": (
        {**FIPO, "fipo_clip_high_only": False},
        [-1.0590144, 0, -0.4, -1.5],
        [1.0298835, 1.5909903, 0, 0],
    ),
    "fipo safe": ({**FIPO, "fipo_safety_threshold": 1.2}, [-1.0590144, 0, -0.5, -1.5], [1.0298835, 1.5, 0, 0]),
    "dro": ({"dro_beta": 0.1}, [-1, -0.9594535, -1.0693147, -0.9776856], [1, 1.0405465, 0.9306853, 1.1386294]),
}


@pytest.mark.parametrize("case", VECTORS)
def test_gradients_by_hand(case: str) -> None:
    config, first, second = VECTORS[case]
    inputs = make_inputs(LOG_RATIOS - 2, old=-2.0, advantages=SIGNS)
    gradient = 8 * gradient_of(inputs, actor(**config), case.split()[0])
    assert gradient.tolist() == [pytest.approx(first, abs=1e-6), pytest.approx(second, abs=1e-6)]
    _, metrics = run(inputs, actor(**config), case.split()[0])
    if case == "dppo_tv":
        assert (value(metrics["actor/pg_clipfrac"]), value(metrics["actor/pg_clipfrac_lower"])) == (0.25, 0.125)
    if case == "vespo":
        assert value(metrics["actor/vespo_weight"]) == pytest.approx((1.0601633 + 0.4945223) / 2, abs=1e-6)


def test_binary_kl_is_that_of_two_events() -> None:
    p, q = torch.tensor([0.25, 0.5, 1.0, 0.0]), torch.tensor([0.5, 0.5, 0.5, 0.5])
    expected = [0.25 * math.log(0.5) + 0.75 * math.log(1.5), 0, math.log(2), math.log(2)]
    assert binary_kl(p.log(), q.log()).tolist() == pytest.approx(expected, abs=2e-5)


def frozen(name: str, logp: float, old: float, advantage: float) -> float:
    """The weight of -A log pi at a token, from the definitions."""
    pi, mu, ratio = math.exp(logp), math.exp(old), math.exp(logp - old)
    forward, backward = (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) for p, q in ((pi, mu), (mu, pi)))
    keeps = {
        "dppo_tv": pi - mu <= 0.28 if advantage > 0 else pi - mu >= -0.2,
        "dppo_kl": pi <= mu or backward <= 0.28 if advantage > 0 else pi >= mu or backward <= 0.2,
        "ipo": -0.2 <= pi - mu <= 0.28,
        "icepop": 0.8 <= ratio <= 1.28,
        "kpop": forward <= 0.28 and backward <= 0.2,
    }
    return min(ratio, 3.0) * keeps[name]


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "ipo", "icepop", "kpop"])
def test_gradient_is_the_derivative_at_frozen_masks(name: str) -> None:
    config, current = actor(**CLIP), random_logprobs()
    current = current.detach().clamp(max=-0.05).requires_grad_()
    inputs = random_inputs(current)
    assert inputs.correction is not None
    weights = torch.tensor(
        [
            [frozen(name, *of_token) if keep else 0.0 for *of_token, keep in zip(*of_row, strict=True)]
            for of_row in zip(
                *(t.tolist() for t in (current, inputs.old_logprobs, inputs.advantages)), MASK, strict=True
            )
        ],
        dtype=torch.float64,
    )
    assert 0 < (weights == 0).sum() < weights.numel()
    scale = -inputs.token_weights * inputs.correction * weights * inputs.advantages
    numeric = central_difference(lambda x: (scale * x).sum(), current)
    torch.testing.assert_close(gradient_of(inputs, config, name), numeric, rtol=1e-6, atol=1e-8)


def weight_of_row(name: str, d: list[float], t: int, advantage: float) -> float:
    """The frozen weight of a row's loss token t, from the definitions; `d`: the log-ratios of the row's loss tokens."""
    if name == "vespo":
        k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        return math.exp(k * sum(d) + decay * (1 - math.exp(sum(d))))
    future = sum(x * 2.0 ** -(s - t) for s, x in enumerate(d) if s >= t and x <= math.log(3.0))
    high = 1.0 if advantage < 0 and d[t] > math.log(1.1) else 1.2
    return min(max(math.exp(future), 0.8), high)


@pytest.mark.parametrize("name", ["vespo", "fipo"])
def test_gradient_is_the_derivative_at_frozen_weights(name: str) -> None:
    """FIPO's surrogate is clipped, and so are its weights: to 0.8 and 1.2, or 1 above the safety threshold 1.1."""
    fipo = {"fipo_decay_rate": 1.0, "fipo_clip_high_only": False, "fipo_safety_threshold": 1.1}
    config, current = actor(**CLIP, **(fipo if name == "fipo" else {})), random_logprobs()
    inputs = random_inputs(current)
    assert inputs.correction is not None
    weights = torch.zeros_like(current)
    for row, mask in enumerate(MASK):
        tokens = [token for token, is_in_loss in enumerate(mask) if is_in_loss]
        d = (current - inputs.old_logprobs)[row, tokens].tolist()
        for place, token in enumerate(tokens):
            weights.data[row, token] = weight_of_row(name, d, place, float(inputs.advantages[row, token]))
    assert len(set(weights.flatten().tolist())) > 3
    scale = inputs.token_weights * inputs.correction * weights.detach()

    def surrogate(x: torch.Tensor) -> torch.Tensor:
        ratio, advantages = (x - inputs.old_logprobs).exp(), inputs.advantages
        worst = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
        clipped = torch.where(advantages < 0, torch.minimum(worst, -3.0 * advantages), worst)
        return (scale * (-advantages * x if name == "vespo" else clipped)).sum()

    numeric = central_difference(surrogate, current)
    torch.testing.assert_close(gradient_of(inputs, config, name), numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kl", ["k1", "k3"])
def test_the_unbiased_kl_has_the_gradient_of_the_expectation(kl: str) -> None:
    """Values rho (log pi - log ref) and, for k3, rho (log pi - log ref) of the gradient on log pi. k1: one rho more."""
    config = actor(use_kl_loss=True, kl_loss_coef=0.5, use_unbiased_kl=True)
    current = random_logprobs()
    numeric = central_difference(lambda x: run(random_inputs(x), config, "gpg", kl)[0], current)
    torch.testing.assert_close(gradient_of(random_inputs(current), config, "gpg", kl), numeric, rtol=1e-6, atol=1e-8)
    inputs = make_inputs([[-1.0, -2.0]], old=-1.5, ref=-1.25)
    expected = [r * (d + (kl == "k1")) / 4 for r, d in ((math.exp(0.5), 0.25), (math.exp(-0.5), -0.75))]
    assert gradient_of(inputs, config, "gpg", kl)[0].tolist() == pytest.approx(expected, abs=1e-9)


def test_luspo_is_gspo_times_the_length() -> None:
    inputs = {"advantages": [[1.0] * 3, [-1.0] * 3], "old": -1.1, "mask": [[1, 1, 1], [1, 0, 0]]}
    by_length, by_mean = (
        gradient_of(make_inputs([[-1.0] * 3] * 2, mode=mode, **inputs), actor(), "gspo")  # type: ignore[arg-type]
        for mode in ("seq-mean-token-sum", "seq-mean-token-mean")
    )
    assert by_length[0].tolist() == pytest.approx((3 * by_mean[0]).tolist())
    assert by_length[1].tolist() == pytest.approx(by_mean[1].tolist()) and by_mean[1, 0] > 0
