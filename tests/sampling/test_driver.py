"""The driver with stand-ins for engine and environments: what is served when, and how trajectories end."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grpo_megatron.rollout.engine import Completion, Truncation, stable_hash
from grpo_megatron.sampling.multi_turn import Answer, Trajectory, play
from tests.fakes import END, LIMITS, FakeAnswers, FakeEngine, trajectory


def played(
    count: int = 6, latency: int = 2, width: int = 3, answers: Any = None, **changes: Any
) -> tuple[list[Trajectory], FakeEngine, Any]:
    engine, answers = FakeEngine(width), answers or FakeAnswers()
    trajectories = [trajectory(i, **changes) for i in range(count)]
    ended = [t for tick in play(trajectories, engine, answers, 3, latency) for t in tick]  # type: ignore[arg-type]
    assert not engine.queue and not answers.open and not answers.asked
    assert sorted(t.key for t in ended) == [t.key for t in trajectories]
    return trajectories, engine, answers


def content(t: Trajectory) -> Any:
    """Everything but the logical times, which depend on the other trajectories."""
    turns = [replace(turn, clock=0) for turn in t.turns]
    return t.prompt_ids, t.response_ids, t.logprobs, turns, t.turn_rewards, t.metrics, t.status, t.finish_reason


def test_the_next_prompt_is_all_tokens_so_far() -> None:
    trajectories, engine, _ = played()
    for t in trajectories:
        assert (t.status, t.finish_reason, t.num_generated) == ("ok", "stop", 3)
        requests = [request for key, request in engine.requests if key == t.key]
        whole = (*t.prompt_ids, *t.response_ids)
        starts = [turn.start for turn in t.turns if turn.kind == "assistant"]
        assert [r.prompt_ids for r in requests] == [whole[: len(t.prompt_ids) + start] for start in starts]
        assert [r.max_tokens for r in requests] == [LIMITS.response - start for start in starts]
        assert [r.seed for r in requests] == [t.seed, stable_hash(f"{t.seed}/1"), stable_hash(f"{t.seed}/2")]
        assert [turn.kind for turn in t.turns] == ["assistant", "observation"] * 2 + ["assistant"]
        assert [turn.start for turn in t.turns[1:]] == [turn.end for turn in t.turns[:-1]]
        assert t.turns[-1].end == len(t.response_ids) == len(t.logprobs) == len(t.loss_mask())
        assert [bool(p) for p in t.logprobs] == [bool(m) for m in t.loss_mask()]
        assert t.metrics == {"calls": 3.0}
        ends = [turn.end - 1 for turn in t.turns if turn.kind == "assistant"]
        assert [token for token, _ in t.turn_rewards if token in ends] == [token for token, _ in t.turn_rewards]
    assert any(t.turn_rewards for t in trajectories)


def test_tokens_do_not_depend_on_neighbours_width_or_latency() -> None:
    expected = [content(t) for t in played()[0]]
    for width, latency in itertools.product((1, 2, 9), (1, 8)):
        assert [content(t) for t in played(width=width, latency=latency)[0]] == expected
    alone = []
    for number in range(6):
        engine, answers = FakeEngine(), FakeAnswers()
        list(play([one := trajectory(number)], engine, answers, 3, 2))  # type: ignore[arg-type]
        alone.append(content(one))
    assert alone == expected


def test_an_answer_is_taken_at_its_tick_and_not_before() -> None:
    """One by one (width 1), so that others are being generated while an answer waits."""
    for latency in (1, 3):
        trajectories, _, _ = played(width=1, latency=latency)
        for t in trajectories:
            gaps = [b.clock - a.clock for a, b in itertools.pairwise(t.turns) if b.kind == "observation"]
            assert all(gap >= latency for gap in gaps)
        assert min(t.turns[1].clock - t.turns[0].clock for t in trajectories) == latency
    [t], engine, _ = played(count=1, latency=50)  # when nothing is generated, the clock jumps
    assert len(engine.batches) == sum(turn.end - turn.start for turn in t.turns if turn.kind == "assistant")
    assert next(b.clock - a.clock for a, b in itertools.pairwise(t.turns)) == 50


def test_the_clock_jumps_to_the_earliest_answer() -> None:
    """Answers are due after 50 ticks, and turns take 7 at most: nothing is generated while two answers of several ticks wait."""
    trajectories, _, _ = played(count=2, latency=50)
    first, second = (t.turns[0].clock for t in trajectories)
    assert first != second
    for t in trajectories:
        assert next(b.clock - a.clock for a, b in itertools.pairwise(t.turns) if b.kind == "observation") == 50


@pytest.mark.parametrize("status", ["timeout", "died", "raised", "flooded", "memory"])
def test_a_failed_environment_ends_its_own_trajectory(status: str) -> None:
    expected, _, _ = played()
    got, _, _ = played(answers=FakeAnswers(fail={("t1", 0): status, ("t4", 2): status}))
    assert [content(t) for i, t in enumerate(got) if i not in (1, 4)] == [
        content(t) for i, t in enumerate(expected) if i not in (1, 4)
    ]
    assert (got[1].status, got[1].finish_reason, got[1].turns, got[1].message) == (status, "stop", [], "why")
    assert (got[4].status, got[4].num_generated) == (status, 2)
    assert expected[4].response_ids[: len(got[4].response_ids)] == got[4].response_ids
    assert got[4].turns[-1].kind == "assistant"


def test_when_no_environment_can_run_nothing_stays_in_the_engine() -> None:
    engine, answers = FakeEngine(), FakeAnswers(fail={("t2", 1): "lost"})
    with pytest.raises(RuntimeError, match="no worker can run"):
        list(play([trajectory(i) for i in range(6)], engine, answers, 3, 1))  # type: ignore[arg-type]
    assert not engine.queue and engine.aborted


def test_kept_ids_stay_with_their_tokens() -> None:
    """Two turns with an observation between them, which was not sampled; another conversation begins without any."""
    t, ids = trajectory(0, truncation=Truncation(top_k=2, max_kept=18)), [np.array([n], np.int32) for n in (5, 6, 7)]
    t.begin(Answer([1]))
    t.generated(Completion([5, 6], [-1.0, -1.0], "stop", kept=[ids[0], None]), 1)
    t.answered(Answer([8, 9]), 2)
    t.generated(Completion([7], [-1.0], "stop", kept=[ids[2]]), 3)
    assert t.request().max_kept == 18 and t.request().top_k == 2
    assert [None if one is None else one.tolist() for one in t.kept] == [[5], None, [], [], [7]]
    t._branch(Answer([1, 2]), 4)
    assert t.kept == [] and len(t.branches[0].kept) == 5


def test_a_trajectory_ends_at_the_limit_of_turns() -> None:
    trajectories, _, _ = played(answers=FakeAnswers(done_after=99))
    assert {t.status for t in trajectories} == {"turn_limit"}
    assert {t.num_generated for t in trajectories} == {LIMITS.turns}
    assert all(
        t.turns[-1].kind == "assistant" and t.finish_reason == "stop" for t in trajectories
    )  # nothing is cut off
    assert {t.metrics["calls"] for t in trajectories} == {4.0}  # the last turn was shown to the environment


@pytest.mark.parametrize("response", range(1, 24))
def test_no_response_is_longer_than_its_limit(response: int) -> None:
    limits = replace(LIMITS, response=response)
    trajectories, engine, _ = played(answers=FakeAnswers(done_after=99), limits=limits)
    assert all(request.max_tokens >= 1 for _, request in engine.requests)
    for t in trajectories:
        assert len(t.response_ids) <= response
        assert (t.status, t.finish_reason) in {("length", "length"), ("turn_limit", "stop")}
        assert t.turns[-1].kind == "assistant"  # an observation that no turn follows is left out


def test_an_observation_leaves_room_for_one_token_and_a_prompt_may_be_too_long() -> None:
    t = trajectory(0, limits=replace(LIMITS, response=6))
    t.begin(Answer([1]))
    t.generated(Completion([5, END], [-1.0, -1.0], "stop"), 1)
    full = replace(t, response_ids=[*t.response_ids], logprobs=[*t.logprobs], turns=[*t.turns])
    t.answered(Answer([7, 7, 7]), 2)
    assert not t.is_over and t.request().max_tokens == 1
    full.answered(Answer([7, 7, 7, 7]), 2)
    assert (full.status, len(full.response_ids)) == ("length", 2)
    t = trajectory(0)
    t.begin(Answer([1] * 9))
    assert (t.status, t.finish_reason, t.response_ids) == ("prompt_length", "length", [])


def test_an_environment_that_finishes_grades_what_a_limit_has_ended() -> None:
    """By the limit of turns, and by that of tokens; not where it has said `done` or has failed. Tokens stay what they were."""
    for changes in ({"limits": replace(LIMITS, turns=2)}, {"limits": replace(LIMITS, response=9)}, {}):
        plain, _, _ = played(**changes)  # type: ignore[arg-type]
        answers = FakeAnswers(fail={("t5", 1): "died"})
        answers.finishes = True
        graded, _, _ = played(answers=answers, **changes)  # type: ignore[arg-type]
        for one, other in zip(plain[:5], graded[:5], strict=True):
            is_cut = one.status in ("turn_limit", "length")
            if is_cut and one.last_turn:
                one.turn_rewards.append((one.last_turn[1] - 1, 0.25))
                one.metrics["graded"] = 1.0
            assert content(other) == content(one)
        assert graded[5].status == "died" and "graded" not in graded[5].metrics
        assert {t.status for t in plain} != {"ok"} or not changes
    answers = FakeAnswers(fail={("t0", 2): "timeout"})
    answers.finishes, calls = True, replace(LIMITS, turns=2)
    assert played(answers=answers, limits=calls)[0][0].status == "timeout"  # it failed in its last call
