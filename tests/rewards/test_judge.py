"""The judge against a stub server: verdicts, retries, deadline, cache, hostile replies, and a key that no message shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.rewards import judge
from grpo_megatron.rewards.calling import COMPOSITE
from grpo_megatron.rewards.judge import judge_reward
from grpo_megatron.rewards.pool import RewardPool
from tests.rewards.waiting import QuietHandler, serving

KEY = "sk-very-secret-0123"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "judge.txt"


class Stub(QuietHandler):
    """The reply is what the response asks for, as text: "say Score: 7". Other responses name an error."""

    requests: list[dict[str, Any]]
    keys: list[str | None]

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests.append(body)
        type(self).keys.append(self.headers.get("Authorization"))
        asked = body["messages"][0]["content"].rpartition("RESPONSE=")[2]
        count = sum(request == body for request in type(self).requests)
        if asked == "lost" or (asked == "busy" and count < 3):
            self.send_error(503) if asked == "busy" else self.connection.close()
            return
        content = {"busy": "Score: 5", "none": None, "many": "Score: 1\nthen\n**Score: 9.5**"}.get(asked, asked)
        status = {"later": 429, "denied": 401, "hangs": 500}.get(asked, 200)
        reply = json.dumps({"choices": [{"message": {"content": content}}]})
        texts = {
            "denied": f"wrong key: {self.headers.get('Authorization')}",
            "html": "<html>",
            "echoes": str(self.headers.get("Authorization")),
            "list": "[1]",
        }
        self.send_response(status)
        self.send_header("Retry-After", "1000" if asked == "later" else "soon")
        self.end_headers()
        self.wfile.write(texts.get(asked, reply).encode())


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(Stub) as address:
        yield f"{address}/v1"


@pytest.fixture
def options(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    Stub.requests, Stub.keys = [], []
    judge._verdicts.clear()
    monkeypatch.setenv("JUDGE_KEY", KEY)
    (tmp_path / "judge.txt").write_text("{question} ({answer}, {other})\nRESPONSE={response}")
    return {"base_url": server, "model": "judge-1", "prompt": str(tmp_path / "judge.txt"), "api_key_env": "JUDGE_KEY"}


def judged(completion: str, fixed: dict[str, Any], **more: Any) -> dict[str, float]:
    return asyncio.run(judge_reward(completion, "42", **{"prompt_text": "1 + 1 =", **fixed, **more}))


def test_a_verdict_is_scaled_and_cached(options: dict[str, Any]) -> None:
    once = judged("Score: 7", options)
    assert once == {"score": 0.7, "verdict": 7.0, "attempts": 1, "cached": 0.0}
    assert judged("Score: 7", options) == {"score": 0.7, "verdict": 7.0, "attempts": 0, "cached": 1.0}
    assert judged("Score: 7", options, model="judge-2")["cached"] == 0.0
    assert judged("many", options)["verdict"] == 9.5  # the last one
    assert judged("busy", options) == {"score": 0.5, "verdict": 5.0, "attempts": 3, "cached": 0.0}
    assert judged("[[4]]", options, pattern=r"\[\[(\d)\]\]", low=1, high=5)["score"] == 0.75
    request = Stub.requests[0]
    message = {"role": "user", "content": "1 + 1 = (42, {other})\nRESPONSE=Score: 7"}
    assert request == {"model": "judge-1", "messages": [message], "temperature": 0, "max_tokens": 512}
    assert set(Stub.keys) == {f"Bearer {KEY}"}
    judged("Score: 1", options, options={"max_tokens": 9, "top_p": 0.5}, api_key_env=None)
    assert (Stub.requests[-1]["max_tokens"], Stub.requests[-1]["top_p"], Stub.keys[-1]) == (9, 0.5, None)


def test_the_cache_keeps_the_latest(options: dict[str, Any]) -> None:
    for number in (1, 2, 3, 1):
        assert judged(f"Score: {number}", options, cache_size=2)["cached"] == 0.0
    assert judged("Score: 3", options, cache_size=2)["cached"] == 1.0


def test_a_hostile_response_fills_no_field_and_is_cut(options: dict[str, Any]) -> None:
    judged("{answer} {question}\nScore: 3 \ud800", options)
    assert Stub.requests[0]["messages"][0]["content"].endswith("RESPONSE={answer} {question}\nScore: 3 ?")
    judged("x" * 5000 + "\nScore: 2", options, max_characters=100)
    content = Stub.requests[1]["messages"][0]["content"]
    assert "[... 4909 characters left out ...]" in content and len(content) < 300


@pytest.mark.parametrize(
    ("completion", "more", "error", "message"),
    [
        ("lost", {"retries": 1}, ConnectionError, "after 2 attempts: RemoteDisconnected"),
        ("denied", {}, ConnectionError, r"HTTP status 401: wrong key: Bearer \*\*\*$"),
        ("hangs", {"retries": 100, "timeout_s": 0.25}, TimeoutError, "no answer within 0.25 s "),
        ("later", {}, TimeoutError, r"no answer within 8 s \(HTTP status 429\)"),  # which would come in 1000 s
        ("html", {}, ValueError, "is no chat completion: b'<html>'"),
        ("echoes", {}, ValueError, r"is no chat completion: b'Bearer \*\*\*'"),
        ("I like it", {}, ValueError, "has no verdict that `pattern` finds; it ends with 'I like it'"),
        ("Score: 11", {}, ValueError, "verdict 11 is not between 0 and 10"),
        ("Score: 5", {"low": 5, "high": 5}, ValueError, "low=5 must be below high=5"),
        ("Score: 5", {"base_url": "file:///etc"}, ValueError, "is no http address"),
        ("Score: 5", {"base_url": f"http://me:{KEY}@host/v1"}, ValueError, "holds a user or password"),
        ("Score: 5", {"api_key_env": "NO_SUCH_KEY"}, ValueError, "'NO_SUCH_KEY': this environment variable is not set"),
        ("Score: 5", {"api_key_env": "BAD_KEY"}, ValueError, "'BAD_KEY' holds characters that no HTTP header may have"),
        ("Score: 5", {"prompt": "/no/such/file"}, OSError, "No such file"),
    ],
)
def test_failures(
    options: dict[str, Any],
    completion: str,
    more: dict[str, Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BAD_KEY", f"{KEY}\r\nX: y")
    with pytest.raises(error, match=message) as raised:
        judged(completion, options, **more)
    assert KEY not in str(raised.value)
    assert not judge._verdicts


def test_a_prompt_that_cannot_be_used(options: dict[str, Any], tmp_path: Path) -> None:
    for text, message in (
        ("{answer}", "has no field {response}"),
        ("{response}" * 40_000, "has 400,000 bytes; at most 262,144"),
    ):
        path = tmp_path / f"{len(text)}.txt"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            judged("Score: 5", options, prompt=str(path))
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="zero' is a device, not a regular file"):
        judged("Score: 5", options, prompt=str(tmp_path / "zero"))
    assert "Score: N" in judge._template(str(EXAMPLE))


def test_in_workers_alone_and_as_a_component(options: dict[str, Any]) -> None:
    """Each worker asks by itself; the judge's failure is the sample's, with its own status."""
    part = {"name": "judge", "function": "judge", "weight": 2.0, "gate": None, "kwargs": {**options, "timeout_s": 60}}
    with RewardPool(2, 300.0, {**options, "retries": 1}, [part]) as pool:
        names = [("judge", "Score: 7"), (COMPOSITE, "Score: 7"), ("judge", "lost"), ("judge", "Score: 99")]
        results = pool.grade([(name, text, "42", "1 + 1 =") for name, text in names])
    assert [result.status for result in results] == ["ok", "ok", "error", "error"]
    assert [result.reward for result in results[:2]] == [0.7, 1.4]
    assert (results[1].metrics["judge"], results[1].metrics["judge/verdict"]) == (0.7, 7.0)
    assert "1 + 1 =" in Stub.requests[0]["messages"][0]["content"]
    assert KEY not in "".join(result.message for result in results)


def test_a_rubric_is_a_weighted_mean_and_needs_every_criterion(options: dict[str, Any]) -> None:
    rubric = {"Is right": 3, "shows (all) steps": 1.0}
    reply = "**Is right**: 2\n- is right: 8\nShows (all) steps = 4"  # the last line of a name counts
    result = judged(reply, options, criteria=rubric)
    assert result["score"] == pytest.approx((3 * 8 + 4) / 4 / 10) and result["attempts"] == 1
    assert {key: result[key] for key in result if "criterion" in key} == {
        "criterion/Is right": 8,
        "criterion/shows (all) steps": 4,
    }
    assert judged(reply, options, criteria=rubric)["cached"] == 1
    assert judged(reply, options, criteria={"is right": 1})["attempts"] == 1  # another rubric is another question
    with pytest.raises(ValueError, match="no line .shows .all. steps: NUMBER"):
        judged("Is right: 8\nShows: 4", options, criteria=rubric)
    with pytest.raises(ValueError, match="11 is not between 0 and 10"):
        judged("Is right: 11\nShows (all) steps: 4", options, criteria=rubric)
    for wrong in ({"a": 0}, {"a": -1.0}, {"a": "1"}):
        with pytest.raises(ValueError, match="a weight above 0"):
            judged("a: 1", options, criteria=wrong)
    Path(options["prompt"]).with_name("rubric.txt").write_text("One line for each of:\n{criteria}\nRESPONSE={response}")
    judged(reply, {**options, "prompt": options["prompt"].replace("judge.txt", "rubric.txt")}, criteria=rubric)
    assert "of:\nIs right\nshows (all) steps\n" in Stub.requests[-1]["messages"][0]["content"]
