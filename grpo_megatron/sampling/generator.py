"""Generator: prompts -> samples -> rewards, for this rollout block's share of them.

A prompt's samples stay together and share its cached prefix, except where a cut falls (assignment.py). Every request has its
own seed: which block draws it, and when, changes no sample. A block without work takes waiting requests of others
(assignment.py). Each response goes to the reward workers when it is complete, while the others are still drawn.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grpo_megatron.config import RolloutConfig
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import rewards
from grpo_megatron.rollout.engine import Request, RolloutEngine, StopTexts, sample_seed, stable_hash
from grpo_megatron.sampling.answers import EnvironmentAnswers, EnvironmentsLost, Times
from grpo_megatron.sampling.assignment import LengthHistory, assign_samples, stream_shared, token_sums
from grpo_megatron.sampling.grading import Grading, TurnGrading, check_failures
from grpo_megatron.sampling.trajectory import FAILURES, Trajectory, TrajectoryLimits, play
from grpo_megatron.types import BY_MODEL, GREEDY, Prompt, Sample


class Generator:
    """Draws and rewards n samples of every prompt, spread over the rollout blocks. Serves training and validation.

    `pool` is None on ranks that are not the leader of their rollout block. `weights_digest` tells what the engine holds.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        pool: RewardPool | None,
        tokenizer: Any,
        mesh: Mesh,
        rollout: RolloutConfig,
        weights_digest: Callable[[], str],
        *,
        max_failed_ratio: float = 1.0,
    ) -> None:
        self.engine, self.tokenizer, self.mesh, self.seed = engine, tokenizer, mesh, rollout.seed
        self.grading = Grading(pool, tokenizer)
        self.stop = StopTexts(tokenizer, rollout.stop) if rollout.stop else None
        self.stop_token_ids, self.capacity = tuple(rollout.stop_token_ids), rollout.max_num_seqs
        self.weights_digest, self.max_failed_ratio = weights_digest, max_failed_ratio

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
        """This block's samples, in (prompt, index) order. Collective. Only the block's leader knows their rewards.

        `draw_id` (the step) and the prompt's uid seed the draws. A prompt that is in `prompts` twice gets different
        seeds. `greedy` adds one greedy response per prompt, with index `GREEDY`. `version` is that of the engine's
        weights. `history` knows how long earlier responses were, and learns how long these are. Raises RankError on every
        rank when the reward workers of any rank cannot run at all, or when more than `max_failed_ratio` of all ranks'
        samples get no reward.
        """
        indices, uids = sample_indices(n, greedy=greedy), distinct_uids(prompts)
        expected = None if history is None else history.expected(prompts)
        queues = assign_samples(len(prompts), len(indices), self.mesh.num_rollout_blocks, expected)

        def request(number: int) -> Request:
            p, i = number // len(indices), indices[number % len(indices)]
            seed = sample_seed(self.seed, draw_id, uids[p], i)
            return self.request(prompts[p].prompt_ids, i, seed, max_tokens, temperature, top_p)

        compared = any(rewards.facts(name).compares for name in {prompt.reward for prompt in prompts} - {"", BY_MODEL})
        capacity = len(prompts) * len(indices) if compared else self.capacity  # else groups would be torn apart
        samples: dict[int, Sample] = {}
        self.grading.begin((prompt.reward for prompt in prompts), len(queues[self.mesh.rollout_block]))
        with metrics.phase("gen"):
            for finished in stream_shared(self.engine, queues, request, version, self.mesh, capacity):
                for number, completion in finished:
                    p, i = number // len(indices), indices[number % len(indices)]
                    samples[number] = Sample(
                        prompt=prompts[p],
                        prompt_index=p,
                        index=i,
                        response_ids=completion.response_ids,
                        rollout_logprobs=completion.logprobs,
                        finish_reason=completion.finish_reason,
                        version=version,
                        weights_digest=self.weights_digest(),
                    )
                    self.grading.add(samples[number])
                self.grading.serve()
        self.record_cache(metrics)
        drawn = [samples[number] for number in sorted(samples)]
        if history is not None:
            history.learn(prompts, self._totals(token_sums(drawn, len(prompts))), len(indices))
        self.finish_grading(drawn, draw_id, version, metrics)
        return drawn

    def request(
        self, prompt_ids: tuple[int, ...], index: int, seed: int, max_tokens: int, temperature: float, top_p: float
    ) -> Request:
        """Of sample `index`: it ends as all responses of the run do."""
        return Request(
            prompt_ids=prompt_ids,
            seed=seed,
            max_tokens=max_tokens,
            temperature=0.0 if index == GREEDY else temperature,
            top_p=1.0 if index == GREEDY else top_p,
            stop_token_ids=self.stop_token_ids,
            stop=self.stop,
        )

    def finish_grading(self, samples: Sequence[Sample], draw_id: int, version: int, metrics: Metrics) -> None:
        with metrics.phase("reward"):  # what is left of the grading
            self.mesh.agree(self.grading.finish())
            what = f"step {version}" if draw_id >= 0 else f"the validation before step {version}"
            known = samples if self.mesh.is_block_leader else []
            check_failures(what, known, self.max_failed_ratio, self.mesh)

    def _totals(self, values: list[int]) -> list[int]:
        """Sums over the blocks. Collective."""
        return self.mesh.total(values if self.mesh.is_block_leader else [0] * len(values))

    def record_cache(self, metrics: Metrics) -> None:
        prompt_tokens, cached_tokens = self.engine.cache_statistics()
        metrics.when(self.mesh.is_block_leader).mean(
            "rollout/prefix_cache_hit_rate", float(cached_tokens), float(prompt_tokens)
        )


def sample_indices(n: int, *, greedy: bool) -> list[int]:
    """Of the responses to one prompt, in order."""
    return [*([GREEDY] if greedy else []), *range(n)]


def distinct_uids(prompts: Sequence[Prompt]) -> list[str]:
    """Each prompt's uid with its number of earlier occurrences in the list."""
    seen: Counter[str] = Counter()
    uids = []
    for prompt in prompts:
        uids.append(f"{prompt.uid}#{seen[prompt.uid]}")
        seen[prompt.uid] += 1
    return uids


def record_reward_metrics(metrics: Metrics, samples: Sequence[Sample]) -> None:
    """Means of what the reward functions reported besides the reward, and the shares of samples that they failed on."""
    for sample in samples:
        if sample.index == GREEDY:
            continue
        for name, value in sample.reward_metrics.items():
            if name == "ok":
                metrics.mean("reward/failed_ratio", 1.0 - value, 1)
            elif name == "timeout":
                metrics.mean("reward/timeout_ratio", value, 1)
            else:
                metrics.mean(f"reward/{name}/mean", value, 1)


def record_source_metrics(metrics: Metrics, samples: Sequence[Sample]) -> None:
    """For each source: the mean reward, the number of samples, the mean length of responses in tokens."""
    for sample in samples:
        if sample.index == GREEDY:
            continue
        source = sample.prompt.source
        metrics.sum(f"data/source/{source}/samples", 1)
        metrics.mean(f"response_length/source/{source}/mean", len(sample.response_ids), 1)
        if not math.isnan(sample.reward):
            metrics.mean(f"reward/source/{source}/mean", sample.reward, 1)


# -- Several turns -----------------------------------------------------------------------------------------------------
# TrajectoryGenerator: prompts -> trajectories of several turns -> samples with rewards. It replaces Generator where
# `rollout.multi_turn.environment` is set.
#
# The prompt of a sample is what its environment's reset gives. The seed of reset is a hash of the run's seed, the draw and
# the prompt's uid, so that all samples of a group have the same prompt.

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
