"""Samples of several turns: trajectories, the answers of environments as token ids, and the generator that plays them.

A trajectory is the turns of one sample over one token sequence, as a state machine without engine and environment:

    begin(answer) -> [request() -> generated(completion) -> answered(answer)] ... -> ended

Token in, token out: the prompt of the next turn is the prompt, the response so far and the observation, as token ids.
Nothing is decoded and encoded again, so the policy trains on exactly the tokens that the engine has read. Where the chat
template shows the earlier turns in another way than they were written, the trajectory goes on in a new sequence.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from grpo_megatron.config import ConfigError, MultiTurnConfig
from grpo_megatron.data.images import flat_message
from grpo_megatron.data.prompts import image_format
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.environments.environment import (
    ChatMessage,
    Environment,
    Outcome,
    Step,
    TurnRequest,
    environment_class,
    written_turn,
)
from grpo_megatron.environments.pool import EnvironmentPool
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.processes.pool import FirstFailure
from grpo_megatron.processes.process import describe
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.engine import (
    FULL,
    Completion,
    Request,
    RolloutEngine,
    StopTexts,
    Truncation,
    continued,
    stable_hash,
)
from grpo_megatron.sampling.generator import Generator, Grading, SamplingRound
from grpo_megatron.types import BRANCH, FAILURES, GREEDY, KeptIds, PromptImage, Sample, Segment, TokenRoutes, Turn

Side = Literal["left", "middle", "right"]
OMISSION = "..."
logger = logging.getLogger(__name__)


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
    max_tokens: int | None = None  # of the next turn
    stop: tuple[str, ...] = ()  # further texts that end the next turn
    branch: bool = False  # `token_ids` are a whole prompt
    seconds: float = 0.0  # of the environment's call
    images: tuple[PromptImage, ...] = ()  # in `token_ids`, whose first token is 0 for them
    seed: int | None = None  # of the next turn, besides the run's


@dataclass(frozen=True)
class TrajectoryLimits:
    """The lengths in tokens. `response` counts generated and observation tokens."""

    prompt: int
    response: int
    turns: int


def hash_of(token_ids: Sequence[int], images: Sequence[PromptImage]) -> int:
    """Returns what tells the context of a turn from others."""
    return stable_hash(str((*token_ids, *(image.digest for image in images))))


@dataclass
class Trajectory:
    """One sample in play.

    `row` and `environment_seed` are those of the environment's reset; `seed` is that of the first turn's samples.

    How a trajectory ends, as (status, finish_reason):

        ok, stop                 the environment said `done`
        turn_limit, stop         its last allowed turn was answered without `done`; nothing was cut off
        length, length           a turn was cut off, or the observation left no room for one more token
        prompt_length, length    the environment's first messages are longer than a prompt may be; there is no response
        timeout, died, raised, flooded, memory with stop    the environment failed; what was generated before stays

    An environment with `finishes` grades also those that end by a limit (turn_limit, length); that it fails in it is the status.

    A chat template may change earlier turns (`rollout.multi_turn.history`), and an agent may begin another conversation
    (environments/openai_api.py). The earlier part is then a branch: a sample of its own with the reward of the trajectory's
    end (algo/plan.py). It has no reward function, no metrics and no part in validation.
    """

    key: str  # different for all trajectories that are played at once
    row: Mapping[str, Any]
    environment_seed: int
    seed: int
    limits: TrajectoryLimits
    temperature: float
    truncation: Truncation
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
    turn_limit: int | None = None  # tokens of the next turn, where the environment set any
    turn_stop: StopTexts | None = None  # its texts; else `stop`
    turn_seed: int | None = None
    last_finish: str = "stop"  # how the last turn ended
    branches: list[Trajectory] = field(default_factory=list)  # the sequences before this one
    routes: TokenRoutes = None  # of prompt and response
    asked_at: float = 0.0  # the wall-clock time of the last request
    kept: list[KeptIds] = field(default_factory=list)  # of each response token; empty: of all
    images: tuple[PromptImage, ...] = ()  # of prompt and observations, in the order of their places
    # Where steps share it (rollout.partial): version -> digest of the weights, and (turn, version, hash of its context)
    digests: dict[int, str] = field(default_factory=dict)
    record: list[tuple[Completion, int, int]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.finish_reason)

    @property
    def num_generated(self) -> int:
        """Turns of the assistant so far, those of the branches included."""
        return sum(turn.kind == "assistant" for part in (*self.branches, self) for turn in part.turns)

    @property
    def last_turn(self) -> tuple[int, int] | None:
        """Response tokens [start, end) of the assistant's last turn. None: it has written nothing."""
        return next(((t.start, t.end) for t in reversed(self.turns) if t.kind == "assistant"), None)

    def loss_mask(self) -> list[int]:
        """Returns 1 at generated tokens, 0 at those of observations."""
        return [int(turn.kind == "assistant") for turn in self.turns for _ in range(turn.start, turn.end)]

    def begin(self, answer: Answer) -> None:
        """Take the environment's first messages as the prompt."""
        self.prompt_ids, self.images = answer.token_ids, answer.images
        if answer.status != "ok":
            self._fail(answer)
        elif len(self.prompt_ids) > self.limits.prompt:
            self._end("prompt_length", "length")

    def request(self) -> Request:
        """Returns the next turn: it may fill what is left of the response."""
        number, room = self.num_generated, self.limits.response - len(self.response_ids)
        self.asked_at = time.perf_counter()
        seed = stable_hash(f"{self.seed}/{number}") if number else self.seed
        return Request(
            prompt_ids=(*self.prompt_ids, *self.response_ids),
            seed=seed if self.turn_seed is None else stable_hash(f"{seed}/{self.turn_seed}"),
            max_tokens=min(room, self.turn_limit or room),
            temperature=self.temperature,
            **vars(self.truncation),
            stop_token_ids=self.stop_token_ids,
            stop=self.turn_stop or self.stop,
            images=self.images,
        )

    def generated(self, completion: Completion, clock: int) -> None:
        """Append the turn that the engine has finished.

        One that has filled the response is not shown to the environment.
        """
        seconds = time.perf_counter() - self.asked_at
        if self.digests:
            self.record.append((completion, self.version, hash_of((*self.prompt_ids, *self.response_ids), self.images)))
        self._append("assistant", completion.response_ids, completion.logprobs, clock, seconds)
        self.kept += completion.kept
        self.routes = continued(self.routes, completion.routes)
        self.last_finish = completion.finish_reason
        if completion.finish_reason == "length" and len(self.response_ids) >= self.limits.response:
            self._end("length", "length")

    def answered(self, answer: Answer, clock: int) -> None:
        """Take the environment's answer to the last turn."""
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
            self._end("turn_limit", "stop")
        elif answer.branch and len(answer.token_ids) < self.limits.prompt + self.limits.response:
            self._branch(answer, clock)
        elif answer.branch or len(self.response_ids) + len(answer.token_ids) >= self.limits.response:
            self._end("length", "length")
        else:
            before = len(self.prompt_ids) + len(self.response_ids)
            self.images += tuple(replace(image, first=before + image.first) for image in answer.images)
            self._append("observation", answer.token_ids, [0.0] * len(answer.token_ids), clock, answer.seconds)

    def finished(self, answer: Answer) -> None:
        """Take the environment's reward for a trajectory that a limit has ended."""
        if answer.status != "ok":
            self._fail(answer)
        elif answer.reward is not None:
            end = self.last_turn[1] if self.last_turn else 0
            self.turn_rewards.append((end - 1, answer.reward))
        for name, value in answer.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    def _branch(self, answer: Answer, clock: int) -> None:
        """Begin another sequence. What a prompt has no room for is an observation."""
        self.branches.append(replace(self, branches=[], metrics={}))
        self.prompt_ids, rest = answer.token_ids[: self.limits.prompt], answer.token_ids[self.limits.prompt :]
        self.response_ids, self.logprobs, self.turns, self.routes, self.turn_rewards = [], [], [], None, []
        self.kept, self.images = [], answer.images
        if rest:
            self._append("observation", rest, [0.0] * len(rest), clock, answer.seconds)

    def _append(self, kind: str, token_ids: list[int], logprobs: list[float], clock: int, seconds: float) -> None:
        start = len(self.response_ids)
        self.response_ids += token_ids
        self.logprobs += logprobs
        self.turns.append(Turn(start, len(self.response_ids), kind, self.version, clock, seconds))
        if kind == "observation" and self.truncation.max_kept:
            self.kept += [np.empty(0, dtype=np.int32)] * len(token_ids)

    def _fail(self, answer: Answer) -> None:
        self.message = answer.message
        self._end(answer.status, "stop")

    def _end(self, status: str, finish_reason: str) -> None:
        self.status, self.finish_reason = status, finish_reason


