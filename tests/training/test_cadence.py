"""The step numbers of outer iterations. What the trainer does at them is in test_trainer.py."""

from __future__ import annotations

from grpo_megatron.config import TrainerConfig
from grpo_megatron.training.stopping import Cadence


def test_outer_iterations_of_three_steps() -> None:
    cadence = Cadence(TrainerConfig(), iteration_steps=3)
    assert [cadence.iteration_start(step) for step in range(10)] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]
    assert [step for step in range(10) if cadence.renews_reference_before(step)] == [3, 6, 9]
    assert [step for step in range(10) if cadence.reward_model_learns_after(step)] == [2, 5, 8]


def test_outer_iterations_of_one_step() -> None:
    cadence = Cadence(TrainerConfig(), iteration_steps=1)
    assert [cadence.iteration_start(step) for step in range(3)] == [0, 1, 2]
    assert [step for step in range(3) if cadence.renews_reference_before(step)] == [1, 2]
    assert [step for step in range(3) if cadence.reward_model_learns_after(step)] == [0, 1, 2]


def test_a_run_without_iterations_is_one() -> None:
    cadence = Cadence(TrainerConfig(), iteration_steps=None)
    assert [cadence.iteration_start(step) for step in range(3)] == [0, 0, 0]
    assert not any(cadence.renews_reference_before(step) for step in range(9))
    assert not any(cadence.reward_model_learns_after(step) for step in range(9))
