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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.rollout.engine import Completion, Request, StopTexts, stable_hash
from grpo_megatron.types import Turn

FAILURES = ("timeout", "died", "raised", "flooded", "memory")  # of the environment
ENDINGS = ("ok", "turn_limit", "length", "prompt_length", *FAILURES)


@dataclass(frozen=True)
class Answer:
    """What an environment answered, as tokens: those of the prompt (the first one), or of an observation.

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