# -- Answers of environments -------------------------------------------------------------------------------------------


def shorten(text: str, tokenizer: Any, max_tokens: int, side: Side) -> str:
    """Cut `text` to `max_tokens` tokens: its first (right), last (left) or outer (middle) ones.

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


@dataclass
class _History:
    """The conversation of a trajectory, where the template changes earlier turns. `read`: its text, before the last turn."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    images: list[PromptImage]  # without places
    read: str = ""


class EnvironmentsLost(RuntimeError):
    """The worker processes of environments cannot run at all. Raised on all ranks of the replica."""


@dataclass
class Times:
    """The wall-clock seconds, which differ between equal runs and are therefore no part of any sample."""

    calls: int = 0  # of reset and step
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by what took them
    waited: float = 0.0  # for environments, while the engine stood still


class EnvironmentAnswers:
    """The environments of one engine replica. Every rank of the replica makes the same calls in the same order.

    `pool` is None on ranks that are not the leader of their replica.
    """

    def __init__(
        self, pool: EnvironmentPool | None, renderer: TurnRenderer, multi_turn: MultiTurnConfig, mesh: Mesh
    ) -> None:
        self.renderer, self.multi_turn, self.mesh = renderer, multi_turn, mesh
        self.times = Times()
        environment = environment_class(multi_turn.environment) if multi_turn.environment else Environment
        self._reads_turns, self._finishes = environment.reads_turns, environment.finishes
        self._stops: dict[tuple[str, ...], StopTexts] = {}
        self._histories: dict[str, _History] = {}  # of open trajectories
        self._kept = FirstFailure(pool)  # only the leader knows of a problem before `take` tells the others

    def start(self, trajectories: Sequence[Trajectory]) -> None:
        """Ask for the first messages of each. Returns at once."""

        def call(pool: EnvironmentPool) -> None:
            for trajectory in trajectories:
                pool.start(trajectory.key, trajectory.row, trajectory.environment_seed)

        self._kept.attempt(call)

    def ask(self, trajectory: Trajectory) -> None:
        """Show the environment the trajectory's last turn. Returns at once."""
        self._kept.attempt(lambda pool: pool.step(trajectory.key, self._text(trajectory)))

    def ask_to_finish(self, trajectory: Trajectory) -> bool:
        """Have the environment grade what a limit has ended. False: it grades none. Returns at once."""
        if is_graded := self._finishes and trajectory.status in ("turn_limit", "length"):
            self._kept.attempt(lambda pool: pool.step(trajectory.key, None))
        return is_graded

    def take(self, trajectories: Sequence[Trajectory]) -> list[Answer]:
        """Waits for the answers of these environments. Raises EnvironmentsLost on all ranks of the replica."""
        start = time.perf_counter()
        outcomes = self._kept.attempt(lambda pool: pool.wait([trajectory.key for trajectory in trajectories])) or {}
        self.times.waited += time.perf_counter() - start
        self.times.calls += len(outcomes)
        self.times.seconds["environment_call"] += sum(outcome.seconds for outcome in outcomes.values())
        answers = [self._answer(t, outcomes[t.key]) for t in trajectories if t.key in outcomes]
        answers, problem = self.mesh.replica_broadcast((answers, self._kept.text))
        if problem is not None:
            raise EnvironmentsLost(problem)
        for trajectory, answer in zip(trajectories, answers, strict=True):
            own = trajectory.stop.texts if trajectory.stop else ()
            trajectory.turn_limit, trajectory.turn_stop = answer.max_tokens, self._stop((*own, *answer.stop))
            trajectory.turn_seed = answer.seed
        return answers

    def end(self, trajectories: Sequence[Trajectory]) -> None:
        """Release their environments."""
        for trajectory in trajectories:
            self._histories.pop(trajectory.key, None)
        self._kept.attempt(lambda pool: pool.end([trajectory.key for trajectory in trajectories]))

    def _answer(self, trajectory: Trajectory, outcome: Outcome) -> Answer:
        """Returns the outcome as tokens. The wall around a trajectory: nothing that it has sent raises beyond here."""
        if outcome.step is None:
            return Answer([], status=outcome.status, message=outcome.message)
        step, own = outcome.step, trajectory.stop.texts if trajectory.stop else ()
        try:
            token_ids, images, is_branch = self._render(trajectory, step)
            self._stop((*own, *step.request.stop))
        except Exception as error:  # noqa: BLE001 - of the template or the tokenizer
            reason = str(error) if isinstance(error, ConfigError) else describe(error)
            return Answer([], status="raised", message=f"its messages cannot be rendered: {reason}")
        if not token_ids and (not trajectory.turns or is_branch):
            return Answer([], status="raised", message="its first messages, or its prompt, are no token")
        metrics = {}
        for name, value in step.metrics.items():
            if name.endswith("_seconds"):
                self.times.seconds[name] += value
            else:
                metrics[name] = value
        named: dict[str, Any] = {"max_tokens": step.request.max_tokens, "stop": tuple(step.request.stop)}
        named |= {"branch": is_branch, "seconds": outcome.seconds, "images": images, "seed": step.request.seed}
        return Answer(token_ids, step.reward, step.done, metrics=metrics, **named)

    def _render(self, trajectory: Trajectory, step: Step) -> tuple[list[int], tuple[PromptImage, ...], bool]:
        """Returns the tokens of the next turn's prompt that are new, their images, and whether they are a whole one."""
        request, begins = step.request, not trajectory.turns or step.request.branch
        if step.done:
            return [], (), False  # nothing reads it
        if request.prompt is not None:
            return self._raw(request.prompt, is_first=begins), (), request.branch
        messages, images = self._read_images(step.messages)
        if self.renderer.rewrites:
            ids, images, is_branch = self._whole(trajectory, messages, images, request)
        elif begins:
            ids, is_branch = self.renderer.prompt(messages, request.tools), request.branch
        else:
            ended = trajectory.response_ids[-1] == self.renderer.end_of_turn
            ids, is_branch = self.renderer.observation(self._shortened(messages), ended_with_eos=ended), False
        if not images:
            return ids, (), is_branch
        ids, places = image_format(self.renderer.tokenizer).placed(ids, [image.size for image in images])
        return ids, tuple(replace(one, first=first) for one, first in zip(images, places, strict=True)), is_branch

    def _read_images(self, messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], list[PromptImage]]:
        """Returns the messages as a chat template reads them, and their images without places. Raises ValueError."""
        parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
        if not (sources := [part["image"] for part in parts if part["type"] == "image"]):
            return [*map(flat_message, messages)], []
        if (form := image_format(self.renderer.tokenizer)) is None:
            raise ConfigError("they have images, and the model reads none; set a model.path that does (Qwen2.5-VL)")
        for part in parts:
            part.pop("image", None)  # the template reads only that there is one
        return list(messages), list(form.read({"images": sources}, Path(), [-1] * len(sources)))

    def _whole(
        self, trajectory: Trajectory, messages: list[ChatMessage], images: list[PromptImage], request: TurnRequest
    ) -> tuple[list[int], list[PromptImage], bool]:
        """Render the conversation by a template that changes earlier turns. Returns the images of the new tokens, too."""
        if not trajectory.turns or request.branch:
            history = self._histories[trajectory.key] = _History(messages, request.tools, images)
            read, end = "", None
        else:
            history, said = self._histories[trajectory.key], self._last_text(trajectory)
            turn = {"role": "assistant", "content": self.renderer.opening + said}
            history.messages += [request.answer or turn, *self._shortened(messages)]
            history.images = [*history.images, *images]
            last = trajectory.response_ids[-1]
            read, end = history.read + said, last if last in self.renderer.turn_ends else None
        ids, history.read, goes_on = self.renderer.whole(history.messages, history.tools, read, end)
        return ids, images if goes_on else history.images, bool(trajectory.turns) and not goes_on

    def _shortened(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        limit, side = self.multi_turn.max_tool_response_length, self.multi_turn.tool_response_truncate_side
        short: list[ChatMessage] = []
        for message in map(self.renderer.answered, messages):  # before the cut: broken tokens are more tokens
            content = message["content"]
            cut = [
                {**part, "text": shorten(part["text"], self.renderer.tokenizer, limit, side)}
                if "text" in part
                else part
                for part in ([{"text": content}] if isinstance(content, str) else content)
            ]
            short.append({**message, "content": cut[0]["text"] if isinstance(content, str) else cut})
        return short

    def _raw(self, prompt: str | list[int], *, is_first: bool) -> list[int]:
        tokenizer = self.renderer.tokenizer
        if isinstance(prompt, str):
            return list(tokenizer(prompt, add_special_tokens=is_first)["input_ids"])
        if wrong := [token for token in prompt if not (type(token) is int and 0 <= token < len(tokenizer))]:
            raise ConfigError(f"{wrong[0]!r} is no id of a token; the tokenizer has {len(tokenizer)}")
        return prompt

    def _stop(self, texts: tuple[str, ...]) -> StopTexts | None:
        if texts and texts not in self._stops:
            self._stops[texts] = StopTexts(self.renderer.tokenizer, texts)
        return self._stops.get(texts)

    def _last_text(self, trajectory: Trajectory) -> str:
        """Returns the last turn, special tokens included, without the one that ended it."""
        assert trajectory.last_turn is not None
        start, end = trajectory.last_turn
        ids = trajectory.response_ids[start:end]
        written = ids[:-1] if ids[-1] in self.renderer.turn_ends else ids
        return str(self.renderer.tokenizer.decode(written, skip_special_tokens=False))

    def _text(self, trajectory: Trajectory) -> str:
        """Returns the last turn as an environment reads it."""
        text, tokenizer = self._last_text(trajectory), self.renderer.tokenizer
        if not self._reads_turns:
            return text
        assert trajectory.last_turn is not None
        start, end = trajectory.last_turn
        ids = trajectory.response_ids[start:end]
        tokens, before = [tokenizer.decode([token]) for token in ids], len(trajectory.prompt_ids) + start
        return written_turn(text, ids, tokens, trajectory.logprobs[start:end], trajectory.last_finish, before)


# -- The driver --------------------------------------------------------------------------------------------------------
# Plays many trajectories of one engine replica at once, on a logical clock. The result does not depend on real time.
#
# One tick is one `engine.poll()`. The answer to a turn that ended at tick s is due at tick s + latency, however fast the
# environment was: a late answer is waited for, an early one waits. If nothing is being generated, the clock jumps to the
# earliest due tick. Hence the requests that meet in the engine depend on tokens only, and delays of tools change no bit.
# Environments work while other trajectories are generated: `latency` ticks are the time that costs nothing.
#
# The trajectories of one tick are answered and submitted in their order in the list. Replicas never wait for each other.


def play(
    trajectories: Sequence[Trajectory],
    engine: RolloutEngine,
    answers: EnvironmentAnswers,
    version: int,
    latency: int,
    until: Mapping[str, int] | None = None,
) -> Iterator[list[Trajectory]]:
    """Play every trajectory to its end. Yields after each tick what has ended in it, which is often nothing.

    `version` is that of the engine's weights, `latency` in ticks. `until`: key -> number of its turns after which a
    trajectory pauses, when its environment has answered; another call goes on with it. If an environment or the engine fails
    as a whole, no request stays in the engine.
    """
    number = {trajectory.key: i for i, trajectory in enumerate(trajectories)}
    assert len(number) == len(trajectories), "the keys of trajectories must differ"
    new, paused = [t for t in trajectories if not t.prompt_ids], [t for t in trajectories if t.prompt_ids]
    waiting = {number[trajectory.key]: 0 for trajectory in new}  # -> tick of its environment's answer
    generating: set[int] = set()
    clock = 0
    answers.start(new)
    try:
        while waiting or generating or paused:
            if waiting and not generating and not paused:
                clock = max(clock, min(waiting.values()))
            due, graded = [trajectories[i] for i in sorted(waiting) if waiting[i] <= clock], set[str]()
            for trajectory, answer in zip(due, answers.take(due) if due else (), strict=True):
                del waiting[number[trajectory.key]]
                if trajectory.is_over:
                    trajectory.finished(answer)
                    graded.add(trajectory.key)
                elif trajectory.turns:
                    trajectory.answered(answer, clock)
                else:
                    trajectory.begin(answer)
            for trajectory in (*paused, *due):
                if not trajectory.is_over and (until is None or trajectory.num_generated < until[trajectory.key]):
                    engine.submit(trajectory.key, trajectory.request(), version)
                    generating.add(number[trajectory.key])
            paused, ended = [], [trajectory for trajectory in due if trajectory.is_over]
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
            for trajectory in [one for one in ended if one.key not in graded and answers.ask_to_finish(one)]:
                waiting[number[trajectory.key]] = clock + latency
                ended.remove(trajectory)
            if ended:
                answers.end(ended)
            yield ended
    except BaseException:
        if engine.version == version:  # otherwise the engine itself has failed
            engine.abort([trajectories[i].key for i in sorted(generating)])
        raise


# -- The generator -----------------------------------------------------------------------------------------------------


class TrajectoryGenerator(Generator):
    """The generator of samples of several turns, where `rollout.multi_turn.environment` is set.

    The prompt of a sample is what its environment's reset gives. The seed of reset is a hash of the run's seed, the round and
    the prompt's uid, so that all samples of a group have the same prompt. `parts` and `named` are Generator's; `pool` is also
    None where the environment gives the rewards. `max_prompt_length` is in tokens.
    """

    shares_work = False

    def __init__(
        self, *parts: Any, answers: EnvironmentAnswers, gives_rewards: bool, max_prompt_length: int, **named: Any
    ) -> None:
        super().__init__(*parts, **named)
        self.answers, self.max_prompt_length = answers, max_prompt_length
        is_kept = answers.multi_turn.failed == "keep"
        self.grading = TurnGrading(self.grading.pool, self.tokenizer, gives_rewards=gives_rewards, keeps_failed=is_kept)

    def _finished(
        self, wanted: SamplingRound, queues: list[list[int]], metrics: Metrics
    ) -> Iterator[list[tuple[int, Sample]]]:
        """See Generator. Raises RankError on every rank when the environments of any rank are lost."""
        own = queues[self.mesh.engine_replica]
        trajectories = [self.trajectory(wanted, number) for number in own]
        number_of = {trajectory.key: number for trajectory, number in zip(trajectories, own, strict=True)}
        for ended in self.play(trajectories, wanted.version):
            pairs = [(number_of[trajectory.key], trajectory) for trajectory in ended]
            yield [(n, sample) for n, trajectory in pairs for sample in self.samples_of(wanted, n, trajectory)]

    def record_cache(self, metrics: Metrics) -> None:
        """See Generator. Also records what environments took."""
        super().record_cache(metrics)
        times, self.answers.times = self.answers.times, Times()
        for name, seconds in times.seconds.items():
            metrics.mean(f"timing_s/{name.removesuffix('_seconds')}", seconds, times.calls)
        metrics.max("timing_s/waiting_for_environments", times.waited)

    def play(
        self,
        trajectories: Sequence[Trajectory],
        version: int,
        until: Mapping[str, int] | None = None,
        engine: Any = None,
    ) -> Iterator[list[Trajectory]]:
        """Play this replica's trajectories: see the driver's `play`. Collective.

        Raises RankError on every rank when the environments of any rank are lost.
        """
        problem, latency = None, self.answers.multi_turn.latency_ticks
        try:
            yield from play(trajectories, engine or self.engine, self.answers, version, latency, until)
        except EnvironmentsLost as error:  # every rank must stop
            problem = str(error)
        self.mesh.agree(problem)
        failed = [trajectory for trajectory in trajectories if trajectory.status in FAILURES]
        if failed and self.mesh.is_replica_leader:
            counts = Counter(trajectory.status for trajectory in failed)
            kinds = ", ".join(f"{status} {count}" for status, count in counts.items())
            text = "%d of %d environments failed (%s); the first: %s"
            logger.warning(text, len(failed), len(trajectories), kinds, failed[0].message)

    def trajectory(self, wanted: SamplingRound, number: int) -> Trajectory:
        """Returns a trajectory that has not begun."""
        place, index = wanted.of(number)
        round_id, uid = wanted.round_id, wanted.uids[place]
        turns = self.answers.multi_turn.max_assistant_turns
        return Trajectory(
            key=json.dumps([round_id, uid, index]),
            row=wanted.prompts[place].extra["row"],  # type: ignore[arg-type]
            environment_seed=stable_hash(json.dumps(["environment", self.seed, round_id, uid])),
            seed=wanted.seed(number),
            limits=TrajectoryLimits(self.max_prompt_length, wanted.limits[place], turns),
            temperature=0.0 if index == GREEDY else wanted.temperature,
            truncation=FULL if index == GREEDY else wanted.truncation,
            version=wanted.version,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
        )

    def samples_of(self, wanted: SamplingRound, number: int, trajectory: Trajectory) -> list[Sample]:
        """Returns the sample that has the end, and then those of its branches. A greedy response is a baseline only."""
        sample = self._ended(wanted, number, trajectory)
        fate: Any = {"status": trajectory.status, "finish_reason": trajectory.finish_reason}
        parts = [replace(part, **fate) for part in trajectory.branches if sample.index != GREEDY]
        branches = [self._ended(wanted, number, part) for part in parts]
        return [sample, *(replace(one, index=sample.index + b * BRANCH) for b, one in enumerate(branches, start=1))]

    def _ended(self, wanted: SamplingRound, number: int, trajectory: Trajectory) -> Sample:
        place, index = wanted.of(number)
        prompt = wanted.prompts[place]
        if trajectory.prompt_ids:
            ids, images = trajectory.prompt_ids, trajectory.images
            prompt = replace(prompt, prompt_ids=tuple(ids), text=self._decode(ids, images), images=images)
        segments = [
            Segment(turns[0].start, turns[-1].end, version, trajectory.digests[version])
            for version, run in itertools.groupby(trajectory.turns, key=lambda turn: turn.version)
            if trajectory.digests and (turns := list(run))
        ]
        return Sample(
            prompt=prompt,
            prompt_index=place,
            index=index,
            response_ids=trajectory.response_ids,
            rollout_logprobs=trajectory.logprobs,
            finish_reason=trajectory.finish_reason,
            version=segments[0].version if segments else trajectory.version,
            weights_digest=segments[0].weights_digest if segments else self.weights_digest(),
            segments=segments,
            seed=trajectory.seed,
            loss_mask=trajectory.loss_mask(),
            turns=trajectory.turns,
            status=trajectory.status,
            turn_rewards=trajectory.turn_rewards,
            earned=math.fsum(reward for part in trajectory.branches for _, reward in part.turn_rewards),
            trajectory_metrics=trajectory.metrics,
            reward_failure=trajectory.message,  # kept where nothing can be graded
            routes=trajectory.routes,
            kept=trajectory.kept,
        )

    def finish_grading(self, samples: Sequence[Sample], round_id: int, version: int, metrics: Metrics) -> None:
        """See Generator. Also sets the texts of the samples, turn by turn, with special tokens."""
        super().finish_grading([s for s in samples if s.index < BRANCH], round_id, version, metrics)
        ends = {(sample.prompt_index, sample.index): sample.reward for sample in samples}
        for sample in samples:
            if sample.index >= BRANCH:
                sample.reward = ends[sample.prompt_index, sample.index % BRANCH]
        for sample in samples if self.mesh.is_replica_leader else ():
            parts = [
                f"[{turn.kind}, {turn.end - turn.start} tokens]\n{self._turn_text(sample, turn)}"
                for turn in sample.turns
            ]
            sample.text = "\n".join([*parts, f"[{sample.status}]"])

    def _turn_text(self, sample: Sample, turn: Turn) -> str:
        start = len(sample.prompt.prompt_ids) + turn.start
        return self._decode(sample.response_ids[turn.start : turn.end], sample.prompt.images, start)

    def _decode(self, token_ids: Sequence[int], images: Sequence[PromptImage] = (), start: int = 0) -> str:
        """Returns the text of the tokens from place `start` on. An image is one placeholder."""
        hidden = {place - start for one in images for place in range(one.first + 1, one.first + one.num_tokens)}
        shown = [token for place, token in enumerate(token_ids) if place not in hidden]
        return str(self.tokenizer.decode(shown, skip_special_tokens=False))


# -- Rewards of trajectories -------------------------------------------------------------------------------------------
# An environment with `gives_rewards` grades by itself: the reward is the sum over the turns. Otherwise the reward function
# reads the text of the assistant's last turn, and what single turns have earned is added. `Sample.steps` are the function's
# steps if it gives some, else what the turns have earned, with the function's reward at the end of the last turn. A
# trajectory that its environment has failed has no reward (NaN), which takes it out of statistics and loss: what it has
# earned so far says nothing of how it would have ended. With `failed: keep` it has, unless it has no turn.


class TurnGrading(Grading):
    """The grading of trajectories. `pool` is also None where the environment gives the rewards."""

    def __init__(self, pool: RewardPool | None, tokenizer: Any, *, gives_rewards: bool, keeps_failed: bool) -> None:
        super().__init__(pool, tokenizer)
        self.gives_rewards, self.keeps_failed = gives_rewards, keeps_failed
        self._last_turns: list[tuple[Sample, Turn, Sample]] = []  # trajectory, its last turn, that turn as a sample
        self._earlier: defaultdict[tuple[int, int], list[Sample]] = defaultdict(list)  # its other sequences

    def begin(self, rewards: Iterable[str], num_samples: int) -> None:
        """Forget the trajectories of the last round, then begin as `Grading` does."""
        self._last_turns = []
        self._earlier.clear()
        super().begin(rewards, num_samples)

    def add(self, sample: Sample) -> None:
        """Queue the last turn of a complete trajectory, or take the rewards of its environment. Returns at once."""
        turn = next((turn for turn in reversed(sample.turns) if turn.kind == "assistant"), None)
        if sample.status in FAILURES and not self.keeps_failed:
            return
        sample.steps = list(sample.turn_rewards)
        if sample.index >= BRANCH:
            self._earlier[sample.prompt_index, sample.index % BRANCH].append(sample)
        if turn is None or sample.index >= BRANCH:
            return
        if self.gives_rewards:
            sample.reward = math.fsum([sample.earned, *(reward for _, reward in sample.turn_rewards)])
            return
        ids = sample.response_ids[turn.start : turn.end]
        alone = replace(sample, response_ids=ids, loss_mask=[], turns=[], turn_rewards=[])
        self._last_turns.append((sample, turn, alone))
        super().add(alone)

    def finish(self) -> str | None:
        """Wait as `Grading` does, then add the rewards of last turns to those of the other turns."""
        problem = super().finish()
        for sample, turn, alone in self._last_turns:
            sample.reward = math.fsum([alone.reward, sample.earned, *(reward for _, reward in sample.turn_rewards)])
            sample.reward_metrics = alone.reward_metrics
            sample.reward_texts, sample.reward_failure = alone.reward_texts, alone.reward_failure
            sample.steps = [(turn.start + token, reward) for token, reward in alone.steps]
            if sample.steps:
                for earlier in self._earlier[sample.prompt_index, sample.index]:
                    earlier.steps = []
            elif sample.turn_rewards or sample.earned:
                parts = dict(sample.turn_rewards)
                parts[turn.end - 1] = parts.get(turn.end - 1, 0.0) + alone.reward
                sample.steps = sorted(parts.items())
        return problem
