"""Generator: prompts -> samples -> rewards, for this rollout block's share of them. Of one turn, or of several.

A prompt's samples stay together and share its cached prefix, except where a cut falls (assignment.py). Every request has its
own seed: which block draws it, and when, changes no sample. A block without work takes waiting requests of others
(assignment.py). Each response goes to the reward workers when it is complete, while the others are still drawn.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_megatron.config import DataConfig, RewardConfig, RolloutConfig
from grpo_megatron.data.sampler import rewards_of
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.environments.pool import build_pool
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import rewards
from grpo_megatron.rollout.engine import Completion, Request, RolloutEngine, StopTexts, sample_seed, stable_hash
from grpo_megatron.sampling.answers import EnvironmentAnswers, EnvironmentsLost, Times
from grpo_megatron.sampling.assignment import LengthHistory, assign_samples, stream_shared, token_sums
from grpo_megatron.sampling.grading import Grading, TurnGrading, check_failures
from grpo_megatron.sampling.trajectory import FAILURES, Trajectory, TrajectoryLimits, play
from grpo_megatron.types import BY_MODEL, GREEDY, Prompt, Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Request:
    """The arguments of one `Generator.draw`. Sample number k is response k mod len(indices) to prompt k // len(indices)."""

    prompts: Sequence[Prompt]
    uids: list[str]  # of the prompts, different from each other
    indices: list[int]  # of the responses to one prompt
    draw_id: int
    version: int
    max_tokens: int
    temperature: float
    top_p: float

    def of(self, number: int) -> tuple[int, int]:
        """The place of the prompt and the index of the response."""
        place, i = divmod(number, len(self.indices))
        return place, self.indices[i]


