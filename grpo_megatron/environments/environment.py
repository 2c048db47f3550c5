"""Environment: the protocol of what answers the model's turns. The model writes, `step` answers, until a step is `done`.

To add one, write a subclass and name it in the config: `rollout.multi_turn.environment: my.module:MyEnvironment`. It
runs in a process of its own, so it may block, and one that fails ends its own trajectory only. State is never saved: a
trajectory is continued elsewhere by its seed and the completions so far, which must lead to the same state.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from grpo_megatron.data.images import DATA_URI, sent_message
from grpo_megatron.processes.pool import FloodedError
from grpo_megatron.processes.process import (
    MAX_REWARD,
    by_metric_name,
    describe,
    finite_number,
    limit_memory,
    valid_text,
)
from grpo_megatron.registry import Registry

ChatMessage = dict[str, Any]  # {"role": ..., "content": ...} as chat templates read it; with images: see data/images.py


@dataclass(frozen=True)
class TurnRequest:
    """The request of an environment for the model's next turn. `tools`: shown to the model, by the first messages only.

    `max_tokens` ends the turn, not the trajectory. `stop` are texts of this turn. `prompt`: text or ids instead of
    messages. `branch`: the messages are a full conversation, which does not continue the one so far. `answer`: the model's
    turn before, as the client repeats it. `seed`: is mixed into the run's seed of this turn.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    prompt: str | list[int] | None = None
    branch: bool = False
    answer: ChatMessage | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Step:
    """An environment's answer. `reward` is that of the turn; None: the turn has none. `metrics` are plain numbers."""

    messages: list[ChatMessage]
    reward: float | None = None
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    request: TurnRequest = field(default_factory=TurnRequest)


class Environment(ABC):
    """One trajectory's environment. `reset` and `step` may be coroutines.

    Every trajectory has a process of its own, so module-level state, the working directory and the generators of
    `random` and numpy (seeded with `seed`) belong to it alone.
    """

    # True: `Step.reward` is all the reward there is; no reward function is called
    gives_rewards: ClassVar[bool] = False
    # True: `step` gets a JSON object of the turn: text, token_ids, tokens (as texts), logprobs, finish_reason, prompt_tokens
    reads_turns: ClassVar[bool] = False
    # True: `finish` is called where a limit of the run ends a trajectory, and its Step's reward and metrics count
    finishes: ClassVar[bool] = False
    # trajectories that one process serves one after another: `reset` is called again after the last Step of the one before
    episodes: int = 1

    @classmethod  # noqa: B027 - optional
    def preload(cls, **kwargs: Any) -> None:
        """Loads what all trajectories read, such as an index: called once per worker, before it forks their processes.

        It must start no thread and open no connection: neither survives a fork.
        """

    def tools(self) -> list[dict[str, Any]]:
        """Returns JSON schemas of the tools that the chat template shows to the model."""
        return []

    @abstractmethod
    def reset(
        self, row: Mapping[str, Any], seed: int
    ) -> list[ChatMessage] | Step | Awaitable[list[ChatMessage] | Step]:
        """Returns the first messages, or a Step. `row`: the data file's. Equal `row` and `seed` give an equal start."""

    @abstractmethod
    def step(self, completion: str) -> Step | Awaitable[Step]:
        """Answers what the model wrote in its turn, special tokens included, as text."""

    def finish(self) -> Step | Awaitable[Step]:
        """Grades a trajectory that a limit has ended, where `finishes` is set. A last turn that was cut off is not shown."""
        raise NotImplementedError


environments: Registry[type[Environment]] = Registry(
    "environment",
    [f"grpo_megatron.environments.{name}" for name in ("tool_environment", "command", "folders")],
    "my_module:Class",
)


def environment_class(name: str) -> type[Environment]:
    """Finds the class called `name`: a registered one, or `module:Class` of the user's own.

    Raises ValueError for a name that is no Environment, and whatever the user's module raises.
    """
    entry = environments.get(name)
    if not (isinstance(entry, type) and issubclass(entry, Environment)):
        raise ValueError(f"{name!r} is no subclass of grpo_megatron.environments.environment.Environment; name one")
    return entry


# -- what an environment returned -> plain JSON, after checks: it crosses a pipe, and then a chat template reads it ----

MAX_STEP_METRICS = 64  # a metric is one curve per name
DEEPEST = 64  # lists and objects within each other: whoever walks through a message recurses
MAX_IMAGES = 1 << 23  # characters of all images of one answer, as base64
MAX_STOPS, MAX_STOP = 16, 1000  # texts of one turn; characters of one: each token of the turn is compared with them


