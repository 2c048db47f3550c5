"""Programs with OpenAI's own client as environments: what they are told, what is recorded, and what hostile ones can do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from grpo_megatron.config import MultiTurnConfig
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.environments.command import CommandEnvironment
from grpo_megatron.environments.environment import Outcome, Step, TurnRequest, plain_step, read_outcome, written_turn
from grpo_megatron.environments.openai_api import MAX_REFUSED, REQUEST_FIELDS, Conversation, Endpoint
from grpo_megatron.environments.pool import EnvironmentPool
from grpo_megatron.rollout.engine import Completion
from grpo_megatron.sampling.multi_turn import EnvironmentAnswers, TrajectoryLimits
from tests.data.test_conversation import CHATML, tokenizer_with
from tests.environments.hostile import (
    ASKED,
    CALLS,
    FLAT,
    REFUSED_REQUESTS,
    SAID,
    TOKEN_IDS,
    TOOL,
    USER,
    hostile_request,
)
from tests.fakes import LoneMesh, trajectory

pytestmark = pytest.mark.slow
CALL = '<tool_call>{"name": "f", "arguments": {"y": 1}}</tool_call>'


PROGRAM = [sys.executable, str(Path(__file__).with_name("agents.py"))]
FUNCTION = ["tests.environments.agents:main"]


def kwargs(name: str, command: Sequence[str] = PROGRAM, **more: Any) -> dict[str, Any]:
    return {"command": [*command, name], **more}


def play(name: str, *turns: str, timeout_s: float = 60.0, **more: Any) -> list[Outcome]:
    """Returns the outcomes of the start and of each turn that the model writes."""
    with EnvironmentPool("command", kwargs(name, **more), timeout_s=timeout_s) as pool:
        pool.start("one", {"x": 3}, 0)
        outcomes = [pool.wait(["one"])["one"]]
        for text in turns:
            pool.step("one", written_turn(text, [5, 6], ["a", "b"], [-0.5, -0.25], prompt_tokens=9))
            outcomes += pool.wait(["one"]).values()
    return outcomes


@pytest.mark.parametrize("command", [pytest.param(PROGRAM, marks=pytest.mark.soak), FUNCTION])
def test_two_turns_with_a_tool(command: list[str]) -> None:
    """Only what is new is an observation. Tools, limits and stop texts reach the request to the engine."""
    start, answer, end = play("two_turns", f"I look. {CALL}", "so 1 END", command=command)
    assert start.step and answer.step and end.step, (start, answer, end)
    assert (start.step.messages, start.step.request) == ([USER], TurnRequest([TOOL], 7))
    [result] = answer.step.messages
    assert (result["role"], result["content"]) == ("tool", '{"y": 1}')
    said = answer.step.request.answer  # as the client repeats it
    assert said and (said["content"], said["tool_calls"][0]["function"]["name"]) == ("I look.", "f")
    assert answer.step.request == TurnRequest(stop=["END"], answer=said)
    seen = ["tool_calls", "I look.", "so 1 ", [["a", -0.5], ["b", -0.25]]]
    assert (end.step.reward, end.step.done) == (0.5, True)
    assert end.step.metrics == {"turns": 2.0, "row": 3.0, "seen": len(str([*seen[:3], [("a", -0.5), ("b", -0.25)]]))}


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("streams", ["one"]),
        ("responses", [CALL, "two", "three"]),
        ("messages", [f"I look. {CALL}", "so 1 END", CALL]),
        ("completions", ["one", "two"]),
        pytest.param("token_ids", ["one", "two"], marks=pytest.mark.soak),
        ("refused", ["one"]),
        *(pytest.param(name, ["one"], marks=pytest.mark.soak) for name in ("forged", "leaves_a_child")),
    ],
)
def test_what_a_client_may_ask(name: str, turns: list[str]) -> None:
    outcomes = play(name, *turns)
    assert all(outcome.step for outcome in outcomes), outcomes
    end = outcomes[-1].step
    assert end and (end.done, end.reward) == (True, 1.0)
    if name == "messages":
        assert outcomes[0].step and outcomes[0].step.request == TurnRequest([TOOL], 7)
        assert outcomes[1].step and [message["role"] for message in outcomes[1].step.messages] == ["tool", "user"]
    if name == "completions":
        assert outcomes[1].step and outcomes[1].step.request == TurnRequest(prompt="cd")
    if name == "token_ids":
        assert outcomes[1].step and outcomes[1].step.request == TurnRequest(prompt=[3])


@pytest.mark.parametrize(
    ("name", "turns", "status", "message"),
    [
        pytest.param("silent", 0, "raised", "has ended without a request", marks=pytest.mark.soak),
        pytest.param("hangs", 0, "timeout", "3 s", marks=pytest.mark.soak),
        pytest.param("hangs_later", 1, "timeout", "3 s", marks=pytest.mark.soak),
        pytest.param("lists", 1, "timeout", "3 s", marks=pytest.mark.soak),
        pytest.param("large", 0, "raised", "exit code 1", marks=pytest.mark.soak),
        ("flood", 0, "flooded", "200 of its requests were refused"),
        pytest.param("crashes", 1, "raised", "signal SIGABRT", marks=pytest.mark.soak),
        ("raises, forked", 1, "raised", "exit code 1 (last output: ZeroDivisionError: division by zero)"),
        pytest.param("talks", 1, "flooded", "has printed more than", marks=pytest.mark.soak),
        pytest.param("both_at_once", 1, "raised", "exit code 1", marks=pytest.mark.soak),
        ("no_reward", 1, "raised", "no reward: '\"good\"'"),
    ],
)
def test_a_program_that_fails_ends_its_own_trajectory(name: str, turns: int, status: str, message: str) -> None:
    name, _, forked = name.partition(", ")
    more: dict[str, Any] = {"command": FUNCTION} if forked else {}
    outcome = play(name, *["one"] * turns, timeout_s=3.0 if status == "timeout" else 60.0, **more)[-1]
    assert outcome.step is None and outcome.status == status and message in outcome.message, outcome


@pytest.mark.parametrize("command", [pytest.param(PROGRAM, marks=pytest.mark.soak), FUNCTION])
def test_a_program_serves_several_trajectories_one_after_another(command: list[str]) -> None:
    """Three trajectories of a program that serves two: the third has another process. One that is ended early is not reused."""
    ends = []
    with EnvironmentPool("command", kwargs("stays", command, episodes=2), timeout_s=60.0) as pool:
        for seed in (1, 2, 3, 4, 5):
            pool.start(str(seed), {}, seed)
            assert pool.wait([str(seed)])[str(seed)].step
            if seed != 3:
                pool.step(str(seed), written_turn("one"))
                ends.append(pool.wait([str(seed)])[str(seed)].step)
            pool.end([str(seed)])
    assert [end and (end.reward, end.done) for end in ends] == [(seed, True) for seed in (1, 2, 4, 5)], ends
    first, second, fourth, fifth = [end.metrics["process"] for end in ends if end]
    assert first == second != fourth == fifth


def test_a_history_that_is_rewritten_begins_a_branch_where_the_config_says_so() -> None:
    begun, branch, more, end = (outcome.step for outcome in play("rewrites", "one", "two", "three", branches="samples"))
    assert begun and branch and more and end and end.reward == 1.0
    assert (branch.messages, branch.request) == (
        [{"role": "user", "content": "shorter"}],
        TurnRequest([TOOL], branch=True),
    )
    assert (more.messages, more.request) == ([USER], TurnRequest(answer={"role": "assistant", "content": "two"}))
    with pytest.raises(ValueError, match="write refuse or samples"):
        CommandEnvironment([sys.executable], branches="all")


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_pictures_of_a_client_are_parts_of_its_messages() -> None:
    start, answer, end = (outcome.step for outcome in play("pictures", CALL, "so"))
    picture = {"type": "image", "image": f"data:image;base64,{PNG}"}
    assert start and answer and end and end.reward == 1.0
    assert start.messages == [{"role": "user", "content": [{"type": "text", "text": "hello"}, picture]}]
    assert [message["content"] for message in answer.messages] == [[picture]] and not answer.request.branch


def test_further_answers_to_a_request_are_branches() -> None:
    """n=2: the second answer is another sequence after the same messages. A client's seed reaches every turn it asks for."""
    first, second, third, end = (o.step for o in play("several", "one", "two", "three", branches="samples"))
    assert first and second and third and end and end.reward == 1.0
    assert (first.messages, first.request) == ([USER], TurnRequest(seed=7))
    assert (second.messages, second.request) == ([USER], TurnRequest(branch=True, seed=7))
    assert (third.messages, third.request.branch, third.request.seed) == ([USER], False, None)


