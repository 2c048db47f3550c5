"""TrajectoryGenerator: prompts -> trajectories of several turns -> samples with rewards. It replaces Generator where
`rollout.multi_turn.environment` is set.

The prompt of a sample is what its environment's reset gives. The seed of reset is a hash of the run's seed, the draw and
the prompt's uid, so that all samples of a group have the same prompt.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grpo_megatron.config import RolloutConfig
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.engine import RolloutEngine, sample_seed, stable_hash
from grpo_megatron.sampling.assignment import LengthHistory, assign_samples
from grpo_megatron.sampling.generator import Generator, distinct_uids, sample_indices
from grpo_megatron.sampling.turn_grading import TurnGrading
from grpo_megatron.trajectories.answers import EnvironmentAnswers, EnvironmentsLost, Times
from grpo_megatron.trajectories.driver import play
from grpo_megatron.trajectories.trajectory import FAILURES, Trajectory, TrajectoryLimits
from grpo_megatron.types import GREEDY, Prompt, Sample

logger = logging.getLogger(__name__)


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
        max_failed_ratio: float = 1.0,
    ) -> None:
        super().__init__(engine, pool, tokenizer, mesh, rollout, weights_digest, max_failed_ratio=max_failed_ratio)
        self.multi_turn = rollout.multi_turn
        self.answers, self.max_prompt_length = answers, max_prompt_length
        self.grading = TurnGrading(pool, tokenizer, gives_rewards=gives_rewards)

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
        history: LengthHistory | None = None,
        metrics: Metrics,
    ) -> list[Sample]:
        """See Generator; `history` is not read. `max_tokens` bounds generated and observation tokens together."""
        limits = TrajectoryLimits(self.max_prompt_length, max_tokens, self.multi_turn.max_assistant_turns)
        uids = distinct_uids(prompts)
        indices = sample_indices(n, greedy=greedy)
        own = assign_samples(len(prompts), len(indices), self.mesh.num_rollout_blocks)[self.mesh.rollout_block]
        wanted = [(number // len(indices), indices[number % len(indices)]) for number in own]
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
                stop=self.stop,
                stop_token_ids=self.stop_token_ids,
            )
            for p, i in wanted
        ]
        number_of = {trajectory.key: number for number, trajectory in enumerate(trajectories)}
        samples: dict[int, Sample] = {}
        self.grading.begin((prompt.reward for prompt in prompts), len(wanted))
        with metrics.phase("gen"):
            problem = None
            try:
                for ended in play(trajectories, self.engine, self.answers, version, self.multi_turn.latency_ticks):
                    for trajectory in ended:
                        number = number_of[trajectory.key]
                        p, i = wanted[number]
                        samples[number] = self._sample(trajectory, prompts[p], p, i)
                        self.grading.add(samples[number])
                    self.grading.serve()
            except EnvironmentsLost as error:  # every rank must stop
                problem = str(error)
            self.mesh.agree(problem)
        self.record_cache(metrics)
        self._record_times(metrics)
        self._warn_of_failures(trajectories)
        drawn = [samples[number] for number in range(len(trajectories))]
        self.finish_grading(drawn, draw_id, version, metrics)
        if self.mesh.is_block_leader:
            for sample in drawn:
                sample.text = self._transcript(sample)
        return drawn

    def _sample(self, trajectory: Trajectory, prompt: Prompt, prompt_index: int, index: int) -> Sample:
        is_masked = self.multi_turn.failed == "mask" and trajectory.status in FAILURES
        if trajectory.prompt_ids:
            prompt = replace(prompt, prompt_ids=tuple(trajectory.prompt_ids), text=self._decode(trajectory.prompt_ids))
        return Sample(
            prompt=prompt,
            prompt_index=prompt_index,
            index=index,
            response_ids=trajectory.response_ids,
            rollout_logprobs=trajectory.logprobs,
            finish_reason=trajectory.finish_reason,
            version=trajectory.version,
            weights_digest=self.weights_digest(),
            loss_mask=[0] * len(trajectory.response_ids) if is_masked else trajectory.loss_mask(),
            turns=trajectory.turns,
            status=trajectory.status,
            turn_rewards=trajectory.turn_rewards,
            trajectory_metrics=trajectory.metrics,
            reward_failure=trajectory.message,  # kept where nothing can be graded
        )

    def _transcript(self, sample: Sample) -> str:
        """The response as text, turn by turn, with special tokens."""
        parts = [
            f"[{turn.kind}, {turn.end - turn.start} tokens]\n{self._decode(sample.response_ids[turn.start : turn.end])}"
            for turn in sample.turns
        ]
        return "\n".join([*parts, f"[{sample.status}]"])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def _warn_of_failures(self, trajectories: Sequence[Trajectory]) -> None:
        failed = [trajectory for trajectory in trajectories if trajectory.status in FAILURES]
        if failed and self.mesh.is_block_leader:
            counts = Counter(trajectory.status for trajectory in failed)
            logger.warning(
                "%d of %d environments failed (%s); the first: %s",
                len(failed),
                len(trajectories),
                ", ".join(f"{status} {count}" for status, count in counts.items()),
                failed[0].message,
            )

    def _record_times(self, metrics: Metrics) -> None:
        times, self.answers.times = self.answers.times, Times()
        for name, seconds in times.seconds.items():
            metrics.mean(f"timing_s/{name.removesuffix('_seconds')}", seconds, times.calls)
        metrics.max("timing_s/waiting_for_environments", times.waited)
