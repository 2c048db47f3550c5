"""No reward can overflow in an advantage: each estimator refuses 1e308 by name, and is finite in float32 at the bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo_megatron.algo.advantages import MAX_ABSOLUTE, advantage_estimators
from grpo_megatron.algo.plan import make_plan
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.rewards.reward import MAX_REWARD
from grpo_megatron.types import GroupTable
from tests.algo.tables import make_table, per_token, run

ESTIMATORS = advantage_estimators.names()
IGNORE_REWARDS = ("constant", "rft", "best_worst")  # they compare rewards and compute nothing with them
BY_STD = [(name, by_std) for name in ESTIMATORS for by_std in ((True, False) if name.startswith("grpo") else (True,))]


def table_of(size: float, penalty: float | None = None) -> GroupTable:
    """Rewards of both signs up to `size`, in a response, in single steps and in the greedy response."""
    rewards = [[size, -size, 0.0, size], [-size, -size, size, 0.0]]
    steps = [[[(0, reward), (2, -reward)] for reward in group] for group in rewards]
    penalties = [[[penalty] * 3 for _ in group] for group in rewards] if penalty is not None else None
    table = make_table(rewards, steps=steps, greedy=[-size, size], penalties=penalties)
    return replace(table, values=[[0.5, -0.5, 0.25]] * len(table))


@pytest.mark.parametrize("size", [1e308, -1e308, 1.1e15])
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in IGNORE_REWARDS])
def test_an_estimator_refuses_what_would_overflow(name: str, size: float) -> None:
    with pytest.raises(ValueError, match=r"a reward of -?1(e\+308|\.1e\+15) is too large to compute with"):
        run(table_of(size), name)


@pytest.mark.parametrize(("name", "by_std"), BY_STD)
@pytest.mark.parametrize("penalty", [None, 5e12])  # 5e12: the largest coefficient times the largest KL of a token
def test_at_the_bound_all_is_finite(name: str, by_std: bool, penalty: float | None) -> None:
    table = table_of(MAX_ABSOLUTE, penalty)
    values = per_token(table, run(table, name, norm_adv_by_std_in_grpo=by_std, gamma=0.5))
    numbers = torch.tensor([value for row in values for value in row], dtype=torch.float32)
    assert numbers.isfinite().all() and numbers.square().isfinite().all()
    assert name in ("rft", "best_worst") or any(value != 0 for row in values for value in row)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_plan_refuses_it_for_every_estimator(name: str) -> None:
    algorithm = AlgorithmConfig.model_validate({"adv_estimator": name})
    with pytest.raises(ValueError, match="too large to compute with"):
        make_plan(table_of(1e308), algorithm, ActorConfig(), dp=1, train_batch_size=2, max_response_length=8)


def test_rewards_of_functions_are_bounded_further_below() -> None:
    """So that a penalty or the score of a reward model can be added, and the bound of the table is never met."""
    assert 1000 * MAX_REWARD <= MAX_ABSOLUTE < math.sqrt(3.4e38)
