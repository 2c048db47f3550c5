"""Environments of others, each adapter of examples/agents against a real one: MCP, OpenEnv, verifiers; NeMo-Gym's protocol.

OpenEnv and verifiers are not in the locks. A Python that has them is named in GRPO_TEST_PYTHONS (paths, with ":" between them).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.environments.environment import Outcome, Step, written_turn
from grpo_megatron.environments.pool import EnvironmentPool

pytestmark = pytest.mark.slow
AGENTS = Path(__file__).resolve().parents[2] / "examples" / "agents"
OTHERS = Path(__file__).with_name("others")
ROW = {"messages": [{"role": "user", "content": "hello"}], "number": 5}


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'multiply', 'arguments': arguments})}</tool_call>"


@functools.cache
def python_with(package: str) -> str:
    """Finds an interpreter that can import `package`; skips the test if there is none."""
    for python in [sys.executable, *filter(None, os.environ.get("GRPO_TEST_PYTHONS", "").split(":"))]:
        if subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"no Python here has {package}; install it in an environment and name its Python in GRPO_TEST_PYTHONS")


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts `python FILE PORT`, and returns its address once it listens."""
    processes = []

    def start(python: str, file: Path) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        processes.append(subprocess.Popen([python, str(file), str(port)]))
        while processes[-1].poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}"
            time.sleep(0.05)
        raise RuntimeError(f"{file.name} has ended with exit code {processes[-1].returncode}")

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Outcome]]:
    """Returns the outcomes of the start and of each turn of one trajectory."""
    monkeypatch.syspath_prepend(str(AGENTS))

    def run(name: str, kwargs: dict[str, Any], row: dict[str, Any], *turns: str) -> list[Outcome]:
        with EnvironmentPool(name, kwargs, timeout_s=60.0, memory_gib=256.0) as pool:  # node reserves addresses
            pool.start("one", row, 7)
            outcomes = [pool.wait(["one"])["one"]]
            for turn in turns:
                pool.step("one", turn)
                outcomes += pool.wait(["one"]).values()
        return outcomes

    return run


def steps(outcomes: list[Outcome]) -> list[Step]:
    assert all(outcome.step for outcome in outcomes), outcomes
    return [outcome.step for outcome in outcomes if outcome.step]


def texts(step: Step) -> list[str]:
    return [message["content"] for message in step.messages]


@pytest.mark.parametrize("transport", ["stdio", pytest.param("http", marks=pytest.mark.soak)])
def test_tools_of_an_mcp_server(play: Callable[..., list[Outcome]], serve: Callable[..., str], transport: str) -> None:
    server = AGENTS / "mcp_server.py"
    by_url = {"url": f"{serve(sys.executable, server)}/mcp"} if transport == "http" else {}
    kwargs = by_url or {"command": [sys.executable, str(server)]}
    turns = [call(a=6, b=7) + call(a=10**9, b=2), call(a="x", b=1), call(c=1), "42"]
    start, *answers = steps(play("mcp_tools:McpTools", kwargs, ROW, *turns))
    [tool] = start.request.tools
    assert (tool["function"]["name"], tool["function"]["description"]) == ("multiply", "Multiply two whole numbers.")
    assert start.messages == ROW["messages"] and tool["function"]["parameters"]["required"] == ["a", "b"]
    assert texts(answers[0]) == ["42", "2000000000"]
    assert "'x' is not of type 'integer'" in texts(answers[1])[0] and "unknown argument c" in texts(answers[2])[0]
    assert answers[3].done and answers[1].metrics["tool_errors"] == 1.0


# A server in plain Python: its tool's schema and its answers are those of the arguments. It answers after "ANSWER:" as it stands.
RAW = """
import json, sys
schema, answer = sys.argv[1:]
print("ready", flush=True)  # a greeting, which is no message
for line in sys.stdin:
    asked = json.loads(line)
    results = {
        "initialize": {
            "protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}
        },
        "tools/list": {"tools": [{"name": "multiply", "inputSchema": json.loads(schema)}]},
    }
    if asked["method"] == "tools/call":
        print(answer.replace("ID", json.dumps(asked["id"])), flush=True)
    elif asked["method"] in results:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": results[asked["method"]]}), flush=True)
    elif "id" in asked:
        error = {"code": -32601, "message": "unknown"}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}), flush=True)
"""
EMPTY, SAID = {"type": "object", "properties": None}, '{"jsonrpc": "2.0", "id": ID, "result": {"content": [%s]}}'
TEXT = SAID % '{"type": "text", "text": "7"}'