class Generator:
    """Draws and rewards n samples of every prompt, spread over the rollout blocks. Serves training and validation.

    `pool` is None on ranks that are not the leader of their rollout block. `weights_digest` tells what the engine holds.
    """

    shares_work = True  # earlier lengths decide which block draws a sample, and idle blocks take the requests of others

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
        uids: Sequence[str] | None = None,
        history: LengthHistory | None = None,
        metrics: Metrics,
    ) -> list[Sample]:
        """This block's samples, in (prompt, index) order. Collective. Only the block's leader knows their rewards.

        `draw_id` (the step) and the prompt's uid seed the draws. A prompt that is in `prompts` twice gets different
        seeds, unless `uids` says what seeds each prompt's draws. `greedy` adds one greedy response per prompt, with index
        `GREEDY`. `version` is that of the engine's weights. `max_tokens` bounds a response, with the observations of its
        environment. `history` knows how long earlier responses were, and learns how long these are; one of several turns does
        not read it. Raises RankError on every rank when the workers of any rank cannot run at all, or when more than
        `max_failed_ratio` of all ranks' samples get no reward.
        """
        indices = sample_indices(n, greedy=greedy)
        names = distinct_uids(prompts) if uids is None else list(uids)
        wanted = _Request(prompts, names, indices, draw_id, version, max_tokens, temperature, top_p)
        if not self.shares_work:
            history = None
        expected = None if history is None else history.expected(prompts)
        queues = assign_samples(len(prompts), len(indices), self.mesh.num_rollout_blocks, expected)
        samples: dict[int, Sample] = {}
        self.grading.begin((prompt.reward for prompt in prompts), len(queues[self.mesh.rollout_block]))
        with metrics.phase("gen"):
            for finished in self._finished(wanted, queues, metrics):
                for number, sample in finished:
                    samples[number] = sample
                    self.grading.add(sample)
                self.grading.serve()
        self.record_cache(metrics)
        drawn = [samples[number] for number in sorted(samples)]
        if history is not None:
            history.learn(prompts, self._totals(token_sums(drawn, len(prompts))), len(indices))
        self.finish_grading(drawn, draw_id, version, metrics)
        return drawn

    def _finished(
        self, wanted: _Request, queues: list[list[int]], metrics: Metrics
    ) -> Iterator[list[tuple[int, Sample]]]:
        """Yields what this block completes: one list of (number, sample) per engine step. `queues[b]`: the numbers of block b."""

        def request(number: int) -> Request:
            place, index = wanted.of(number)
            seed = sample_seed(self.seed, wanted.draw_id, wanted.uids[place], index)
            return self.request(
                wanted.prompts[place].prompt_ids, index, seed, wanted.max_tokens, wanted.temperature, wanted.top_p
            )

        functions = {prompt.reward for prompt in wanted.prompts} - {"", BY_MODEL}
        is_compared = any(rewards.facts(name).compares for name in functions)
        everything = len(wanted.prompts) * len(wanted.indices)
        capacity = everything if is_compared else self.capacity  # sharing would tear compared groups apart
        for finished in stream_shared(self.engine, queues, request, wanted.version, self.mesh, capacity):
            yield [(number, self._sample(wanted, number, completion)) for number, completion in finished]

    def _sample(self, wanted: _Request, number: int, completion: Completion) -> Sample:
        place, index = wanted.of(number)
        return Sample(
            prompt=wanted.prompts[place],
            prompt_index=place,
            index=index,
            response_ids=completion.response_ids,
            rollout_logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            version=wanted.version,
            weights_digest=self.weights_digest(),
        )

    def request(
        self, prompt_ids: tuple[int, ...], index: int, seed: int, max_tokens: int, temperature: float, top_p: float
    ) -> Request:
        """The engine's request for sample `index`. It ends as all responses of the run do."""
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
        """Wait for the rewards of `samples`, all that this block has drawn. Collective. Raises RankError as `draw` does."""
        with metrics.phase("reward"):  # what is left of the grading
            self.mesh.agree(self.grading.finish())
            what = f"step {version}" if draw_id >= 0 else f"the validation before step {version}"
            known = samples if self.mesh.is_block_leader else []
            check_failures(what, known, self.max_failed_ratio, self.mesh)

    def record_cache(self, metrics: Metrics) -> None:
        """Record the share of prompt tokens that the engine had in its prefix cache."""
        prompt_tokens, cached_tokens = self.engine.cache_statistics()
        metrics.when(self.mesh.is_block_leader).mean(
            "rollout/prefix_cache_hit_rate", float(cached_tokens), float(prompt_tokens)
        )

    def _totals(self, values: list[int]) -> list[int]:
        """Sums over the blocks. Collective."""
        return self.mesh.total(values if self.mesh.is_block_leader else [0] * len(values))


