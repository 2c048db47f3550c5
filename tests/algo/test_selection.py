"""The 80/20 rule, Clip-Cov and KL-Cov by hand.

Covariances of A = [1, 1, -1, -1, 0] and log pi = [0, -3, -3, 0, -1.5] (means 0 and -1.5): [1.5, -1.5, 1.5, -1.5, 0].
"""

from __future__ import annotations

import pytest
import torch

from grpo_megatron.algo.losses import forward_only_at_zero_advantage, reasons_for_old_pass
from grpo_megatron.algo.selection import EntropyController, select_tokens
from grpo_megatron.checks.methods import method_problems
from grpo_megatron.config import AlgorithmConfig, Config
from grpo_megatron.config.problems import KEY_MARK
from tests.algo.inputs import CLIP, RATIOS, SIGNS, actor, central_difference, gradient_of, ratio_inputs, run, value

PAIRS = torch.tensor([[1, 1, -1, -1, 0], [0, -3, -3, 0, -1.5]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("kl_cov", {"kl_cov_ratio": 0.2}, [0]),  # of equal ones the first
        ("kl_cov", {"kl_cov_ratio": 0.4}, [0, 2]),
        ("kl_cov", {"kl_cov_ratio": 1e-9}, [0]),  # at least one
        ("clip_cov", {"clip_cov_ratio": 0.4, "clip_cov_lb": -2.0, "clip_cov_ub": 1.0}, [1, 3]),  # of 1, 3, 4
        ("clip_cov", {"clip_cov_ratio": 1.0, "clip_cov_lb": 1.0}, [0, 2]),
        ("clip_cov", {"clip_cov_ratio": 1.0, "clip_cov_lb": 1.5}, []),
    ],
)
def test_covariances(kind: str, config: dict[str, float], expected: list[int]) -> None:
    chosen = select_tokens(kind, PAIRS, actor(loss_mode=kind, **config))
    assert chosen.nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize(("share", "expected"), [(0.2, [2]), (0.21, [1, 2]), (0.6, [1, 2, 3, 4]), (1e-9, [2])])
def test_highest_entropies(share: float, expected: list[int]) -> None:
    entropies = torch.tensor([[0.1, 2, 3, 1, 1]], dtype=torch.float64)  # the third of five: 1, which two have
    chosen = select_tokens("entropy", entropies, actor(top_entropy_quantile=share))
    assert chosen.nonzero()[:, 0].tolist() == expected


def selected(chosen: list[list[float]], ratios: object = RATIOS):  # type: ignore[no-untyped-def]
    inputs = ratio_inputs(ratios, SIGNS)  # type: ignore[arg-type]
    object.__setattr__(inputs, "selected", torch.tensor(chosen, dtype=torch.float64))
    return inputs


CHOSEN = [[0.0, 1, 0, 1], [1, 0, 0, 1]]


def test_losses_of_chosen_tokens() -> None:
    """vanilla's gradients [-1, 0, -.5, -1.25] and [1, 1.5, 0, 0], over 8. KL-Cov: -A rho, and 2 sign(log rho) where chosen."""
    gradients = {
        "clip_cov": [[-1, 0, -0.5, 0], [0, 1.5, 0, 0]],
        "kl_cov": [[-1, -1.5 + 2, -0.5, -1.25 + 2], [1, 1.5, 0.5, 4 + 2]],  # log rho = 0 at the first of row 2
        "vanilla": [[0, 0, 0, -1.25], [1, 0, 0, 0]],  # 80/20: the chosen tokens alone
    }
    for name, expected in gradients.items():
        config = actor(**CLIP, ppo_kl_coef=2.0, top_entropy_quantile=0.2 if name == "vanilla" else 1.0)
        assert (8 * gradient_of(selected(CHOSEN), config, name)).tolist() == [
            pytest.approx(row, abs=1e-12) for row in expected
        ]
        assert value(run(selected(CHOSEN), config, name)[1]["actor/selected_frac"]) == 0.5


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_gradient_is_the_derivative(name: str) -> None:
    ratios = [[1.1, 1.5, 0.5, 1.25], [0.9, 1.5, 0.5, 4]]
    at = selected(CHOSEN, ratios).logprobs

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return run(selected(CHOSEN, (logprobs + 1).exp().tolist()), actor(**CLIP, ppo_kl_coef=2.0), name)[0]

    gradient = gradient_of(selected(CHOSEN, ratios), actor(**CLIP, ppo_kl_coef=2.0), name)
    torch.testing.assert_close(gradient, central_difference(loss, at.detach()), rtol=1e-6, atol=1e-8)


def test_a_choice_needs_the_pass_before_the_update() -> None:
    for more in ({"top_entropy_quantile": 0.2}, {"loss_mode": "clip_cov"}, {"loss_mode": "kl_cov"}):
        assert reasons_for_old_pass(AlgorithmConfig(), actor(**more), 8) == ["tokens are chosen among all of the step"]
    for loss in ("clip_cov", "sft"):
        raw = {"model": {"path": "x"}, "actor": {"loss_mode": loss, "top_entropy_quantile": 0.2}}
        problems = " ".join(map(str, method_problems(Config.model_validate(raw)))).replace(KEY_MARK, "")
        assert "actor.top_entropy_quantile=0.2 has no effect with" in problems


def test_the_bonus_follows_the_entropy() -> None:
    control = EntropyController(
        actor(entropy_coeff=0.1, entropy_target=1.0, entropy_coef_delta=0.02, entropy_coef_max=0.13)
    )
    applied = [control.applied().entropy_coeff]
    for entropy in (0.5, 0.5, 1.0, 2.0, 0.9):
        control.update(entropy)
        applied.append(control.applied().entropy_coeff)
    assert applied == pytest.approx([0, 0.12, 0.13, 0.11, 0, 0.11])  # at 2 off, and down to .09
    for _ in range(9):
        control.update(3.0)
    assert control.coefficient == 0
    assert EntropyController(actor(entropy_coeff=0.1)).applied().entropy_coeff == 0.1
    assert not forward_only_at_zero_advantage(AlgorithmConfig(), actor(entropy_target=1.0))