@pytest.mark.parametrize(
    ("schema", "answer", "message"),
    [
        pytest.param(EMPTY, TEXT, "", marks=pytest.mark.soak),
        (EMPTY, '{"jsonrpc": "2.0", "id": ID, "error": {"code": -32602, "message": "no such tool"}}', "Error: no such"),
        (EMPTY, "junk", "it has written what is no message"),
        ({"type": "object", "$ref": "http://127.0.0.1:9/x"}, TEXT, "refer to 'http://127.0.0.1:9/x'; other documents"),
        pytest.param(
            {"type": "object", "properties": {"a": {"type": 7}}},
            TEXT,
            "its parameters are no JSON schema",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_what_a_hostile_mcp_server_answers(
    play: Callable[..., list[Outcome]], schema: Any, answer: str, message: str
) -> None:
    kwargs = {"command": [sys.executable, "-c", RAW, json.dumps(schema), answer]}
    outcome = play("mcp_tools:McpTools", kwargs, ROW, call())[-1]
    if outcome.step:
        assert texts(outcome.step) == ["7"] if not message else message in texts(outcome.step)[0]
    else:
        assert outcome.status == "raised" and message and message in outcome.message and outcome.seconds < 30, outcome


DYING = "import os, mcp_server as m\nm.server.tool(name='end')(lambda: os._exit(3))\nm.server.run('stdio')"


@pytest.mark.parametrize(
    ("kwargs", "status", "message"),
    [
        pytest.param(
            {"command": [sys.executable, "-c", DYING]},
            "raised",
            "the MCP server does not answer",
            marks=pytest.mark.soak,
        ),
        ({"command": [sys.executable, "-c", DYING], "only": ["divide"]}, "raised", "server has ['end', 'multiply']"),
    ],
)
def test_an_mcp_server_that_is_gone_ends_its_own_trajectory(
    play: Callable[..., list[Outcome]], monkeypatch: pytest.MonkeyPatch, kwargs: Any, status: str, message: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(AGENTS))
    end = '<tool_call>{"name": "end", "arguments": {}}</tool_call>'
    outcome = play("mcp_tools:McpTools", {**kwargs, "pass_env": ["PYTHONPATH"]}, ROW, end)[-1]
    assert outcome.step is None and outcome.status == status and message in outcome.message, outcome


@pytest.mark.soak  # 8 s: imports of OpenEnv
def test_an_openenv_server(play: Callable[..., list[Outcome]], serve: Callable[..., str]) -> None:
    """An action that is no JSON is said to the model; one that the server refuses ends the trajectory."""
    url = serve(python_with("openenv.core"), OTHERS / "openenv_guess.py")
    kwargs = {"url": url, "observation": "text", "reset": ["number"]}
    turns = ['I say {"number": 3}.', "nine", '{"number": 5}']
    start, low, wrong, right = steps(play("openenv_client:OpenEnv", kwargs, ROW, *turns))
    assert texts(start) == ["hello\n\nseed 7"]
    assert (texts(low), low.reward, low.done) == (["higher"], -0.25, False)
    assert "no action in JSON" in texts(wrong)[0] and wrong.reward is None
    assert (right.messages, right.reward, right.done) == ([], 1.0, True)
    by_field = {**kwargs, "action": "number", "observation": ""}
    start, low = steps(play("openenv_client:OpenEnv", by_field, ROW, "3"))
    assert (texts(start), texts(low)) == (['hello\n\n{"text": "seed 7"}'], ['{"text": "higher"}'])
    refused = play("openenv_client:OpenEnv", by_field, ROW, "three")[-1]
    assert refused.status == "raised" and "the server answers to step" in refused.message, refused


def test_an_agent_with_the_protocol_of_nemo_gym(
    play: Callable[..., list[Outcome]], serve: Callable[..., str], tmp_path: Path
) -> None:
    program = [sys.executable, str(AGENTS / "nemo_gym_agent.py")]
    parameters = {"input": [{"role": "user", "content": "6 * 7?"}], "temperature": 0.0}
    file = tmp_path / "gym.jsonl"
    good = {"responses_create_params": parameters, "expected_answer": "42"}
    file.write_text("\n".join(map(json.dumps, [good, {"responses_create_params": {"input": "?"}}])))
    written = subprocess.run([*program, "rows", str(file)], capture_output=True, text=True, check=True).stdout
    row, bad = map(json.loads, written.splitlines())
    assert (row["prompt"], row["answer"], bad["prompt"]) == ("6 * 7?", "", "?")
    kwargs = {"command": [*program, serve(sys.executable, OTHERS / "gym_agent.py")]}
    start, end = steps(play("command", kwargs, row, written_turn("42", [4], ["42"], [-0.5])))
    assert start.messages == [{"role": "user", "content": "6 * 7?"}]
    assert (end.reward, end.done, end.metrics) == (1.0, True, {"mask_sample": 0.0, "num_steps": 1.0})
    [refused] = play("command", kwargs, bad)
    assert refused.status == "raised" and "expected_answer is missing" in refused.message, refused


@pytest.mark.soak  # 19 s: imports of verifiers, four times
def test_a_taskset_of_verifiers(play: Callable[..., list[Outcome]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(OTHERS))
    program = [python_with("verifiers.v1"), str(AGENTS / "verifiers_agent.py")]
    block = '{"taskset": {"id": "verifiers-products"}}'
    written = subprocess.run([*program, "rows", block], capture_output=True, text=True, check=True).stdout
    rows = list(map(json.loads, written.splitlines()))
    assert rows[1] == {"prompt": "4 * 5 = ?", "answer": "", "idx": 1} and len(rows) == 2
    turns = [written_turn(text, [4], [text], [-0.5]) for text in ("twenty", "20")]
    start, more, end = steps(play("command", {"command": [*program, block]}, rows[1], *turns))
    assert start.messages == [{"role": "user", "content": "4 * 5 = ?"}] and start.request.max_tokens == 9
    assert texts(more) == ["sure?"]
    assert (end.reward, end.metrics) == (1.0, {"turns": 2.0, "is_right": 1.0})
    [gone] = play("command", {"command": [*program, block]}, {"idx": 9})
    assert gone.status == "raised" and "has no such task" in gone.message, gone


@pytest.mark.soak  # 9 to 55 s each on two busy cores: their imports
@pytest.mark.parametrize(
    ("name", "package", "tool", "submit"),
    [
        ("mini_swe_agent", "minisweagent", "bash", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat word.txt"),
        ("agents_sdk_chat", "agents", "bash", ""),
        ("agents_sdk_responses", "agents", "bash", ""),
        ("qwen_code", "", "run_shell_command", ""),
    ],
)
def test_harnesses_of_others_run_unmodified(
    play: Callable[..., list[Outcome]], name: str, package: str, tool: str, submit: str
) -> None:
    """The harness's shell gets what the model writes; the only observation is what the shell prints."""
    if not package and shutil.which("qwen") is None:
        pytest.skip("there is no program qwen; npm install @qwen-code/qwen-code, and put its folder on PATH")

    def shell(command: str) -> str:
        arguments = {"command": command, **({} if package else {"is_background": False})}
        return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"

    for word, reward in (("apple", 1.0), ("pear", 0.0)):  # the second model answers with another word than it reads
        last = shell(submit if reward else submit.replace("cat word.txt", "echo apple")) if submit else "apple"
        turns = [written_turn(text, [4], [text], [-0.5]) for text in (shell("cat word.txt"), last)]
        kwargs = {"command": [python_with(package) if package else sys.executable, str(OTHERS / "harnesses.py"), name]}
        start, more, end = steps(
            play("command", kwargs, {"prompt": "Say the word in word.txt", "answer": word}, *turns)
        )
        assert start.messages[-1] == {"role": "user", "content": "Say the word in word.txt"}
        assert tool in [one["function"]["name"] for one in start.request.tools]
        [observed] = more.messages
        assert observed["role"] == "tool" and word in observed["content"] and not more.request.branch
        assert (end.reward, end.done) == (reward, True)