class TrajectoryGenerator(Generator):
    """Draws samples of several turns, where `rollout.multi_turn.environment` is set.

    The prompt of a sample is what its environment's reset gives. The seed of reset is a hash of the run's seed, the draw and
    the prompt's uid, so that all samples of a group have the same prompt. `pool` is also None where the environment gives the
    rewards. `max_prompt_length` is in tokens.
    """

    shares_work = False

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

    def _finished(
        self, wanted: _Request, queues: list[list[int]], metrics: Metrics
    ) -> Iterator[list[tuple[int, Sample]]]:
        """See Generator. Raises RankError on every rank when the environments of any rank are lost."""
        own = queues[self.mesh.rollout_block]
        trajectories = [self._trajectory(wanted, *wanted.of(number)) for number in own]
        number_of = {trajectory.key: number for trajectory, number in zip(trajectories, own, strict=True)}
        problem = None
        try:
            for ended in play(trajectories, self.engine, self.answers, wanted.version, self.multi_turn.latency_ticks):
                numbers = [number_of[trajectory.key] for trajectory in ended]
                yield [(n, self._ended(wanted, n, trajectory)) for n, trajectory in zip(numbers, ended, strict=True)]
        except EnvironmentsLost as error:  # every rank must stop
            problem = str(error)
        self.mesh.agree(problem)
        self._record_times(metrics)
        self._warn_of_failures(trajectories)

    def _trajectory(self, wanted: _Request, place: int, index: int) -> Trajectory:
        draw_id, uid = wanted.draw_id, wanted.uids[place]
        return Trajectory(
            key=json.dumps([draw_id, uid, index]),
            row=wanted.prompts[place].extra["row"],  # type: ignore[arg-type]
            environment_seed=stable_hash(json.dumps(["environment", self.seed, draw_id, uid])),
            seed=sample_seed(self.seed, draw_id, uid, index),
            limits=TrajectoryLimits(self.max_prompt_length, wanted.max_tokens, self.multi_turn.max_assistant_turns),
            temperature=0.0 if index == GREEDY else wanted.temperature,
            top_p=1.0 if index == GREEDY else wanted.top_p,
            version=wanted.version,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
        )

    def _ended(self, wanted: _Request, number: int, trajectory: Trajectory) -> Sample:
        place, index = wanted.of(number)
        prompt = wanted.prompts[place]
        is_masked = self.multi_turn.failed == "mask" and trajectory.status in FAILURES
        if trajectory.prompt_ids:
            prompt = replace(prompt, prompt_ids=tuple(trajectory.prompt_ids), text=self._decode(trajectory.prompt_ids))
        return Sample(
            prompt=prompt,
            prompt_index=place,
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

    def finish_grading(self, samples: Sequence[Sample], draw_id: int, version: int, metrics: Metrics) -> None:
        """See Generator. Also sets the texts of the samples, turn by turn."""
        super().finish_grading(samples, draw_id, version, metrics)
        if self.mesh.is_block_leader:
            for sample in samples:
                sample.text = self._transcript(sample)

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


# -- Parts of a draw ---------------------------------------------------------------------------------------------------


def sample_indices(n: int, *, greedy: bool) -> list[int]:
    """The indices of the responses to one prompt, in order."""
    return [*([GREEDY] if greedy else []), *range(n)]


def distinct_uids(prompts: Sequence[Prompt]) -> list[str]:
    """Each prompt's uid with its number of earlier occurrences in the list."""
    seen: Counter[str] = Counter()
    uids = []
    for prompt in prompts:
        uids.append(f"{prompt.uid}#{seen[prompt.uid]}")
        seen[prompt.uid] += 1
    return uids


def build_generator(
    engine: RolloutEngine,
    weights_digest: Callable[[], str],
    mesh: Mesh,
    tokenizer: Any,
    sections: tuple[RolloutConfig, RewardConfig, DataConfig],
    opened: contextlib.ExitStack,
    *,
    renderer: TurnRenderer | None,
    gives_rewards: bool,
    prompts: Sequence[Sequence[Prompt]],
    components: Sequence[dict[str, Any]],
) -> Generator:
    """The generator of a run, with its worker processes, which `opened` will close.

    `renderer` None: samples of one turn. `gives_rewards`: the environment does. The reward functions of all `prompts` are
    tested here; `components` are those of the composite. Raises RuntimeError when a function fails the test.
    """
    rollout, reward, data = sections
    pool = None
    if mesh.is_block_leader and not gives_rewards:
        pool = RewardPool(reward.num_workers, reward.timeout_s, reward.kwargs, components)
        opened.callback(pool.close)
        pool.self_test(sorted({name for part in prompts for name in rewards_of(part)} - {BY_MODEL}))
    parts = (engine, pool, tokenizer, mesh, rollout, weights_digest)
    if renderer is None:
        return Generator(*parts, max_failed_ratio=reward.max_failed_ratio)
    environments = opened.enter_context(build_pool(rollout.multi_turn)) if mesh.is_block_leader else None
    return TrajectoryGenerator(
        *parts,
        answers=EnvironmentAnswers(environments, renderer, rollout.multi_turn, mesh),
        gives_rewards=gives_rewards,
        max_prompt_length=data.max_prompt_length,
        max_failed_ratio=reward.max_failed_ratio,
    )