@dataclass(frozen=True)
class Outcome:
    """The answer to one `start` or `step`. `step` is None unless `status` is "ok"; `message` then says why.

    status: ok, timeout, died, raised, flooded or memory. seconds: wall-clock time of the call, as its process saw it.
    """

    step: Step | None
    status: str = "ok"
    message: str = ""
    seconds: float = 0.0


def plain_json(value: object, max_characters: int) -> Any:
    """Copies a JSON value, with U+FFFD for lone surrogates. All that clients and environments send passes through here.

    Raises TypeError, ValueError or RecursionError for what is no JSON or deeper than DEEPEST, FloodedError for too much.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(text) > max_characters:
        raise FloodedError(f"the messages, the prompt or the tools have more than {max_characters} characters")
    copied = json.loads(valid_text(text))
    level, depth = [copied], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(f"lists and objects are within each other more than {DEEPEST} deep")
        level = [
            part
            for outer in level
            if isinstance(outer, dict | list)
            for part in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth += 1
    return copied


def plain_messages(messages: object, max_characters: int) -> list[ChatMessage]:
    """Copies `messages`. Raises what `plain_json` raises, and TypeError for what is no message."""
    images = 0
    if not isinstance(messages, list | tuple):
        raise TypeError(f"messages are {type(messages).__name__}, not a list of dicts")
    for message in messages:
        if not isinstance(message, Mapping):
            raise TypeError(f"a message is {type(message).__name__}, not a dict with 'role' and 'content'")
        images += _check_content(message.get("content"))
        if not isinstance(message.get("role"), str):
            raise TypeError(f"a message's 'role' is {type(message.get('role')).__name__}, not a text")
        for call in message.get("tool_calls") or ():
            check_call(call)
    if images > MAX_IMAGES:
        raise FloodedError(f"the images have {images:,} characters in base64, and at most {MAX_IMAGES:,} are read")
    copied: list[ChatMessage] = plain_json([dict(message) for message in messages], max_characters + images)
    return copied


def _check_content(content: object) -> int:
    """Raises TypeError unless a content is a text, or a list of texts and images (data/images.py). Returns images' characters."""
    if isinstance(content, str):
        return 0
    if not isinstance(content, list):
        raise TypeError(f"a message's 'content' is {type(content).__name__}, not a text")
    size = 0
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        value = part.get(kind) if kind in ("text", "image") else None
        if not isinstance(value, str) or (kind == "image" and not value.startswith(DATA_URI)):
            raise TypeError(f"a content part of the type {str(kind)[:80]!r} is no text, and no image that was read")
        size += len(value) if kind == "image" else 0
    return size


def check_call(call: object) -> None:
    """Raises TypeError unless a call in a message is {"function": {"name": text, "arguments": text or object}}."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", {}), str | Mapping)
    ):
        raise TypeError("a message's tool_calls are no list of functions, each with a name and arguments")


def plain_step(step: object, max_characters: int) -> dict[str, Any]:
    """Returns the fields of a Step, checked. Raises what `plain_json` raises."""
    if not isinstance(step, Step):
        raise TypeError(f"step returned {type(step).__name__}, not a Step")
    if not isinstance(step.done, bool) or not isinstance(step.metrics, Mapping):
        types = f"Step.done is {type(step.done).__name__} and Step.metrics {type(step.metrics).__name__}"
        raise TypeError(f"{types}; they must be bool and dict")
    if len(step.metrics) > MAX_STEP_METRICS:
        raise ValueError(f"Step.metrics has {len(step.metrics)} entries; at most {MAX_STEP_METRICS}")
    named = by_metric_name(step.metrics)
    return {
        "messages": plain_messages(step.messages, max_characters),
        "reward": None if step.reward is None else finite_number("Step.reward", step.reward, MAX_REWARD),
        "done": step.done,
        "metrics": {name: finite_number(f"Step.metrics[{name!r}]", value) for name, value in named.items()},
        "request": plain_request(step.request, max_characters),
    }


def plain_request(request: TurnRequest, max_characters: int) -> dict[str, Any]:
    """Returns only what differs from its default, checked. Raises what `plain_json` raises."""
    wanted = {name: value for name, value in vars(request).items() if value != getattr(TurnRequest(), name)}
    types: dict[str, Any] = {"tools": list, "max_tokens": int, "stop": list, "prompt": str | list, "answer": dict}
    types |= {"branch": bool, "seed": int}
    for name, value in wanted.items():
        if not isinstance(value, types[name]):
            raise TypeError(f"TurnRequest.{name} is {type(value).__name__}")
    if (limit := request.max_tokens) is not None and (isinstance(limit, bool) or limit < 1):
        raise ValueError(f"max_tokens={limit!r}: at least 1")
    if isinstance(request.seed, bool):
        raise ValueError(f"seed={request.seed}: no whole number")
    if len(request.stop) > MAX_STOPS or not all(isinstance(t, str) and 0 < len(t) <= MAX_STOP for t in request.stop):
        raise ValueError(f"stop: at most {MAX_STOPS} texts of 1 to {MAX_STOP} characters")
    if not all(isinstance(tool, Mapping) for tool in request.tools):
        raise TypeError("TurnRequest.tools is no list of objects")
    return plain_json(wanted, 2 * max_characters)  # type: ignore[no-any-return]


def read_outcome(answer: Mapping[str, Any], max_characters: int) -> Outcome:
    """Reads the Outcome in an answer of a process. Checked again: the user's code runs there and may change anything."""
    status, seconds = answer["status"], answer["seconds"]
    if status != "ok":
        prefix = "its process " if status == "died" else ""
        limit = " (rollout.multi_turn.timeout_s)" if status == "timeout" else ""
        return Outcome(None, status, valid_text(f"{prefix}{answer['message']}{limit}{answer['output']}"), seconds)
    try:
        value = answer["value"]
        step = Step(**{**value, "request": TurnRequest(**value.get("request", {}))})
        plain = plain_step(step, max_characters)
        return Outcome(Step(**{**plain, "request": TurnRequest(**plain["request"])}), seconds=seconds)
    except Exception as error:  # noqa: BLE001 - of whatever a hostile process has written
        return Outcome(None, "died", f"its process has sent a wrong answer: {describe(error)}", seconds)


