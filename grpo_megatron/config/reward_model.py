"""The sections `reward_model` and `reward_models`: models that score responses."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from grpo_megatron.config.model import OptimConfig
from grpo_megatron.config.section import Count, Section


class ScoringModel(Section):
    """One model. `reward_models` has any number of them, frozen, each under a name of its own."""

    path: Path | None = None  # Hugging Face folder (models/heads/folder.py); null: there is none
    kind: Literal["outcome", "process"] = "outcome"  # one score per response, or one per step
    coefficient: float = Field(1.0, gt=0, le=1e4)  # multiplies its score in the sum (algo/scores.py)
    step_separator: str = Field("\n", min_length=1)  # process: the text that ends a step (data/steps.py)


class RewardModelConfig(ScoringModel):
    """A reward model in the policy's layout. path = null: there is none.

    With algorithm.iteration_steps it learns after every outer iteration (iterative GRPO); without, it is frozen.
    """

    start_iteration: int = Field(0, ge=0)  # in earlier outer iterations, the reward function alone gives the reward
    combine: Literal["replace", "add"] = "replace"  # the sum of all models replaces the function's reward, or is added
    max_pairs_per_group: int | None = Field(4, ge=1)  # (better, worse) pairs among one prompt's samples; null: all
    steps: int = Field(50, ge=1)  # its optimizer steps after each outer iteration
    train_batch_size: Count = 32  # pairs per optimizer step
    replay_ratio: float = Field(0.1, ge=0, lt=1)  # share of these pairs that comes from earlier outer iterations
    history_size: int = Field(2048, ge=1)  # pairs kept for the replay: a uniform sample of all earlier ones
    optim: OptimConfig = OptimConfig()

    def num_updates(self, num_steps: int, iteration_steps: int) -> int:
        """Optimizer steps of a learning reward model in `num_steps` training steps."""
        return num_steps // iteration_steps * self.steps