@pytest.mark.parametrize("name", ["impatient", pytest.param("leaves", marks=pytest.mark.soak)])
def test_a_client_that_hangs_up_gets_its_answer_when_it_asks_again(name: str) -> None:
    with EnvironmentPool("command", kwargs(name), timeout_s=60.0) as pool:
        pool.start("one", {}, 0)
        pool.wait(["one"])
        time.sleep(1.0)  # the client has hung up; if this machine is slow, it asks again later, which is as good
        pool.step("one", written_turn("one"))
        [outcome] = pool.wait(["one"]).values()
    assert outcome.step and outcome.step.reward == 1.0, outcome


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"command": "python agent.py"}, "is no list of texts"),
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommandEnvironment(**wrong)


def test_a_rehearsed_request_leaves_nothing_that_a_fork_would_copy() -> None:
    """Neither a thread nor an open socket; `preload` would hide an error."""
    import httpx2
    import openai

    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    asyncio.run(Endpoint("policy", 1.0, "hermes").rehearse(openai, httpx2))
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_the_turn_is_plain_json() -> None:
    assert json.loads(written_turn("x", [1], ["x"], [-1.0], "length", 4))["finish_reason"] == "length"


# -- what a hostile client can send: its trajectory is the most that it costs ------------------------------------------


