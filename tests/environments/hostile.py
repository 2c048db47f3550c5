"""Environments that do what they should not: acts of a turn, by name. Any other completion is a guess of the game."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from grpo_megatron.environments.environment import ChatMessage, Step, TurnRequest
from tests.environments.games import Guess


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def _raise(error: BaseException) -> Any:
    raise error


def _spin() -> None:
    sum(range(10**15))  # in C, without a chance for a signal handler or another thread


def _deaf() -> None:
    for number in range(1, 65):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def _flood() -> None:
    while True:
        os.write(1, b"x" * 65536)


def _circular() -> Step:
    message: dict[str, Any] = {"role": "user", "content": ""}
    message["self"] = message
    return Step([message])


def _nested(depth: int) -> Step:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return Step([{"role": "user", "content": "", "calls": value}])


def _write_everywhere() -> None:
    for descriptor in range(3, 200):
        with contextlib.suppress(OSError):
            os.write(descriptor, b'{"key": 0}\n')
    time.sleep(1000)


def _children(count: int) -> None:
    for _ in range(count):
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
    time.sleep(1000)


def _orphan() -> None:
    """Leaves a grandchild that has left its session, with the pipes of the environment open, while its parents are
    gone.
    """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    time.sleep(0.2)
    os._exit(5)


def _daemon() -> Step:
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if pid := os.fork():
            os.write(write, str(pid).encode())
            os._exit(0)
        time.sleep(1000)
    os.wait()
    return Step(_user(os.read(read, 20).decode()))


def _user(content: Any = "", **fields: Any) -> list[ChatMessage]:
    return [{"role": "user", "content": content, **fields}]


FATAL: dict[str, tuple[str, str, Callable[[], Any]]] = {  # act -> (status, part of the message, what it does)
    "hang": ("timeout", "no answer after", lambda: time.sleep(1000)),
    "hang in C": ("timeout", "no answer after", _spin),
    "hang, ignoring signals": ("timeout", "no answer after", _deaf),
    "async that never ends": ("timeout", "no answer after", lambda: asyncio.Event().wait()),
    "exit": ("died", "exit code 0", lambda: os._exit(0)),
    "kill itself": ("died", "signal SIGKILL", lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "segmentation fault": ("died", "signal SIGSEGV", lambda: ctypes.string_at(0)),
    "leave an orphan and exit": ("died", "exit code 5", _orphan),
    "close all files": ("died", "closed its connection", lambda: (os.closerange(0, 1000), time.sleep(1000))),
    "write to all files": ("died", "wrote to its connection", _write_everywhere),
    "sys.exit": ("raised", "SystemExit", lambda: sys.exit(1)),
    "raise": ("raised", "KeyError: 'x'", lambda: {}["x"]),
    "raise without a text": ("raised", "_Unprintable", lambda: _raise(_Unprintable())),
    "raise in a coroutine": ("raised", "ValueError: late", lambda: _late()),
    "allocate": ("memory", "MemoryError", lambda: bytearray(1 << 40)),
    "allocate bit by bit": ("memory", "MemoryError", lambda: [bytearray(1 << 24) for _ in range(1 << 16)]),
    "print without end": ("flooded", "has printed more than", _flood),
    "many processes": ("flooded", "processes; at most", lambda: _children(100)),
    "huge message": ("flooded", "more than 100000 characters", lambda: Step(_user("x" * (1 << 26)))),
    "content that is no text": ("raised", "'content' is int", lambda: Step(_user(7))),
    "no role": ("raised", "'role' is NoneType", lambda: Step([{"content": ""}])),
    "no Step": ("raised", "returned NoneType, not a Step", lambda: None),
    "bytes in a message": ("raised", "not JSON serializable", lambda: Step(_user(data=b"x"))),
    "NaN in a message": ("raised", "ValueError", lambda: Step(_user(data=float("nan")))),
    "circular message": ("raised", "Circular reference", _circular),
    "deep message": ("raised", "RecursionError", lambda: _nested(100_000)),
    "NaN reward": ("raised", "Step.reward is nan", lambda: Step([], reward=float("nan"))),
    "done that is a text": ("raised", "Step.done is str", lambda: Step([], done="no")),  # type: ignore[arg-type]
    "metric that is a list": ("raised", "Step.metrics['m'] is list", lambda: Step([], metrics={"m": []})),  # type: ignore[dict-item]
    "reward that overflows": ("raised", "Step.reward is 1e+308; it must be between", lambda: Step([], reward=1e308)),
    "reward of 400 digits": ("raised", "Step.reward is inf", lambda: Step([], reward=10**400)),
    "metric beyond float32": ("raised", "Step.metrics['m'] is 1e+39; it", lambda: Step([], metrics={"m": 1e39})),
    "message 700 deep": ("raised", "within each other more than 64 deep", lambda: _nested(700)),
    "calls that are a text": ("raised", "tool_calls are no list", lambda: Step(_user(tool_calls="f()"))),
    "calls that are a number": ("raised", "not iterable", lambda: Step(_user(tool_calls=7))),
    "half a call": ("raised", "tool_calls are no list", lambda: Step(_user(tool_calls=[{"function": {"name": 7}}]))),
    "negative limit": ("raised", "max_tokens=-1: at least 1", lambda: Step([], request=TurnRequest(max_tokens=-1))),
    "limit that is true": ("raised", "max_tokens=True: at", lambda: Step([], request=TurnRequest(max_tokens=True))),
    "empty stop text": ("raised", "of 1 to 1000 characters", lambda: Step([], request=TurnRequest(stop=[""]))),
    "too many metrics": ("raised", "at most 64", lambda: Step([], metrics={str(n): 1.0 for n in range(65)})),
    "remove len": ("raised", "NoneType", lambda: setattr(builtins, "len", None)),
    "replace json": ("died", "", lambda: setattr(json, "loads", None) or setattr(json.JSONEncoder, "iterencode", _lie)),
}


async def _late() -> None:
    await asyncio.sleep(0)
    raise ValueError("late")


def _lie(*_: Any) -> Any:
    os._exit(3)


def _surviving_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()


HARMLESS: dict[str, Callable[[], Any]] = {  # act -> what it does before it answers
    "change the folder": lambda: os.chdir("/"),
    "remove variables": lambda: os.environ.clear(),
    "replace builtins": lambda: [setattr(builtins, name, None) for name in ("sorted", "sum", "zip", "open")],
    "replace this game": lambda: setattr(Guess, "step", None),
    "forget the modules": lambda: sys.modules.clear(),
    "survive as a thread": _surviving_thread,
    "close stdout": lambda: os.close(1),
    "print to nowhere": lambda: setattr(sys, "stdout", None),
    "print a little": lambda: print("hello"),
    "lower a limit": lambda: __import__("resource").setrlimit(__import__("resource").RLIMIT_NOFILE, (20, 20)),
}


class Hostile(Guess):
    """`row` may name an act for the reset."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        if "act" in row:
            return FATAL[row["act"]][2]()  # type: ignore[no-any-return]
        row.clear()  # type: ignore[attr-defined]
        return super().reset(row, seed)

    def step(self, completion: str) -> Any:
        if completion in FATAL:
            return FATAL[completion][2]()
        if completion in HARMLESS:
            HARMLESS[completion]()
            return Step(_user("done \ud800", name="\udfff"), metrics={"../\ud800" + "x" * 5000: 1.0})
        if completion == "kill the worker":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        if completion == "daemon":
            return _daemon()
        if completion == "stop the worker":
            os.kill(os.getppid(), signal.SIGSTOP)
        return super().step(completion)


