"""The environment `tools`, hostile tools in it, and the built-in ones."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.environments.environment import Outcome
from grpo_megatron.environments.pool import EnvironmentPool
from grpo_megatron.environments.tool import ToolError
from grpo_megatron.environments.tool_environment import ToolEnvironment
from grpo_megatron.environments.tools.calculator import calculator
from grpo_megatron.environments.tools.search import remote
from tests.rewards.waiting import QuietHandler, serving

OWN = "tests.environments.hostile_tools:"
QUESTION = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "2 + 2?"}]


def call(tool: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def turns(completions: list[str], **kwargs: Any) -> list[Outcome]:
    """Plays one trajectory per completion, all at once."""
    with EnvironmentPool("tools", kwargs, timeout_s=5.0) as pool:
        keys = list(map(str, range(len(completions))))
        for key in keys:
            pool.start(key, {"messages": QUESTION, "id": 7}, 0)
        first = pool.wait(keys)
        assert all(outcome.step and outcome.step.messages == QUESTION for outcome in first.values()), first["0"]
        for key, completion in zip(keys, completions, strict=True):
            pool.step(key, completion)
        return list(pool.wait(keys).values())


def results(outcome: Outcome) -> list[tuple[str, str]]:
    assert outcome.step, outcome
    assert {message["role"] for message in outcome.step.messages} == {"tool"}
    return [(message["name"], message["content"]) for message in outcome.step.messages]


def test_calls_of_a_turn_are_answered_in_order() -> None:
    several = (
        call("double", number=2) + call("later", numbers=[1]) + call("double", number="2") + "<tool_call>x</tool_call>"
    )
    last, answered, too_many = turns(
        ["The answer is 4.<|im_end|>", several, call("double", number=1) * 6],
        tools=[OWN + "double", OWN + "later"],
        double={"factor": 5},
    )
    assert last.step
    assert (last.step.messages, last.step.done, last.step.reward) == ([], True, None)
    of_tools = ("tool_calls/double", "tool_errors/double", "tool_double_seconds")
    of_all = {
        "tool_calls",
        "tool_errors",
        "tool_seconds",
        *of_tools,
        *(name.replace("double", "later") for name in of_tools),
    }
    assert last.step.metrics == dict.fromkeys(of_all, 0)
    assert answered.step
    assert not answered.step.done
    assert results(answered) == [
        ("double", "10"),
        ("later", '{"numbers": [1], "unit": "m", "note": null}'),
        ("double", "Error: number: '2' is not of type 'integer'"),
        ("error", "Error: the text in <tool_call> is not a call in JSON: Expecting value: line 1 column 1 (char 0)"),
    ]
    assert (answered.step.metrics["tool_calls"], answered.step.metrics["tool_errors"]) == (4, 2)
    assert [answered.step.metrics[name] for name in ("tool_calls/double", "tool_errors/double")] == [2, 1]
    assert [answered.step.metrics[name] for name in ("tool_calls/later", "tool_errors/later")] == [1, 0]
    expected = [("double", "5")] * 4 + [("error", "Error: 2 more calls were not run; at most 4 run per turn")]
    assert results(too_many) == expected


def test_hostile_tools() -> None:
    """What a tool raises is an observation; what ends or fills its process ends the trajectory."""
    observed = {
        "raise": "Error: KeyError: 'x'",
        "sys.exit": "Error: SystemExit: 3",
        "no json": "Error: TypeError: Object of type object is not JSON serializable",
        "circular": "Error: ValueError: Circular reference detected",
        "surrogate": "\ufffd",
        "print": "done",
        "nothing": "null",
        "huge": "x" * 50_000 + "\n[16677216 characters cut]\n" + "x" * 50_000,
    }
    ended = {"hang": "timeout", "exit": "died", "memory": "memory"}
    *outcomes, unknown = turns(
        [call("act", name=name) for name in (*observed, *ended)] + [call("rm", path="/")], tools=[OWN + "act"]
    )
    for (name, text), outcome in zip(observed.items(), outcomes, strict=False):
        assert results(outcome) == [("act", text)], name
    assert [outcome.status for outcome in outcomes[len(observed) :]] == list(ended.values())
    assert results(unknown) == [("error", "Error: unknown tool 'rm' (known: act)")]


WRONG_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({}, "must name at least one tool"),
    ({"tools": ["calculator", "calculator"]}, "each name once"),
    ({"tools": ["calculator"], "search": {"corpus": "x"}}, r"has options of search, not in tools \['calculator'\]"),
]


def test_wrong_settings() -> None:
    for kwargs, problem in WRONG_SETTINGS:
        with pytest.raises(ValueError, match=problem):
            ToolEnvironment.preload(**kwargs)
    with pytest.raises(RuntimeError, match=WRONG_SETTINGS[0][1]):
        turns([""])


RESULTS = {
    "12.5 * (3 + 4)": "87.5",
    "0.1 + 0.2": "0.3",
    "2^10 - 7 // 2 % 2": "1023",
    "-1 / 3": "-0.333333333333",
    "sqrt(2)": "1.41421356237",
    "round(2.567, 2) + max(1, 2)": "4.57",
    "2**300": str(2**300),
    "(-1)**(9**60)": "-1",
}
REFUSED = [
    *("9**9**9", "10**99 * 10**99", "1e400", "1 / 0", "(-8) ** (1/3)", "round(1, 2, 3)", "().__class__", "True + 1"),
    *("__import__('os').system('ls')", "2 +", "(" * 400 + ")" * 400, "1" * 1001),
]


def test_calculator() -> None:
    assert {expression: calculator(expression) for expression in RESULTS} == RESULTS
    for expression in REFUSED:
        with pytest.raises(ToolError) as error:
            calculator(expression)
        assert len(str(error.value)) < 200, expression  # one short line for the model


class Stub(QuietHandler):
    """Answers by the path; /busy answers the third time."""

    counts: dict[str, int]

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
        count = self.counts[query] = self.counts.get(query, 0) + 1
        if self.path == "/lost" or (self.path == "/drops" and count < 3):
            self.connection.close()
            return
        status = {"/busy": 503 if count < 3 else 200, "/down": 500, "/wrong": 400, "/moved": 302}.get(self.path, 200)
        key = str(self.headers.get("Authorization"))
        body = {"/text": f"{query} {count}".encode(), "/huge": b"x" * (1 << 21), "/echo": key.encode()}.get(self.path)
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if body else "application/json; charset=utf-8")
        self.send_header("Location", "/text")
        self.end_headers()
        self.wfile.write(body or json.dumps({"result": f"{query} {count} {self.headers.get('Key')}"}).encode())


@pytest.fixture(scope="module")
def stub() -> Iterator[str]:
    Stub.counts = {}
    with serving(Stub) as address:
        yield address


def test_remote(stub: str) -> None:
    assert remote("a", url=f"{stub}/text") == "a 1"
    assert remote("b", url=f"{stub}/busy", headers={"Key": "k"}) == "b 3 k"
    assert remote("c", url=f"{stub}/drops") == "c 3 None"
    for path, attempts, problem in (
        ("down", 3, "after 3 attempts: HTTP status 500"),
        ("lost", 3, "after 3 attempts: RemoteDisconnected"),
        ("wrong", 1, "after 1 attempts: HTTP status 400"),
        ("moved", 1, "after 1 attempts: HTTP status 302"),
        ("huge", 1, "the response has more than 1048576 bytes"),
    ):
        with pytest.raises(ToolError, match=problem):
            remote(path, url=f"{stub}/{path}", retries=2)
        assert Stub.counts[path] == attempts
    with pytest.raises(ToolError, match=r"no answer within 0.25 s \(HTTP status 500\)"):
        remote("d", url=f"{stub}/down", retries=100, deadline_s=0.25)
    with pytest.raises(ValueError, match="is no http address"):
        remote("e", url="file:///etc/passwd")


PASSAGES = [
    {"title": "Ada", "text": "Ada was born in Lyra. She studied bridges."},
    {"title": "Lyra", "text": "Lyra is a town on the river Oss."},
    {"text": "Rivers carry water. Rivers and more rivers."},
    {"title": "Bo", "text": "Bo was born in Vega."},
]


def test_search(tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="the library of the tool `search` is not installed (requirements/)")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(map(json.dumps, PASSAGES)) + "\n")
    options = {"corpus": str(corpus), "top_k": 2, "max_characters": 24}
    queries = ["Where was Ada born?", "rivers", "born", "zebra", ""]
    outcomes = turns([call("search", query=query) for query in queries], tools=["search"], search=options)
    assert [results(outcome)[0][1] for outcome in outcomes] == [
        "[1] Ada: Ada was born in Lyr\n\n[2] Bo: Bo was born in Vega.",
        "[1] Rivers carry water. Rive",
        "[1] Bo: Bo was born in Vega.\n\n[2] Ada: Ada was born in Lyr",
        "No passage matches.",
        "No passage matches.",
    ]


def test_a_corpus_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="the library of the tool `search` is not installed (requirements/)")
    for number, (text, problem) in enumerate(
        (
            ("", "has no rows"),
            ('{"text": "a"}\n{', "line 2: is not JSON"),
            ('{"title": "a"}', "line 1: field 'text' is missing"),
            (None, "cannot read"),
        )
    ):
        corpus = tmp_path / f"{number}.jsonl"
        if text is not None:
            corpus.write_text(text)
        with pytest.raises(ValueError, match=problem):
            ToolEnvironment.preload(tools=["search"], search={"corpus": str(corpus)})


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["headers", "body"])
def test_a_service_that_drips_is_cut_at_the_deadline(begin: bytes) -> None:
    """A byte every 20 ms for 20 s: each read is short, and together they never end."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(begin)
                for _ in range(1000):
                    connection.sendall(b"x")
                    time.sleep(0.02)

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(ToolError, match="the response took too long|no answer within 0.3 s|timed out"):
            remote("a", url=f"http://127.0.0.1:{server.getsockname()[1]}", retries=0, deadline_s=0.3)


