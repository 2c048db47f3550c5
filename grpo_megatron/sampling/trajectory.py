"""Trajectory: the turns of one sample over one token sequence, as a state machine without engine and environment.

    begin(answer) -> [request() -> generated(completion) -> answered(answer)] ... -> ended

Token in, token out: the prompt of the next turn is the prompt, the response so far and the observation, as token ids.
Nothing is decoded and encoded again, so the policy trains on exactly the tokens that the engine has seen.

How a trajectory ends, as (status, finish_reason):

    ok, stop             the environment said `done`
    turn_limit, length   its last allowed turn was answered without `done`
    length, length       a turn was cut off, or the observation left no room for one more token
    prompt_length, length    the environment's first messages are longer than a prompt may be; there is no response
    timeout, died, raised, flooded, memory with stop    the environment failed; what was generated before is kept
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_megatron.rollout.engine import Completion, Request, RolloutEngine, StopTexts, stable_hash
from grpo_megatron.types import Turn

FAILURES = ("timeout", "died", "raised", "flooded", "memory")  # of the environment
ENDINGS = ("ok", "turn_limit", "length", "prompt_length", *FAILURES)


@dataclass(frozen=True)
class Answer:
    """The answer of an environment, as tokens: those of the prompt (the first one), or of an observation.

    `status` other than "ok": the environment failed, and `message` says how.
    """

    token_ids: list[int]
    reward: float | None = None  # of the turn
    done: bool = False
    status: str = "ok"
    message: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrajectoryLimits:
    """Lengths in tokens. `response` counts generated and observation tokens."""

    prompt: int
    response: int
    turns: int


@dataclass
class Trajectory:
    """`row` and `environment_seed` are those of the environment's reset; `seed` is that of the first turn's draws."""

    key: str  # different for all trajectories that are played at once
    row: Mapping[str, Any]
    environment_seed: int
    seed: int
    limits: TrajectoryLimits
    temperature: float
    top_p: float
    version: int
    stop: StopTexts | None = None
    stop_token_ids: tuple[int, ...] = ()
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # 0 at observation tokens
    turns: list[Turn] = field(default_factory=list)
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)  # (last token of the turn, its reward)
    metrics: dict[str, float] = field(default_factory=dict)  # the environment's own, summed over the turns
    status: str = "ok"
    finish_reason: str = ""  # "": not ended
    message: str = ""  # why the environment failed

    @property
    def is_over(self) -> bool:
        return bool(self.finish_reason)

    @property
    def num_generated(self) -> int:
        """Turns of the assistant so far."""
        return sum(turn.kind == "assistant" for turn in self.turns)

    @property
    def last_turn(self) -> tuple[int, int] | None:
        """Response tokens [start, end) of the assistant's last turn. None: it has written nothing."""
        return next(((t.start, t.end) for t in reversed(self.turns) if t.kind == "assistant"), None)

    def loss_mask(self) -> list[int]:
        """1 at generated tokens, 0 at those of observations."""
        return [int(turn.kind == "assistant") for turn in self.turns for _ in range(turn.start, turn.end)]

    def begin(self, answer: Answer) -> None:
        """The environment's first messages are the prompt."""
        self.prompt_ids = answer.token_ids
        if answer.status != "ok":
            self._fail(answer)
        elif len(self.prompt_ids) > self.limits.prompt:
            self._end("prompt_length", "length")

    def request(self) -> Request:
        """The next turn: it may fill what is left of the response."""
        number = self.num_generated
        return Request(
            prompt_ids=(*self.prompt_ids, *self.response_ids),
            seed=stable_hash(f"{self.seed}/{number}") if number else self.seed,
            max_tokens=self.limits.response - len(self.response_ids),
            temperature=self.temperature,
            top_p=self.top_p,
            stop_token_ids=self.stop_token_ids,
            stop=self.stop,
        )

    def generated(self, completion: Completion, clock: int) -> None:
        """The engine has finished a turn. A turn that was cut off is not shown to the environment."""
        self._append("assistant", completion.response_ids, completion.logprobs, clock)
        if completion.finish_reason == "length":
            self._end("length", "length")

    def answered(self, answer: Answer, clock: int) -> None:
        """The environment's answer to the last turn."""
        for name, value in answer.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        if answer.status != "ok":
            self._fail(answer)
            return
        if answer.reward is not None:
            self.turn_rewards.append((len(self.response_ids) - 1, answer.reward))
        if answer.done:
            self._end("ok", "stop")
        elif self.num_generated >= self.limits.turns:
            self._end("turn_limit", "length")
        elif len(self.response_ids) + len(answer.token_ids) >= self.limits.response:
            self._end("length", "length")
        else:
            self._append("observation", answer.token_ids, [0.0] * len(answer.token_ids), clock)

    def _append(self, kind: str, token_ids: list[int], logprobs: list[float], clock: int) -> None:
        start = len(self.response_ids)
        self.response_ids += token_ids
        self.logprobs += logprobs
        self.turns.append(Turn(start, len(self.response_ids), kind, self.version, clock))

    def _fail(self, answer: Answer) -> None:
        self.message = answer.message
        self._end(answer.status, "stop")

    def _end(self, status: str, finish_reason: str) -> None:
        self.status, self.finish_reason = status, finish_reason