def written_turn(
    text: str,
    token_ids: Sequence[int] = (),
    tokens: Sequence[str] = (),
    logprobs: Sequence[float] = (),
    finish_reason: str = "stop",
    prompt_tokens: int = 0,
) -> str:
    """Writes a turn of the model for an environment with `reads_turns`. `prompt_tokens`: those before the turn."""
    turn = {"text": text, "token_ids": [*token_ids], "tokens": [*tokens], "logprobs": [*logprobs]}
    return json.dumps({**turn, "finish_reason": finish_reason, "prompt_tokens": prompt_tokens})


# -- in a process ------------------------------------------------------------------------------------------------------


def open_environments(settings: dict[str, Any]) -> Callable[[], Callable[[dict[str, Any]], Any]]:
    """Opens the program of the hosts (processes/host.py): one process per trajectory. Imports and preloads the class.

    request {"start": ROW, "seed": 7, "completions": [...]} or {"step": COMPLETION}; value: the fields of a Step. The
    completion null stands for `finish`. Raises ValueError for a name that is no Environment, and whatever the user's module
    or its `preload` raises.
    """
    environment = environment_class(settings["name"])
    environment.preload(**settings["kwargs"])

    def open_session() -> Callable[[dict[str, Any]], Any]:
        limit_memory(settings["memory_bytes"])
        return _Session(environment, settings)

    return open_session


class _Session:
    """One trajectory's environment and its answers. `reusable`: it can begin another one (processes/host.py)."""

    def __init__(self, environment: type[Environment], settings: dict[str, Any]) -> None:
        self._class, self._kwargs, self._max_characters = environment, settings["kwargs"], settings["max_characters"]
        self._environment: Environment | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._episode, self.reusable = 0, False

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers one step; or the last call of a start, which resets and repeats the steps so far."""
        step = self._step(request["step"]) if "step" in request else self._start(request)
        self.reusable = bool(step["done"] and self._environment and self._episode < self._environment.episodes)
        return step

    def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        self._episode += 1
        random.seed(request["seed"])  # two runs of one trajectory get the same numbers
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(request["seed"] % (1 << 32))
        self._environment = self._environment or self._class(**self._kwargs)
        begun = self._call(self._environment.reset(request["start"], request["seed"]))
        step = self._plain(begun if isinstance(begun, Step) else Step(begun))
        for completion in request["completions"]:
            step = self._step(completion)
        return step

    def _step(self, completion: str | None) -> dict[str, Any]:
        assert self._environment is not None
        returned = self._environment.finish() if completion is None else self._environment.step(completion)
        return self._plain(self._call(returned))

    def _plain(self, step: Any) -> dict[str, Any]:
        """Returns the fields of a Step, checked. Reads the images of its messages."""
        if isinstance(step, Step) and isinstance(step.messages, list | tuple):
            step = replace(step, messages=[*map(sent_message, step.messages)])
        return plain_step(step, self._max_characters)

    def _call(self, returned: Any) -> Any:
        """Returns what a method returned, after it has run if it is a coroutine. All run in one event loop."""
        if not inspect.isawaitable(returned):
            return returned
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(returned)
