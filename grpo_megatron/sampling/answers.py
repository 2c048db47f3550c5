"""EnvironmentAnswers: the answers of real environments, rendered as token ids, on all ranks of a rollout block.

The leader of the block has the worker processes. It renders the answers that are due and sends the tokens to the other
ranks of the block, which wait for them at the same tick.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_megatron.config import ConfigError, MultiTurnConfig
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.environments.environment import ChatMessage, Outcome, Step
from grpo_megatron.environments.pool import EnvironmentPool
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.processes.pool import KeptProblem
from grpo_megatron.sampling.trajectory import Answer, Trajectory

# -- Truncation of observations ----------------------------------------------------------------------------------------
# Cuts the text of an observation to a number of tokens, before it is rendered: the template's own tokens stay whole.

Side = Literal["left", "middle", "right"]
OMISSION = "..."


def cut_contents(messages: list[ChatMessage], tokenizer: Any, max_tokens: int, side: Side) -> list[ChatMessage]:
    """The messages, with every text content of more than `max_tokens` tokens cut on `side` and `...` in its place."""
    return [
        {**message, "content": shorten(message["content"], tokenizer, max_tokens, side)}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def shorten(text: str, tokenizer: Any, max_tokens: int, side: Side) -> str:
    """`text` if it has at most `max_tokens` tokens; else its first (right), last (left) or outer (middle) tokens.

    The cut is between characters of the text: at the borders of tokens.
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
        messages = cut_contents(step.messages, self.renderer.tokenizer, limit, side)
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