class Agent:
    """A client of an endpoint in this process. What it asks goes the whole way: the checks, the tokens, the trajectory."""

    def __init__(self, **settings: Any) -> None:
        self.endpoint, self.asked, self.failed = Endpoint("policy", 1.0, "hermes", **settings), [], []  # type: ignore[var-annotated]
        mesh: Any = LoneMesh()
        renderer = TurnRenderer(tokenizer_with(CHATML, "<|im_end|>"))
        self.answers = EnvironmentAnswers(None, renderer, MultiTurnConfig(), mesh)
        self.begin()
        self.endpoint.serve()
        threading.Thread(target=self._model, daemon=True).start()
        url = urlsplit(self.endpoint.url)
        self.path, self.connection = url.path, HTTPConnection(str(url.hostname), url.port, timeout=60)

    def begin(self) -> None:
        """Begins another trajectory."""
        self.endpoint._conversation, self.endpoint._num_refused = Conversation("hermes"), 0
        limits = TrajectoryLimits(10**6, 10**6, 100)
        self.trajectory, self.texts = trajectory(4, limits=limits), ["one", "two", "three", "four"]
        self.asked.clear()

    def _model(self) -> None:
        while True:
            question = self.endpoint.questions.get()
            self.asked.append(question)
            try:
                if not isinstance(question, Exception | None):
                    self._turn(Step(question[0], request=question[1]))
            except BaseException as error:  # noqa: BLE001 - of a test
                self.failed.append((question, error))
                self.endpoint.answer(json.loads(written_turn("none")))

    def _turn(self, step: Step) -> None:
        value = json.loads(json.dumps(plain_step(step, 1 << 18)))
        t, outcome = self.trajectory, read_outcome({"status": "ok", "value": value, "seconds": 0.0}, 1 << 18)
        [answer] = [self.answers._answer(t, outcome)]
        assert outcome.step and answer.status in ("ok", "raised"), outcome
        if t.turns:
            t.answered(answer, 1)
        else:
            t.begin(answer)
        if not t.is_over:
            assert t.request().prompt_ids and t.request().max_tokens > 0
            t.generated(Completion([5, 6], [-0.5, -0.5], "stop"), 1)
        self.endpoint.answer(json.loads(written_turn(self.texts.pop(0), [5, 6], ["a", "b"], [-0.5, -0.5])))

    def post(self, form: str, body: Any, path: str = "") -> tuple[int, str]:
        """Returns status and text. An object is sent as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.request("POST", f"{path or self.path}/{form}", data)
        answer = self.connection.getresponse()
        return answer.status, answer.read().decode()


@pytest.fixture(scope="module")
def agent() -> Agent:
    return Agent()


def test_what_is_not_read_is_refused(agent: Agent) -> None:
    for form, change, part in REFUSED_REQUESTS:
        agent.begin()
        body = change if isinstance(change, bytes) else {**ASKED.get(form, [{}])[0], **change}
        status, text = agent.post(form, body)
        assert status == (404 if form == "embeddings" else 400) and part in text, (form, change, status, text[:300])
        assert agent.endpoint._num_refused == 1 and not agent.asked
        assert agent.post("completions", {"prompt": "ab"})[0] == 200  # the trajectory is as it was
    agent.begin()
    assert agent.post("chat/completions", ASKED["chat/completions"][0])[0] == 200
    for wrong in ({"tool_calls": "f()"}, {"role": 7}, {"content": 7}, {"tool_calls": [{"function": 7}]}):
        changed = {"messages": [USER, {**SAID, **wrong}, USER]}
        assert agent.post("chat/completions", changed)[0] == 400  # of a message that was recorded
    assert agent.endpoint._num_refused == 4 and not agent.failed


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_no_request_ends_more_than_its_trajectory(agent: Agent, count: int) -> None:
    """Conversations of two requests, changed at random places. Answered ones have only fields that are read."""
    rng, seen = random.Random(0), Counter[int]()
    conversations = [*ASKED.items(), ("completions", TOKEN_IDS), ("chat/completions", [CALLS])]
    for _ in range(count // 2):
        form, requests = rng.choice(conversations)
        agent.begin()
        for request in requests:
            body = hostile_request(rng, request)
            status, text = agent.post(form, body)
            assert status in (200, 400), (form, body, text)
            assert not agent.failed, (form, body, agent.failed)
            seen[status] += 1
            known = {name for name, values in REQUEST_FIELDS[form].items() if values}
            if status == 200:
                assert {name for name, value in body.items() if value is not None} <= known, body
    assert min(seen[200], seen[400]) > count // 8, seen


def test_a_response_continues_the_answer_that_it_names() -> None:
    """An earlier answer or other instructions begin a branch, where branches are recorded; tool_choice none is text."""
    agent, chain = Agent(branches=True), {"input": "go on", "tools": [FLAT]}
    agent.texts[:1] = ["I look. " + CALL]
    _, text = agent.post("responses", {**ASKED["responses"][0], "tools": [FLAT]})
    system = {"role": "system", "content": "be brief"}
    items = [USER, *json.loads(text)["output"], {"type": "function_call_output", "call_id": "x", "output": "7"}]
    for change in (
        {"input": items, "instructions": "be brief", "tools": [FLAT]},
        {**chain, "previous_response_id": "resp_1"},
    ):
        assert agent.post("responses", change)[0] == 200  # a message and its call are one message; the chain goes on
    assert [question[1].branch for question in agent.asked] == [False] * 3
    assert agent.post("responses", {**chain, "previous_response_id": "resp_0", "instructions": "be long"})[0] == 200
    messages, request = agent.asked[-1]
    assert request.branch and messages[0] == {**system, "content": "be long"} and len(messages) == 4
    status, text = agent.post("responses", {**chain, "previous_response_id": "resp_9"})
    assert status == 400 and "no answer here has this id" in text
    agent.begin()
    agent.texts[0] = CALL
    _, text = agent.post("chat/completions", {"messages": [USER], "tools": [TOOL], "tool_choice": "none"})
    assert json.loads(text)["choices"][0]["message"] == {"role": "assistant", "content": CALL}


def test_whoever_has_no_key_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither many requests nor many connections that are silent, or stop in their headers or their body."""
    monkeypatch.setattr("grpo_megatron.environments.openai_api.IDLE_S", 0.5)
    agent = Agent()
    begun = [
        b"",
        b"POST /",
        f"POST {agent.path}/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode(),
    ]
    silent = [socket.create_connection((agent.connection.host, agent.connection.port)) for _ in range(99)]
    for number, one in enumerate(silent):
        one.sendall(begun[number % 3])
    for _ in range(MAX_REFUSED + 1):
        assert agent.post("completions", {"prompt": "a"}, path="/t/wrong/v1")[0] == 404
    assert agent.post("completions", {"prompt": "a"})[0] == 200 and len(agent.asked) == 1
    for one in silent:
        one.settimeout(60)
        with one, contextlib.suppress(ConnectionError):
            assert one.recv(1000).partition(b" ")[2][:3] in (b"", b"400")
    assert not agent.failed and agent.endpoint._num_refused == 0