def test_a_key_reaches_the_service_and_no_text(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOTE_KEY", "sk-very-secret")
    assert remote("f", url=f"{stub}/text", api_key_env="REMOTE_KEY") == "f 1"
    assert remote("g", url=f"{stub}/echo", api_key_env="REMOTE_KEY") == "Bearer ***"
    with pytest.raises(ValueError, match="remote: api_key_env='NO_KEY': this environment variable is not set"):
        remote("h", url=stub, api_key_env="NO_KEY")
    with pytest.raises(ValueError, match="holds a user or password") as raised:
        remote("h", url="http://me:sk-very-secret@host")
    assert "sk-very" not in str(raised.value)


def test_the_environment_of_the_documentation() -> None:
    """docs/agents.md: its file, word for word, played for three turns."""
    text = (Path(__file__).parents[2] / "docs/agents.md").read_text()
    names: dict[str, Any] = {}
    exec("import re\n" + text.partition("```python\nimport re\n")[2].partition("```")[0], names)
    played = names["Guess"]()
    assert played.gives_rewards
    row = {"prompt": "Guess a number from 1 to 9.", "answer": "4"}
    assert played.reset(row, 0) == [{"role": "user", "content": row["prompt"]}]
    steps = [played.step(text) for text in ("5?", "3", "It is 4.", "none")]
    assert [step.messages[0]["content"] for step in steps[:2]] == ["It is lower.", "It is higher."]
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (0.0, False), (1.0, True), (0.0, True)]
