"""The correction step on real ranks: the same on one rank and on two, over the loss tokens alone."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_megatron.algo.losses import LossInputs, reasons_for_old_pass
from grpo_megatron.config import ActorConfig, AlgorithmConfig, DataConfig
from grpo_megatron.training.correction import Correction, build_loss
from tests import worlds
from tests.training import correction_ranks

ALGORITHMS = {
    "weights": {},
    "sequence weights": {"rollout_correction": {"rollout_is": "sequence"}},
    "rejection": {"rollout_correction": {"rollout_rs": "token", "rollout_rs_threshold": 1.5}},
    "KL in the reward": {"adv_estimator": "reinforce_plus_plus", "gamma": 0.9, "use_kl_in_reward": True},
    "both": {
        "use_kl_in_reward": True,
        "kl_ctrl": {"kl_coef": 0.5},
        "rollout_correction": {"rollout_is": "sequence", "rollout_rs": "geometric"},
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_do_what_one_does_and_tokens_outside_the_loss_get_nothing(name: str) -> None:
    algorithm = ALGORITHMS[name]
    (alone,) = worlds.run(correction_ranks.correct, 1, num_prompts=4, algorithm=algorithm)
    both = worlds.run(correction_ranks.correct, 2, num_prompts=4, algorithm=algorithm)
    samples = correction_ranks.draw(4, 3)
    assert sorted(row for result in both for row in result["rows"]) == list(range(len(samples)))
    for result in both:
        assert result["token_weights"] == alone["token_weights"]
        assert result["advantages"] == alone["advantages"]
        assert result["metrics"] == pytest.approx(alone["metrics"], rel=1e-6, nan_ok=True)
        for row, columns in result["rows"].items():
            assert columns == alone["rows"][row]
            for t, in_loss in enumerate(samples[row].loss_mask):
                if not in_loss:
                    assert all(values[t] == 0 for values in columns.values())
    assert all(math.isfinite(value) for value in alone["metrics"].values())
    assert ("folded" in alone) == (name in ("weights", "sequence weights"))
    if "folded" in alone:
        for result in (alone, *both):
            assert result["folded"] == {"metrics": result["metrics"], "in the loss": True, "in a dump": True}
    assert alone["metrics"]["training/rollout_logp_diff_max"] < 3  # 1e3 stands outside the loss

    if name == "KL in the reward":  # the mean over samples of the mean of old - ref over their loss tokens
        kl = [
            math.fsum(math.cos(token) - math.sin(token) for token in tokens) / len(tokens)
            for sample in samples
            if (tokens := [t for t, in_loss in zip(sample.response_ids, sample.loss_mask, strict=True) if in_loss])
        ]
        assert alone["metrics"]["actor/reward_kl_penalty"] == pytest.approx(math.fsum(kl) / len(kl), rel=1e-5)

    kept = sum(sum(columns["loss_mask"]) for columns in alone["rows"].values())
    total = sum(sum(sample.loss_mask) for sample in samples)
    assert kept < total if "rollout_rs" in algorithm.get("rollout_correction", {}) else kept == total
    weights = [weight for columns in alone["rows"].values() for weight in columns["token_weights"]]
    assert math.fsum(weights) == pytest.approx(1)  # token-mean over what is kept


@pytest.mark.parametrize("mini_batch", [4, 2])
def test_the_ratio_to_the_engines_probabilities_needs_no_old_ones(mini_batch: int) -> None:
    """`bypass_mode`: rho = pi / mu, here e^(0.5 - 0.25 t). One update per step still measures pi_old against mu."""
    algorithm = AlgorithmConfig(rollout_correction={"bypass_mode": True, "rollout_is": None})  # type: ignore[arg-type]
    actor = ActorConfig(ppo_mini_batch_size=mini_batch, use_kl_loss=False, clip_ratio_c=None)
    step = Correction(algorithm, actor, None, DataConfig(train_batch_size=4))  # type: ignore[arg-type]
    assert reasons_for_old_pass(algorithm, actor, 4) == [] and step.is_folded == (mini_batch == 4)
    logprobs, mask = torch.full((1, 4), -1.0), torch.ones(1, 4, dtype=torch.bool)
    mu = torch.tensor([[-1.5, -1.25, -1.0, -0.75]])
    columns = {"logprobs": logprobs, "entropy": logprobs, "old_logprobs": logprobs, "rollout_logprobs": mu}
    ones = torch.ones(1, 4)
    inputs = LossInputs(**columns, ref_logprobs=None, advantages=ones, mask=mask, token_weights=ones)
    loss, _ = build_loss(actor, algorithm)(inputs)
    assert loss.item() == pytest.approx(-(1.2 + 1.2 + 1.0 + math.exp(-0.25)))  # clipped at 1.2


def test_a_rank_without_a_row_joins_the_exchange_of_kept_tokens() -> None:
    """One trainable sample on two ranks: the second rank has nothing to reject, and must not skip the collective."""
    algorithm = ALGORITHMS["rejection"]
    first, second = worlds.run(correction_ranks.correct, 2, timeout_s=60, num_prompts=1, algorithm=algorithm)
    assert list(first["rows"]) == [0] and second["rows"] == {}
    assert first["token_weights"] == second["token_weights"]
    assert first["num_mini_batches"] == second["num_mini_batches"]
