"""What is refused about the critic, before anything starts. Each message names the key and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.bounds import batch_problems
from grpo_megatron.checks.critic import critic_problems
from grpo_megatron.checks.learning_rate import schedule_problems
from grpo_megatron.checks.methods import method_problems
from grpo_megatron.checks.names import name_problems
from grpo_megatron.checks.resume import refusals
from grpo_megatron.config import Config

GAE = {"adv_estimator": "gae"}


def config_of(**sections: Any) -> Config:
    raw = {"model": {"path": "m"}, "data": {"task": "arithmetic"}, "trainer": {"total_training_steps": 10}}
    return Config.model_validate({**raw, **sections})


def problems(**sections: Any) -> list[str]:
    config = config_of(**sections)
    return [
        problem
        for check in (critic_problems, method_problems, name_problems, schedule_problems, batch_problems)
        for problem in check(config)
    ]


def test_ppo_needs_no_key_of_its_own_and_no_group() -> None:
    assert problems(algorithm=GAE, rollout={"n": 1}) == []
    trained = {"lam": 1.0, "lam_alpha": 0.05, "pretrain_steps": 4, "ppo_mini_batch_size": 8, "cliprange_value": None}
    sizes = {"task": "arithmetic", "train_batch_size": 16}
    trainer = {"total_training_steps": 10, "critic_warmup": 9}
    assert problems(algorithm=GAE, critic=trained, data=sizes, trainer=trainer) == []


CASES = {
    "critic of grpo": (
        {"critic": {"lam": 0.5}},
        "critic.lam has no effect: algorithm.adv_estimator='grpo' needs no critic",
    ),
    "optimizer of nothing": ({"critic": {"optim": {"lr": 0.5}}}, "critic.optim has no effect"),
    "warm-up of nothing": ({"trainer": {"critic_warmup": 3}}, "trainer.critic_warmup has no effect"),
    "lambda of grpo": ({"algorithm": {"lam": 0.95}}, "algorithm.lam has no effect"),
    "two lambdas": (
        {"algorithm": {**GAE, "lam": 0.95}, "critic": {"lam_alpha": 0.05}},
        "critic.lam_alpha=0.05 gives each response a lambda by its length",
    ),
    "no step for the policy": (
        {"algorithm": GAE, "trainer": {"total_training_steps": 10, "critic_warmup": 10}},
        "trainer.critic_warmup=10 leaves no step of trainer.total_training_steps=10 to train the policy",
    ),
    "only pretraining": (
        {"algorithm": GAE, "critic": {"pretrain_steps": 12}},
        "critic.pretrain_steps=12 leaves no step",
    ),
    "values of a file": (
        {"algorithm": {**GAE, "source": "file"}, "actor": {"loss_mode": "sft"}},
        "reads responses without rewards",
    ),
    "pairs": (
        {"algorithm": GAE, "actor": {"loss_mode": "dpo", "loss_agg_mode": "seq-mean-token-mean"}},
        "needs pairs",
    ),
    "advantages that come later": (
        {"algorithm": {**GAE, "rollout_correction": {"rollout_rs": "off_policy"}}},
        "rollout_rs=off_policy drops responses of negative advantage",
    ),
    "aggregation": ({"algorithm": GAE, "critic": {"loss_agg_mode": "token-men"}}, "critic.loss_agg_mode: unknown"),
    "mini-batch": (
        {
            "algorithm": GAE,
            "critic": {"ppo_mini_batch_size": 7},
            "data": {"task": "arithmetic", "train_batch_size": 16},
        },
        "critic.ppo_mini_batch_size=7 does not divide data.train_batch_size=16",
    ),
    "warm-up of the rate": (
        {"algorithm": GAE, "critic": {"ppo_epochs": 2, "optim": {"lr_warmup_steps": 20}}},
        "critic.optim.lr_warmup_steps=20 leaves no step at the full rate: the critic's 20 updates; set it to 19 or less",
    ),
    "warm-up of the policy": (
        {
            "algorithm": GAE,
            "actor": {"optim": {"lr_warmup_steps": 6}},
            "trainer": {"total_training_steps": 10, "critic_warmup": 4},
        },
        "trainer.total_training_steps=10 - 4 that train the critic alone; set it to 5 or less",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_the_reason(name: str) -> None:
    sections, message = CASES[name]
    found = problems(**sections)
    assert any(message in problem for problem in found), found
    assert all("; set" in problem or "leave" in problem or "known:" in problem for problem in found), found


def test_a_checkpoint_without_a_critic_cannot_go_on_with_one() -> None:
    new = config_of(algorithm=GAE)
    saved = config_of().model_dump(mode="json")
    found = list(refusals(Path("run/step_000002"), saved, new))
    assert any("grpo -> gae: run/step_000002 has no critic" in problem for problem in found), found
    assert not list(refusals(Path("run/step_000002"), new.model_dump(mode="json"), config_of()))
