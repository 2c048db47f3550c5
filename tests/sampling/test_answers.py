"""Answers of environments as tokens: what they read, how their messages are cut and rendered, and how they fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_megatron.config import ConfigError, MultiTurnConfig
from grpo_megatron.environments.environment import Outcome, Step
from grpo_megatron.rollout.engine import Completion
from grpo_megatron.sampling.multi_turn import EnvironmentAnswers, EnvironmentsLost, shorten
from grpo_megatron.types import ENDINGS
from tests.fakes import LoneMesh, trajectory

EOS = 0


class Characters:
    """One token per character: its code. Token 0 ends a sequence."""

    eos_token_id = EOS

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"offset_mapping": [(i, i + 1) for i in range(len(text))]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join("<eos>" if i == EOS else chr(i) for i in ids)


class FakeRenderer:
    tokenizer, end_of_turn, turn_ends, rewrites = Characters(), EOS, {EOS}, False

    def prompt(self, messages: list[Any], tools: list[Any] = []) -> list[int]:  # noqa: B006
        return [ord(letter) for message in messages for letter in message["content"]]

    def answered(self, message: Any) -> Any:
        return {**message, "content": message["content"].replace("<eos>", "< eos>")}

    def observation(self, messages: list[Any], *, ended_with_eos: bool) -> list[int]:
        if any(message["role"] == "stranger" for message in messages):
            raise ConfigError("unknown role 'stranger'")
        return [*([] if ended_with_eos else [EOS]), *self.prompt(messages)]


class FakePool:
    """Answers with the outcomes of a script. Records the calls."""

    def __init__(self, *outcomes: Outcome, broken_in: str = "") -> None:
        self.outcomes, self.broken_in = list(outcomes), broken_in
        self.calls: list[Any] = []

    def _called(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name == self.broken_in:
            raise RuntimeError("environment workers do not start")

    def start(self, key: str, row: Mapping[str, Any], seed: int) -> None:
        self._called("start", key, row, seed)

    def step(self, key: str, completion: str) -> None:
        self._called("step", key, completion)

    def wait(self, keys: Iterable[str]) -> dict[str, Outcome]:
        self._called("wait")
        return {key: self.outcomes.pop(0) for key in keys}

    def end(self, keys: Iterable[str]) -> None:
        self._called("end", *keys)


def said(content: str, role: str = "user", **step: Any) -> Outcome:
    return Outcome(Step([{"role": role, "content": content}], **step), seconds=0.5)


def answers_of(*outcomes: Outcome, broken_in: str = "", **multi_turn: Any) -> tuple[EnvironmentAnswers, FakePool]:
    pool: Any = FakePool(*outcomes, broken_in=broken_in)
    renderer: Any = FakeRenderer()
    return EnvironmentAnswers(pool, renderer, MultiTurnConfig(**multi_turn), LoneMesh()), pool


def ask(answers: EnvironmentAnswers, text: str, end: list[int]) -> Any:
    """The answer to one turn after a prompt."""
    t = trajectory(4)
    answers.start([t])
    (first,) = answers.take([t])
    t.begin(first)
    ids = [*map(ord, text), *end]
    t.generated(Completion(ids, [-1.0] * len(ids), "stop"), 1)
    answers.ask(t)
    return answers.take([t])[0]


def test_an_environment_reads_its_row_and_turns_without_the_token_that_ends_them() -> None:
    answers, pool = answers_of(said("question"), said("ok", reward=0.5, metrics={"calls": 1.0, "tool_seconds": 0.25}))
    answer = ask(answers, "2+2", [EOS])
    assert pool.calls == [("start", "t4", {"number": 4}, 7), ("wait",), ("step", "t4", "2+2"), ("wait",)]
    assert (answer.token_ids, answer.reward, answer.done) == ([ord("o"), ord("k")], 0.5, False)
    assert answer.metrics == {"calls": 1.0}  # times differ between equal runs
    assert (answers.times.calls, dict(answers.times.seconds)) == (2, {"environment_call": 1.0, "tool_seconds": 0.25})


def test_a_turn_that_did_not_end_itself_is_ended_by_the_observation() -> None:
    answers, pool = answers_of(said("question"), said("ok"))
    assert ask(answers, "call>", []).token_ids == [EOS, ord("o"), ord("k")]
    assert ("step", "t4", "call>") in pool.calls
    answers, _ = answers_of(said("question"), said("bye", role="stranger", done=True))  # after the last step: nothing
    assert (answer := ask(answers, "x", [EOS])).done and answer.token_ids == []


@pytest.mark.parametrize(
    ("outcome", "status", "message"),
    [
        (Outcome(None, "timeout", "why"), "timeout", "why"),
        (said("hello", role="stranger"), "raised", "its messages cannot be rendered: unknown role 'stranger'"),
    ],
)
def test_a_failure_becomes_a_status(outcome: Outcome, status: str, message: str) -> None:
    answers, _ = answers_of(said("question"), outcome)
    answer = ask(answers, "x", [EOS])
    assert (answer.status, answer.message, answer.token_ids) == (status, message, [])


@pytest.mark.parametrize("step", [Step([]), Step([{"role": "user", "content": "x"}], done=True), None])
def test_what_has_no_tokens_or_cannot_be_tokenized_is_no_prompt(step: Step | None) -> None:
    """The engine would refuse an empty prompt on all ranks, and the tokenizer raises what it likes."""
    answers, _ = answers_of(said("question") if step is None else Outcome(step))
    if step is None:
        answers.renderer.prompt = lambda *_: [][0]  # type: ignore[method-assign]
    [answer] = answers.take([trajectory(4)])
    words = "cannot be rendered: IndexError" if step is None else "are no token"
    assert answer.status == "raised" and words in answer.message


@pytest.mark.parametrize("status", ENDINGS)
@pytest.mark.parametrize("finishes", [True, False])
def test_an_environment_that_finishes_is_asked_where_a_limit_has_ended_it(status: str, finishes: bool) -> None:
    """Not where it ended the trajectory itself, or failed. The reward comes behind the last turn."""
    graded = Outcome(Step([], reward=0.25, done=True, metrics={"graded": 1.0}), seconds=0.5)
    environment = "folders" if finishes else "tools"
    answers, pool = answers_of(said("question"), graded, environment=environment)
    t = trajectory(4)
    answers.start([t])
    t.begin(answers.take([t])[0])
    t.generated(Completion([1, 2, EOS], [-1.0] * 3, "stop"), 1)
    t.status, t.finish_reason = status, "length" if status == "length" else "stop"
    assert answers.ask_to_finish(t) is (finishes and status in ("turn_limit", "length"))
    if finishes and status in ("turn_limit", "length"):
        assert pool.calls[-1] == ("step", t.key, None)  # type: ignore[attr-defined]
        t.finished(answers.take([t])[0])
        assert (t.turn_rewards, t.metrics, t.status) == ([(2, 0.25)], {"graded": 1.0}, status)


@pytest.mark.parametrize("broken_in", ["start", "step", "wait", "end"])
def test_when_the_workers_cannot_run_the_next_take_says_so_on_all_ranks(broken_in: str) -> None:
    answers, _ = answers_of(said("question"), said("ok"), said("ok"), broken_in=broken_in)
    with pytest.raises(EnvironmentsLost, match="workers do not start"):
        ask(answers, "x", [EOS])
        answers.end([trajectory(4)])
        answers.take([])


def test_ranks_without_workers_take_what_the_leader_sends() -> None:
    leader, _ = answers_of(said("question"))
    mesh: Any = SimpleNamespace(replica_broadcast=lambda value: sent)
    follower = EnvironmentAnswers(None, leader.renderer, leader.multi_turn, mesh)
    t = trajectory(4)
    leader.start([t])
    follower.start([t])
    sent = (leader.take([t]), None)
    assert follower.take([t]) == sent[0] and follower.times.calls == 0


@pytest.mark.parametrize(
    ("side", "expected"),
    [("right", "01234..."), ("left", "...56789"), ("middle", "012...89"), ("middle", "0123456789")],
)
def test_contents_are_cut_to_tokens(side: Any, expected: str) -> None:
    limit = 10 if expected.isdigit() else 5
    assert shorten("0123456789", Characters(), limit, side) == expected
    answers, _ = answers_of(
        said("question"), said("0123456789"), max_tool_response_length=limit, tool_response_truncate_side=side
    )
    assert "".join(map(chr, ask(answers, "x", [EOS]).token_ids)) == expected


def test_a_cut_counts_tokens_that_were_broken_up() -> None:
    answers, _ = answers_of(said("question"), said("<eos><eos>"), max_tool_response_length=10)
    assert "".join(map(chr, ask(answers, "x", [EOS]).token_ids)) == "< eos... eos>"
