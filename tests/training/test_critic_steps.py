"""Which lambda the critic's targets have, and which steps update the policy. Targets and plan are stand-ins."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_megatron.config import Config
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.training import beside as critic_module
from grpo_megatron.training.beside import Critic
from tests.algo.tables import make_table
from tests.fakes import LoneMesh


def critic_of(**sections: Any) -> Critic:
    raw = {"model": {"path": "m"}, "algorithm": {"adv_estimator": "gae", "lam": 0.9}, **sections}
    model: Any = SimpleNamespace(
        mesh=LoneMesh(),
        in_use=contextlib.nullcontext,
        set_optimizer=lambda *_, **__: None,
    )
    return Critic(Config.model_validate(raw), model)


def lam_in(critic: Critic, step: int) -> float:
    """That of the value targets in a step."""
    seen: list[float] = []
    batch: Any = SimpleNamespace(rows=[0], values=torch.zeros(1, 1), loss_mask=torch.ones(1, 1, dtype=torch.bool))

    def targets(table: Any, gamma: float, lam: float) -> dict[int, list[float]]:
        seen.append(lam)
        return {}

    with mock.patch.multiple(critic_module, value_targets=targets, explained_variance=lambda *_: None):
        critic.set_returns(step, batch, make_table([[1.0]]), Metrics())
    return seen[0]


def test_targets_have_the_critics_lambda_after_the_pretraining() -> None:
    """VC-PPO: returns (lambda 1) in the first two steps, then `critic.lam`, or `algorithm.lam` where it is not set."""
    critic = critic_of(critic={"lam": 0.5, "pretrain_steps": 2})
    assert [lam_in(critic, step) for step in range(4)] == [1.0, 1.0, 0.5, 0.5]
    assert lam_in(critic_of(), 0) == 0.9


@pytest.mark.parametrize(("warm_up", "pretraining", "first"), [(0, 0, 0), (0, 2, 2), (3, 1, 3)])
def test_the_first_step_that_updates_the_policy(warm_up: int, pretraining: int, first: int) -> None:
    critic = critic_of(critic={"pretrain_steps": pretraining}, trainer={"critic_warmup": warm_up})
    assert [step for step in range(6) if critic.trains_policy(step)] == list(range(first, 6))
