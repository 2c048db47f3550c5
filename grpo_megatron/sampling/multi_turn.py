"""Samples of several turns: the answers of real environments as token ids, and the generator that plays with them.

The leader of a rollout block has the worker processes of its environments. It renders the answers that are due and sends the
tokens to the other ranks of the block, which wait for them at the same tick.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from grpo_megatron.config import ConfigError, MultiTurnConfig
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.environments.environment import ChatMessage, Outcome, Step
from grpo_megatron.environments.pool import EnvironmentPool
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.processes.pool import KeptProblem
from grpo_megatron.rollout.engine import stable_hash
from grpo_megatron.sampling.generator import Draws, Generator
from grpo_megatron.sampling.grading import TurnGrading
from grpo_megatron.sampling.trajectory import FAILURES, Answer, Trajectory, TrajectoryLimits, play
from grpo_megatron.types import GREEDY, Sample

Side = Literal["left", "middle", "right"]
OMISSION = "..."
logger = logging.getLogger(__name__)


def shorten(text: str, tokenizer: Any, max_tokens: int, side: Side) -> str:
    """`text` if it has at most `max_tokens` tokens; else its first (right), last (left) or outer (middle) tokens.

    The cut is between characters of the text, at the borders of tokens. Texts are cut before they are rendered: the
    template's own tokens stay whole.
    """
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) <= max_tokens:
        return text
    head = {"right": max_tokens, "middle": (max_tokens + 1) // 2, "left": 0}[side]
    tail = max_tokens - head
    beginning = text[: offsets[head - 1][1]] if head else ""
    end = text[offsets[-tail][0] :] if tail else ""
    return f"{beginning}{OMISSION}{end}"


class EnvironmentsLost(RuntimeError):
    """The worker processes of environments cannot run at all. Raised on all ranks of the block."""


@dataclass
class Times:
    """Wall-clock seconds, which differ between equal runs and are therefore no part of any sample."""

    calls: int = 0  # of reset and step
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by what took them
    waited: float = 0.0  # for environments, while the engine stood still


class EnvironmentAnswers:
    """The `Answers` of real environments. `pool` is None on ranks that are not the leader of their rollout block."""

    def __init__(
        self, pool: EnvironmentPool | None, renderer: TurnRenderer, multi_turn: MultiTurnConfig, mesh: Mesh
    ) -> None:
        self.renderer, self.multi_turn, self.mesh = renderer, multi_turn, mesh
        self.times = Times()
        self._kept = KeptProblem(pool)  # only the leader knows of a problem before `take` tells the others

    def start(self, trajectories: Sequence[Trajectory]) -> None:
        def call(pool: EnvironmentPool) -> None:
            for trajectory in trajectories:
                pool.start(trajectory.key, trajectory.row, trajectory.environment_seed)

        self._kept.attempt(call)

    def ask(self, trajectory: Trajectory) -> None:
        self._kept.attempt(lambda pool: pool.step(trajectory.key, self._text(trajectory)))

    def take(self, trajectories: Sequence[Trajectory]) -> list[Answer]:
        """Waits for the answers of these environments. Raises EnvironmentsLost on all ranks of the block."""
        start = time.perf_counter()
        outcomes = self._kept.attempt(lambda pool: pool.wait([trajectory.key for trajectory in trajectories])) or {}
        self.times.waited += time.perf_counter() - start
        self.times.calls += len(outcomes)
        self.times.seconds["environment_call"] += sum(outcome.seconds for outcome in outcomes.values())
        answers = [self._answer(t, outcomes[t.key]) for t in trajectories if t.key in outcomes]
        answers, problem = self.mesh.block_broadcast((answers, self._kept.text))
        if problem is not None:
            raise EnvironmentsLost(problem)
        return answers

    def end(self, trajectories: Sequence[Trajectory]) -> None:
        self._kept.attempt(lambda pool: pool.end([trajectory.key for trajectory in trajectories]))

    def _answer(self, trajectory: Trajectory, outcome: Outcome) -> Answer:
        if outcome.step is None:
            return Answer([], status=outcome.status, message=outcome.message)
        step = outcome.step
        try:
            token_ids = self._render(trajectory, step)
        except ConfigError as error:  # messages that the template refuses are this environment's fault
            return Answer([], status="raised", message=f"its messages cannot be rendered: {error}")
        metrics = {}
        for name, value in step.metrics.items():
            if name.endswith("_seconds"):
                self.times.seconds[name] += value
            else:
                metrics[name] = value
        return Answer(token_ids, reward=step.reward, done=step.done, metrics=metrics)

    def _render(self, trajectory: Trajectory, step: Step) -> list[int]:
        if not trajectory.turns:
            return self.renderer.prompt(step.messages)
        if step.done:
            return []  # nothing reads it
        limit, side = self.multi_turn.max_tool_response_length, self.multi_turn.tool_response_truncate_side
        messages: list[ChatMessage] = []
        for message in step.messages:
            content = message.get("content")
            if isinstance(content, str):
                message = {**message, "content": shorten(content, self.renderer.tokenizer, limit, side)}
            messages.append(message)
        ended = trajectory.response_ids[-1] == self.renderer.end_of_turn
        return self.renderer.observation(messages, ended_with_eos=ended)

    def _text(self, trajectory: Trajectory) -> str:
        """The last turn as an environment reads it: special tokens included, without the one that ended it."""
        assert trajectory.last_turn is not None
        start, end = trajectory.last_turn
        ids = trajectory.response_ids[start:end]
        if ids[-1] == self.renderer.end_of_turn or ids[-1] in self.renderer.end_token_ids:
            ids = ids[:-1]
        return str(self.renderer.tokenizer.decode(ids, skip_special_tokens=False))


class TrajectoryGenerator(Generator):
    """Draws samples of several turns, where `rollout.multi_turn.environment` is set.

    The prompt of a sample is what its environment's reset gives. The seed of reset is a hash of the run's seed, the draw and
    the prompt's uid, so that all samples of a group have the same prompt. `parts` and `named` are Generator's; `pool` is also
    None where the environment gives the rewards. `max_prompt_length` is in tokens.
    """

    shares_work = False

    def __init__(
        self, *parts: Any, answers: EnvironmentAnswers, gives_rewards: bool, max_prompt_length: int, **named: Any
    ) -> None:
        super().__init__(*parts, **named)
        self.answers, self.max_prompt_length = answers, max_prompt_length
        self.grading = TurnGrading(self.grading.pool, self.tokenizer, gives_rewards=gives_rewards)

    def _finished(self, wanted: Draws, queues: list[list[int]], metrics: Metrics) -> Iterator[list[tuple[int, Sample]]]:
        """See Generator. Raises RankError on every rank when the environments of any rank are lost."""
        own = queues[self.mesh.rollout_block]
        trajectories = [self._trajectory(wanted, number) for number in own]
        number_of = {trajectory.key: number for trajectory, number in zip(trajectories, own, strict=True)}
        problem = None
        try:
            latency = self.answers.multi_turn.latency_ticks
            for ended in play(trajectories, self.engine, self.answers, wanted.version, latency):
                numbers = [number_of[trajectory.key] for trajectory in ended]
                yield [(n, self._ended(wanted, n, trajectory)) for n, trajectory in zip(numbers, ended, strict=True)]
        except EnvironmentsLost as error:  # every rank must stop
            problem = str(error)
        self.mesh.agree(problem)
        times, self.answers.times = self.answers.times, Times()
        for name, seconds in times.seconds.items():
            metrics.mean(f"timing_s/{name.removesuffix('_seconds')}", seconds, times.calls)
        metrics.max("timing_s/waiting_for_environments", times.waited)
        failed = [trajectory for trajectory in trajectories if trajectory.status in FAILURES]
        if failed and self.mesh.is_block_leader:
            counts = Counter(trajectory.status for trajectory in failed)
            kinds = ", ".join(f"{status} {count}" for status, count in counts.items())
            text = "%d of %d environments failed (%s); the first: %s"
            logger.warning(text, len(failed), len(trajectories), kinds, failed[0].message)

    def _trajectory(self, wanted: Draws, number: int) -> Trajectory:
        place, index = wanted.of(number)
        draw_id, uid = wanted.draw_id, wanted.uids[place]
        turns = self.answers.multi_turn.max_assistant_turns
        return Trajectory(
            key=json.dumps([draw_id, uid, index]),
            row=wanted.prompts[place].extra["row"],  # type: ignore[arg-type]
            environment_seed=stable_hash(json.dumps(["environment", self.seed, draw_id, uid])),
            seed=wanted.seed(number),
            limits=TrajectoryLimits(self.max_prompt_length, wanted.max_tokens, turns),
            temperature=0.0 if index == GREEDY else wanted.temperature,
            top_p=1.0 if index == GREEDY else wanted.top_p,
            version=wanted.version,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
        )

    def _ended(self, wanted: Draws, number: int, trajectory: Trajectory) -> Sample:
        place, index = wanted.of(number)
        prompt = wanted.prompts[place]
        is_masked = self.answers.multi_turn.failed == "mask" and trajectory.status in FAILURES
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
        """See Generator. Also sets the texts of the samples, turn by turn, with special tokens."""
        super().finish_grading(samples, draw_id, version, metrics)
        for sample in samples if self.mesh.is_block_leader else ():
            parts = [
                f"[{t.kind}, {t.end - t.start} tokens]\n{self._decode(sample.response_ids[t.start : t.end])}"
                for t in sample.turns
            ]
            sample.text = "\n".join([*parts, f"[{sample.status}]"])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))