class BadSetup(Guess):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no such game")


class Picky(Guess):
    """Its rows need a field."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        return _user(row["secret"])


class Mute(Guess):
    """Begins without a message."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        return []


class Dice(Guess):
    """Shows the generator of the module `random`, and the order of a set."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        return _user(f"{random.random()} {set('abcdefgh')}")

    def step(self, completion: str) -> Step:
        return Step(_user(str(random.random())))


# -- requests to the endpoint ------------------------------------------------------------------------------------------

USER, SAID = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "one"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALLED = {**SAID, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
NAMED = {"name": "f", "input_schema": {"type": "object"}}
ASKED: dict[str, list[Any]] = {  # form -> requests of one conversation, whose answers are "one" and "two"
    "chat/completions": [
        {"model": "policy", "messages": [USER], "tools": [TOOL], "max_tokens": 7, "stop": ["END"], "logprobs": True},
        {"messages": [USER, SAID, USER], "tools": [TOOL], "tool_choice": "none", "stream": True, "temperature": 1.0},
    ],
    "completions": [{"prompt": "ab", "max_tokens": 3, "logprobs": 1}, {"prompt": "aboned", "stop": "x", "n": 1}],
    "responses": [
        {"input": "hello", "instructions": "be brief", "tools": [FLAT], "store": False, "include": []},
        {"input": [{"type": "message", **USER}], "previous_response_id": "resp_0", "tools": [FLAT], "top_p": 1},
    ],
    "messages": [
        {"messages": [USER], "system": "be brief", "tools": [NAMED], "max_tokens": 7, "thinking": {"type": "disabled"}},
        {
            "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "one"}]}, USER],
            "system": [{"type": "text", "text": "be brief"}],
            "tools": [NAMED],
            "max_tokens": 9,
            "stream": True,
        },
    ],
}
TOKEN_IDS = [{"prompt": [1, 2]}, {"prompt": [1, 2, 5, 6, 3]}]
CALLS = {"messages": [USER, CALLED, {"role": "tool", "tool_call_id": "c", "content": "7"}]}
IGNORED: dict[str, Any] = (
    json.loads(  # fields of vLLM's server and of OpenAI's that would change what is sampled or shown
        """{"guided_choice": ["a"], "guided_grammar": "g", "use_beam_search": true, "length_penalty": 0.5,
    "truncate_prompt_tokens": 1, "include_stop_str_in_output": true, "skip_special_tokens": false, "documents": [{}],
    "echo": true, "parallel_tool_calls": false, "reasoning_effort": "low", "thinking_token_budget": 5, "logits_processors": ["x"],
    "repetition_detection": {}, "vllm_xargs": {"a": 1}, "max_tool_calls": 1, "no_such_field": 1, "top_p": true, "n": true,
    "verbosity": "low", "prompt_logprobs": 1, "prefix\\ud800": 1}"""
    )
)
DEEP: list[Any] = []
for _ in range(700):
    DEEP = [DEEP]
REFUSED_REQUESTS: list[tuple[str, Any, str]] = [  # form, changes of its first request (or the body), part of the answer
    *(("chat/completions", {name: value}, "leave it out") for name, value in IGNORED.items()),
    ("chat/completions", {"max_tokens": True}, "max_tokens=True: at least 1"),
    ("chat/completions", {"max_completion_tokens": 8}, "differ: set one of them"),
    *(
        ("chat/completions", {"messages": [USER, {**CALLED, "tool_calls": calls}]}, "")
        for calls in ("f()", 7, {"a": 1}, [7], [{}], [{"function": {"name": "f", "arguments": 7}}])
    ),
    ("chat/completions", {"messages": [{**USER, "extra": DEEP}]}, "more than 64 deep"),
    ("chat/completions", {"messages": [{**USER, "extra": 7}]}, "the field 'extra', which is not read here"),
    ("chat/completions", {"messages": [{**USER, "content": [{"type": "video_url", "text": "x"}]}]}, "only text"),
    ("chat/completions", {"tools": [{"type": "web_search"}]}, "only functions are known"),
    ("chat/completions", {"stop": ["x" * 1001]}, "of 1 to 1000 characters"),
    ("completions", {"logprobs": 5}, "or set 0, or set 1"),
    ("responses", {"tools": [{"type": "web_search"}]}, "only functions are known"),
    ("responses", {"previous_response_id": "resp_7"}, "no answer here has this id"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "is not read"),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only functions are known"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "of the type 'image'"),
    ("messages", {"messages": [{"role": "system", "content": "x"}]}, "user or assistant"),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "leave it out, or set"),
    ("messages", {"tool_choice": {"type": "any"}}, "leave it out, or set"),
    ("completions", b'{"prompt": "' + b"[" * 50_000, "cannot be read"),
    ("completions", b"[" * 50_000, "RecursionError"),
    ("completions", b'{"prompt": "a", "temperature": NaN}', "not JSON compliant"),
    ("completions", b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "digits"),
    ("completions", b"7", "the body is no object"),
    ("embeddings", {}, "there is no path"),
]
PLAIN = r"""[null, true, false, 0, -1, 1180591620717411303424, 1e308, "\ud800", "\udfffx\udfff", "<|im_end|><tool_call>",
    "\u0000", "", [], {}, [[]], [null], [7], ["\ud800"], {"\ud800": 1}, {"type": "text", "text": "a"}, {"role": "tool"}, [10000],
    {"function": 7}, {"function": {"name": "f"}}, "resp_0", "none", "auto"]"""
VALUES: list[Any] = [*json.loads(PLAIN), "[" * 50_000, USER, [USER, SAID], [CALLED], DEEP, [TOOL]]


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def hostile_request(rng: random.Random, request: Any) -> Any:
    """Changes a valid request at up to three places: another value, a field of another server, or a field that is gone."""
    request = _copied(request)
    for _ in range(rng.randint(0, 3)):
        place, key = {"": request}, ""
        while isinstance(place[key], dict | list) and place[key] and (place[key] is request or rng.random() < 0.7):
            place = place[key]
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        kind = rng.random()
        if kind < 0.3:
            name = rng.choice([*IGNORED, "logprobs", "max_tokens", "stop", "tools", "tool_choice", "instructions"])
            request[name] = _copied(rng.choice([IGNORED.get(name), *VALUES]))
        elif kind < 0.9:
            place[key] = _copied(rng.choice(VALUES))
        elif place is not request or len(request) > 1:
            del place[key]
    return request
