"""TrajectoryGenerator: prompts -> trajectories of several turns -> samples with rewards. It replaces Generator where
`rollout.multi_turn.environment` is set.

The prompt of a sample is what its environment's reset gives. The seed of reset is a hash of the run's seed, the draw and
the prompt's uid, so that all samples of a group have the same prompt.

Rewards: an environment with `gives_rewards` grades by itself, and a trajectory's reward is the sum over its turns.
Otherwise the reward function reads the text of the last turn of the assistant; what single turns have earned is added. A
trajectory without any turn, because its environment did not start, cannot be scored (NaN).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grpo_megatron.config import RolloutConfig
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rewards.workers.pool import RewardPool
from grpo_megatron.rollout.engine import RolloutEngine, sample_seed, stable_hash
from grpo_megatron.sampling.generator import Generator, distinct_uids, share_of_block
from grpo_megatron.trajectories.answers import EnvironmentAnswers
from grpo_megatron.trajectories.driver import play
from grpo_megatron.trajectories.trajectory import Limits, Trajectory
from grpo_megatron.types import GREEDY, Prompt, Sample

FAILURES = ("timeout", "died", "raised", "flooded", "memory")  # statuses of which the environment is the cause


class TrajectoryGenerator(Generator):
    """See Generator. `pool` is also None where the environment gives the rewards. `max_prompt_length` is in tokens."""

    def __init__(
        self,
        engine: RolloutEngine,
        pool: RewardPool | None,
        tokenizer: Any,
        mesh: Mesh,
        rollout: RolloutConfig,
        weights_digest: Callable[[], str],
        *,
        answers: EnvironmentAnswers,
        gives_rewards: bool,
        max_prompt_length: int,
    ) -> None:
        super().__init__(engine, pool, tokenizer, mesh, rollout.seed, weights_digest)
        self.rollout, self.multi_turn = rollout, rollout.multi_turn
        self.answers, self.gives_rewards, self.max_prompt_length = answers, gives_rewards, max_prompt_length

    def draw(
        self,
        prompts: Sequence[Prompt],
        n: int,
        *,
        draw_id: int,
        version: int,
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        greedy: bool = False,
        metrics: Metrics,
    ) -> list[Sample]:
        """See Generator. `max_tokens` bounds generated and observation tokens together."""
        limits = Limits(self.max_prompt_length, max_tokens, self.multi_turn.max_assistant_turns)
        uids = distinct_uids(prompts)
        wanted = share_of_block(self.mesh, len(prompts), n, greedy=greedy)
        trajectories = [
            Trajectory(
                key=json.dumps([draw_id, uids[p], i]),
                row=prompts[p].extra["row"],  # type: ignore[arg-type]
                environment_seed=stable_hash(json.dumps(["environment", self.seed, draw_id, uids[p]])),
                seed=sample_seed(self.seed, draw_id, uids[p], i),
                limits=limits,
                temperature=0.0 if i == GREEDY else temperature,
                top_p=1.0 if i == GREEDY else top_p,
                version=version,
                stop=tuple(self.rollout.stop),
                stop_token_ids=tuple(self.rollout.stop_token_ids),
            )
            for p, i in wanted
        ]
        with metrics.phase("gen"):
            problem = None
            try:
                play(trajectories, self.engine, self.answers, version, self.multi_turn.latency_ticks)
            except EnvironmentsLost as error:  # every rank must stop
                problem = str(error)
            self.mesh.agree(problem)
        self.answers.record_times(metrics)
        samples = [
            self._sample(prompts[p], p, i, trajectory)
            for (p, i), trajectory in zip(wanted, trajectories, strict=True)
        ]
        self._reward(samples, metrics)
        return samples