# -- The driver --------------------------------------------------------------------------------------------------------
# Plays many trajectories of one rollout block at once, on a logical clock. The result does not depend on real time.
#
# One tick is one `engine.poll()`. The answer to a turn that ended at tick s is due at tick s + latency, however fast the
# environment was: a late answer is waited for, an early one waits. If nothing is being generated, the clock jumps to the
# earliest due tick. Hence the requests that meet in the engine depend on tokens only, and delays of tools change no bit.
# Environments work while other trajectories are generated: `latency` ticks are the time that costs nothing.
#
# The trajectories of one tick are answered and submitted in their order in the list. Blocks never wait for each other.


class Answers(Protocol):
    """The environments of one rollout block. Every rank of the block makes the same calls in the same order."""

    def start(self, trajectories: Sequence[Trajectory]) -> None:
        """Ask for the first messages of each. Returns at once."""

    def ask(self, trajectory: Trajectory) -> None:
        """Show the environment the trajectory's last turn. Returns at once."""

    def take(self, trajectories: Sequence[Trajectory]) -> list[Answer]:
        """The answers of these environments, the same on all ranks of the block. Blocks until all have answered."""

    def end(self, trajectories: Sequence[Trajectory]) -> None:
        """Their environments are no longer needed."""


def play(
    trajectories: Sequence[Trajectory], engine: RolloutEngine, answers: Answers, version: int, latency: int
) -> Iterator[list[Trajectory]]:
    """Play every trajectory to its end. Yields after each tick what has ended in it, which is often nothing.

    `version` is that of the engine's weights, `latency` in ticks. If an environment or the engine fails as a whole, no
    request stays in the engine.
    """
    number = {trajectory.key: i for i, trajectory in enumerate(trajectories)}
    assert len(number) == len(trajectories), "the keys of trajectories must differ"
    waiting = dict.fromkeys(range(len(trajectories)), 0)  # number of a trajectory -> tick of its environment's answer
    generating: set[int] = set()
    clock = 0
    answers.start(trajectories)
    try:
        while waiting or generating:
            if not generating:
                clock = max(clock, min(waiting.values()))
            due = [trajectories[i] for i in sorted(waiting) if waiting[i] <= clock]
            _answer(due, answers, clock)
            for trajectory in due:
                del waiting[number[trajectory.key]]
                if not trajectory.is_over:
                    engine.submit(trajectory.key, trajectory.request(), version)
                    generating.add(number[trajectory.key])
            ended = [trajectory for trajectory in due if trajectory.is_over]
            if generating:
                clock += 1
                for key, completion in engine.poll():
                    trajectory = trajectories[number[key]]
                    generating.remove(number[key])
                    trajectory.generated(completion, clock)
                    if trajectory.is_over:
                        ended.append(trajectory)
                    else:
                        answers.ask(trajectory)
                        waiting[number[key]] = clock + latency
            if ended:
                answers.end(ended)
            yield ended
    except BaseException:
        if engine.version == version:  # otherwise the engine itself has failed
            engine.abort([trajectories[i].key for i in sorted(generating)])
        raise


def _answer(due: Sequence[Trajectory], answers: Answers, clock: int) -> None:
    """Take the answers that are due, if there are any."""
    for trajectory, answer in zip(due, answers.take(due) if due else (), strict=True):
        if trajectory.turns:
            trajectory.answered(answer, clock)
        else:
            trajectory.begin(answer)
