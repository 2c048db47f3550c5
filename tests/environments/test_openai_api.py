"""Programs with OpenAI's own client as environments: what they are told, what is recorded, and what hostile ones can do."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.environments.command import CommandEnvironment
from grpo_megatron.environments.environment import Outcome, TurnRequest, written_turn
from grpo_megatron.environments.pool import EnvironmentPool

pytestmark = pytest.mark.slow
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hello"}
CALL = '<tool_call>{"name": "f", "arguments": {"y": 1}}</tool_call>'


AGENTS = str(Path(__file__).with_name("agents.py"))


def kwargs(name: str, **more: Any) -> dict[str, Any]:
    return {"command": [sys.executable, AGENTS, name], **more}


def play(name: str, *turns: str, timeout_s: float = 60.0, **more: Any) -> list[Outcome]:
    """Returns the outcomes of the start and of each turn that the model writes."""
    with EnvironmentPool("command", kwargs(name, **more), timeout_s=timeout_s) as pool:
        pool.start("one", {"x": 3}, 0)
        outcomes = [pool.wait(["one"])["one"]]
        for text in turns:
            pool.step("one", written_turn(text, [5, 6], ["a", "b"], [-0.5, -0.25], prompt_tokens=9))
            outcomes += pool.wait(["one"]).values()
    return outcomes


@pytest.mark.parametrize("imports", [[], ["openai"]])
def test_two_turns_with_a_tool(imports: list[str]) -> None:
    """Only what is new is an observation. Tools, limits and stop texts reach the request to the engine."""
    start, answer, end = play("two_turns", f"I look. {CALL}", "so 1 END", imports=imports)
    assert start.step and answer.step and end.step, (start, answer, end)
    assert (start.step.messages, start.step.request) == ([USER], TurnRequest([TOOL], 7))
    [result] = answer.step.messages
    assert (result["role"], result["content"]) == ("tool", '{"y": 1}') and answer.step.request == TurnRequest(
        stop=["END"]
    )
    seen = ["tool_calls", "I look.", "so 1 ", [["a", -0.5], ["b", -0.25]]]
    assert (end.step.reward, end.step.done) == (0.5, True)
    assert end.step.metrics == {"turns": 2.0, "row": 3.0, "seen": len(str([*seen[:3], [("a", -0.5), ("b", -0.25)]]))}


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("streams", ["one"]),
        ("responses", [CALL, "two", "three"]),
        ("completions", ["one", "two"]),
        ("token_ids", ["one", "two"]),
        ("refused", ["one"]),
        ("forged", ["one"]),
    ],
)
def test_what_a_client_may_ask(name: str, turns: list[str]) -> None:
    outcomes = play(name, *turns)
    assert all(outcome.step for outcome in outcomes), outcomes
    end = outcomes[-1].step
    assert end and (end.done, end.reward) == (True, 1.0)
    if name == "completions":
        assert outcomes[1].step and outcomes[1].step.request == TurnRequest(prompt="cd")
    if name == "token_ids":
        assert outcomes[1].step and outcomes[1].step.request == TurnRequest(prompt=[3])


@pytest.mark.parametrize(
    ("name", "turns", "status", "message"),
    [
        ("silent", 0, "raised", "has ended without a request"),
        ("hangs", 0, "timeout", "3 s"),
        ("hangs_later", 1, "timeout", "3 s"),
        pytest.param("lists", 1, "timeout", "3 s", marks=pytest.mark.soak),
        ("large", 0, "raised", "exit code 1"),
        ("flood", 0, "flooded", "200 of its requests were refused"),
        ("crashes", 1, "raised", "signal SIGABRT"),
        ("raises, forked", 1, "raised", "exit code 1 (last output: ZeroDivisionError: division by zero)"),
        ("talks", 1, "flooded", "has printed more than"),
        ("both_at_once", 1, "raised", "exit code 1"),
        ("no_reward", 1, "raised", "no reward: '\"good\"'"),
    ],
)
def test_a_program_that_fails_ends_its_own_trajectory(name: str, turns: int, status: str, message: str) -> None:
    name, _, forked = name.partition(", ")
    more = {"imports": ["openai"]} if forked else {}
    outcome = play(name, *["one"] * turns, timeout_s=3.0 if status == "timeout" else 60.0, **more)[-1]
    assert outcome.step is None and outcome.status == status and message in outcome.message, outcome


def test_a_history_that_is_rewritten_begins_a_branch_where_the_config_says_so() -> None:
    begun, branch, more, end = (outcome.step for outcome in play("rewrites", "one", "two", "three", branches="samples"))
    assert begun and branch and more and end and end.reward == 1.0
    assert (branch.messages, branch.request) == (
        [{"role": "user", "content": "shorter"}],
        TurnRequest([TOOL], branch=True),
    )
    assert (more.messages, more.request) == ([USER], TurnRequest())
    with pytest.raises(ValueError, match="write refuse or samples"):
        CommandEnvironment([sys.executable], branches="all")


@pytest.mark.parametrize("name", ["impatient", "leaves"])
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
        ({"command": [sys.executable, "-c", "1"], "imports": ["json"]}, "imports needs a command"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommandEnvironment(**wrong)


def test_the_turn_is_plain_json() -> None:
    assert json.loads(written_turn("x", [1], ["x"], [-1.0], "length", 4))["finish_reason"] == "length"
