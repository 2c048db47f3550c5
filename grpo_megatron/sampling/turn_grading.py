"""TurnGrading: the rewards of trajectories.

An environment with `gives_rewards` grades by itself: the reward is the sum over the turns. Otherwise the reward function
reads the text of the assistant's last turn, and what single turns have earned is added. `Sample.steps` are the function's
steps if it gives some, else what the turns have earned, with the function's reward at the end of the last turn. A
trajectory without a turn, because its environment did not start, cannot be scored (NaN).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.sampling.grading import Grading
from grpo_megatron.types import Sample, Turn


class TurnGrading(Grading):
    """See Grading. `pool` is None where the environment gives the rewards, too."""

    def __init__(self, pool: RewardPool | None, tokenizer: Any, *, gives_rewards: bool) -> None:
        super().__init__(pool, tokenizer)
        self.gives_rewards = gives_rewards
        self._last_turns: list[tuple[Sample, Turn, Sample]] = []  # trajectory, its last turn, that turn as a sample

    def begin(self, rewards: Iterable[str], num_samples: int) -> None:
        """See Grading."""
        self._last_turns = []
        super().begin(rewards, num_samples)

    def add(self, sample: Sample) -> None:
        """See Grading."""
        turn = next((turn for turn in reversed(sample.turns) if turn.kind == "assistant"), None)
        if turn is None:
            return
        if self.gives_rewards:
            sample.reward = math.fsum(reward for _, reward in sample.turn_rewards)
            sample.steps = list(sample.turn_rewards)
            return
        ids = sample.response_ids[turn.start : turn.end]
        alone = replace(sample, response_ids=ids, loss_mask=[], turns=[], turn_rewards=[])
        self._last_turns.append((sample, turn, alone))
        super().add(alone)

    def finish(self) -> str | None:
        """See Grading."""
        problem = super().finish()
        for sample, turn, alone in self._last_turns:
            sample.reward = math.fsum([alone.reward, *(reward for _, reward in sample.turn_rewards)])
            sample.reward_metrics = alone.reward_metrics
            sample.reward_texts, sample.reward_failure = alone.reward_texts, alone.reward_failure
            sample.steps = [(turn.start + token, reward) for token, reward in alone.steps]
            if not sample.steps and sample.turn_rewards:
                parts = dict(sample.turn_rewards)
                parts[turn.end - 1] = parts.get(turn.end - 1, 0.0) + alone.reward
                sample.steps = sorted(parts.items())
        return problem
