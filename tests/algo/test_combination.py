"""The sum of rules and models: rewards and step rewards, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.scores import ModelScores, combined, process_scores
from grpo_megatron.config import AlgorithmConfig
from grpo_megatron.types import GroupTable

NAN = math.nan


def table_of(reward: list[float], **columns: Any) -> GroupTable:
    n = len(reward)
    ones = {name: [5] * n for name in ("prompt_length", "response_length")}
    return GroupTable([0] * n, list(range(n)), reward, **ones, truncated=[False] * n, holder=[0] * n, **columns)


def test_scores_replace_the_rule_or_are_added() -> None:
    """Two models with coefficients 2 and 0.5. Penalties of -1 and -3 stay; where no rule is known, there are none."""
    models = [ModelScores([1.0, 2.0, 3.0], 2.0), ModelScores([10.0, 20.0, 40.0], 0.5)]
    table = table_of([9.0, 5.0, NAN], raw_reward=[10.0, 8.0, NAN])
    replaced = combined(table, models, adds_rule=False)
    assert replaced.raw_reward == [2 + 5, 4 + 10, 6 + 20] and replaced.reward == [7 - 1, 14 - 3, 26]
    added = combined(table, models, adds_rule=True)
    assert added.raw_reward[:2] == [17, 22] and added.reward[:2] == [16, 19] and math.isnan(added.reward[2])
    plain = combined(table_of([1.0, NAN, 0.0]), models[:1], adds_rule=False)
    assert plain.reward == [2, 4, 6] and plain.raw_reward == [] and plain.step_rewards == []


def test_a_process_model_gives_probabilities_of_steps() -> None:
    """Log-odds 0, ln 3 and -ln 3 are 1/2, 3/4 and 1/4; far from 0 they are 1 and 0. The score is the smallest."""
    scores = process_scores([[(0, 0.0), (4, math.log(3))], [(2, -math.log(3))], [(1, 800.0), (2, -800.0)], []], 1.0)
    assert scores.steps is not None
    assert [value for row in scores.steps for _, value in row] == pytest.approx([0.5, 0.75, 0.25, 1.0, 0.0])
    assert scores.values[:3] == pytest.approx([0.5, 0.25, 0.0]) and math.isnan(scores.values[3])


def test_step_rewards_are_sums_and_the_last_has_what_is_of_the_whole_response() -> None:
    outcome, process = ModelScores([1.0, 1.0], 3.0), process_scores([[(0, 0.0), (4, 0.0)], [(2, 0.0)]], 0.5)
    table = table_of([10.0, 20.0], step_rewards=[[(1, 7.0), (4, 8.0)], []])
    replaced = combined(table, [outcome, process], adds_rule=False)
    assert replaced.step_rewards == [[(0, 0.25), (4, 0.25 + 3)], [(2, 0.25 + 3)]]
    added = combined(table, [outcome, process], adds_rule=True)
    # the first row's rule gives steps; the second's reward of 20 is of the whole response
    assert added.step_rewards == [[(0, 0.25), (1, 7.0), (4, 8 + 0.25 + 3)], [(2, 0.25 + 3 + 20)]]
    assert added.reward == [10 + 3 + 0.25, 20 + 3 + 0.25]
    assert combined(table, [outcome], adds_rule=True).step_rewards == table.step_rewards
    assert combined(table, [outcome], adds_rule=False).step_rewards == []


def test_grpo_process_reads_the_models_steps() -> None:
    """Probabilities 3/4, 1/4 and 1/2: mean 1/2, std 1/4. Tokens 0 to 1 get both steps of their response, 2 to 4 the second."""
    process = process_scores([[(1, math.log(3)), (4, -math.log(3))], [(4, 0.0)]], 1.0)
    table = combined(table_of([NAN, NAN]), [process], adds_rule=False)
    config = AlgorithmConfig(adv_estimator="grpo_process")
    first, second = advantage_estimators.get("grpo_process")(table, config)
    assert first == pytest.approx([0, 0, -1, -1, -1], abs=1e-4) and second == pytest.approx([0] * 5, abs=1e-9)
