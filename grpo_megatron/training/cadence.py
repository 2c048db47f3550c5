"""Cadence: what happens at which step. Pure functions of the step number, so that all ranks decide the same.

Steps count from 0. "Before step s" means with the weights after s steps. `steps_done` counts completed steps, from 1: after
step s it is s + 1. An outer iteration of iterative GRPO (arXiv:2402.03300, algorithm 1) is `iteration_steps` steps:

    step                     0   1   2 | 3   4   5 | 6 ...          iteration_steps = 3
    renew the reference                  *           *              before the first step of each iteration but the first
    reward model learns              *           *                  after the last step of each iteration
"""

from __future__ import annotations

from grpo_megatron.config import TrainerConfig


class Cadence:
    """`iteration_steps` None: the run has no outer iterations."""

    def __init__(self, trainer: TrainerConfig, iteration_steps: int | None) -> None:
        self.trainer, self.iteration_steps = trainer, iteration_steps

    def validates_before(self, step: int) -> bool:
        """Every `test_freq` steps, and before step 0 if `val_before_train`."""
        if step == 0:
            return self.trainer.val_before_train
        return self.trainer.test_freq > 0 and step % self.trainer.test_freq == 0

    def validates_at_end(self) -> bool:
        """Whether the final weights are validated: in every run that validates at all."""
        return self.trainer.test_freq > 0 or self.trainer.val_before_train

    def saves_after(self, steps_done: int) -> bool:
        """Every `save_freq` steps and after the last one; never if `save_freq` is -1."""
        if self.trainer.save_freq == -1:
            return False
        return steps_done % self.trainer.save_freq == 0 or steps_done == self.trainer.total_training_steps

    def renews_reference_before(self, step: int) -> bool:
        return self.iteration_steps is not None and step > 0 and step % self.iteration_steps == 0

    def reward_model_learns_after(self, step: int) -> bool:
        return self.iteration_steps is not None and (step + 1) % self.iteration_steps == 0

    def iteration_start(self, step: int) -> int:
        """The first step of the outer iteration that holds `step`; 0 without outer iterations."""
        return 0 if self.iteration_steps is None else step - step % self.iteration_steps
