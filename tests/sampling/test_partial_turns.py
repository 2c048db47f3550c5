"""Partial rollouts of trajectories: each is trained once, none is lost, and a resumed run repeats what was under way."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from grpo_megatron.config import DataConfig, RolloutConfig
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.sampling.collector import Clock, numbered_samples
from grpo_megatron.sampling.multi_turn import Answer, Times, TrajectoryGenerator
from grpo_megatron.sampling.partial import PartialTrajectories
from grpo_megatron.types import BRANCH, Sample
from tests.fakes import FakeAnswers, FakeEngine, LoneMesh
from tests.sampling.test_trajectory_generator import Numbers, prompts

STEPS, BATCH = 6, 4


class SlowRows(FakeAnswers):
    """Rows 1 and 9 of 16 take seven turns, which are three sequences; the others take one. `salt`: in every answer."""

    def __init__(self, salt: int = 0) -> None:
        super().__init__()
        self.times, self.salt, self.num_starts = Times(), salt, 0

    def start(self, trajectories: Any) -> None:
        self.num_starts += len(trajectories)
        self.open |= {t.key for t in trajectories}
        self.asked |= {t.key for t in trajectories}

    def _answer(self, t: Any) -> Answer:
        self.done_after = 7 if t.row["number"] % 8 == 1 else 1
        answer = super()._answer(t)
        if t.turns and t.num_generated in (2, 5) and not answer.done:
            return Answer([1, 2, t.num_generated], reward=0.5, branch=True)
        if self.salt and answer.token_ids:
            answer.token_ids[0] += self.salt
        return answer

    def end(self, trajectories: Any) -> None:
        for t in trajectories:
            self.open.discard(t.key)
            self.asked.discard(t.key)


def collector(salt: int = 0, **partial: Any) -> PartialTrajectories:
    multi_turn = {"max_assistant_turns": 9, "latency_ticks": 2, "failed": "keep", "environment": "tools"}
    shared = {"over_sample": 1.5, "max_staleness": 2, **partial}
    rollout = RolloutConfig.model_validate({"n": 2, "seed": 9, "multi_turn": multi_turn, "partial": shared})
    engine: Any = FakeEngine()
    answers: Any = SlowRows(salt)
    answers.multi_turn = rollout.multi_turn
    generator = TrajectoryGenerator(
        engine,
        None,
        Numbers(),
        LoneMesh(),
        rollout,
        lambda: f"digest {engine.version}",
        answers=answers,
        gives_rewards=True,
        max_prompt_length=8,
    )
    sampler = Sampler(prompts(*range(16)), BATCH, shuffle=False)
    clock = Clock(num_steps=STEPS)
    return PartialTrajectories(generator, sampler, DataConfig(max_response_length=200), rollout, clock=clock)


def taken(made: PartialTrajectories, step: int, rows: list[Any] | None = None) -> list[Sample]:
    made.generator.engine.version, metrics = step, Metrics()  # type: ignore[misc]
    groups = made.groups(step, BATCH, metrics)
    assert len(groups) == BATCH and all(step - group.version <= made.partial.max_staleness for group in groups)
    if rows is not None:
        rows.append({k.removeprefix("rollout/partial/"): v for k, v in metrics.reduce().items()})
    return numbered_samples(groups)


def content(samples: list[Sample]) -> list[Any]:
    return [
        (
            s.prompt.uid,
            s.index,
            s.prompt.prompt_ids,
            s.response_ids,
            s.loss_mask,
            s.segments,
            s.reward,
            s.seed,
            s.status,
        )
        for s in samples
    ]


def test_every_trajectory_is_trained_once_and_none_is_left() -> None:
    """24 groups of 2 in 6 steps. Rows 1 and 9, of seven turns, are trained one or two steps after they began."""
    made, rows = collector(), list[Any]()
    steps = [taken(made, step, rows) for step in range(STEPS)]
    ends = [(s.seed, s.index) for samples in steps for s in samples if s.index < BRANCH]
    assert len(ends) == len(set(ends)) == STEPS * BATCH * 2 and made.cursor == STEPS * BATCH and not made.waiting
    answers: Any = made.generator.answers
    assert not answers.open and answers.num_starts == len(ends)
    assert [row["waiting_groups"] for row in rows] == [2, 2, 2, 2, 2, 0]
    assert max(row["waiting_responses"] for row in rows) == 4 and rows[-1]["waiting_age_max"] == 0
    assert {row["waiting_age_max"] for row in rows} == {0, 1}
    slow = [s for samples in steps for s in samples if s.prompt.uid in ("p/1", "p/9")]
    assert {s.index // BRANCH for s in slow} == {0, 1, 2} and any(len(s.segments) > 1 for s in slow)
    for s in (s for samples in steps for s in samples):
        assert [seg.start for seg in s.segments] == [0, *(seg.end for seg in s.segments[:-1])]
        assert s.segments[-1].end == len(s.response_ids) and s.version == s.segments[0].version
        assert all(seg.weights_digest == f"digest {seg.version}" for seg in s.segments)
        assert [t.version for t in s.turns] == [
            seg.version for seg in s.segments for t in s.turns if seg.start <= t.start < seg.end
        ]


def test_what_is_sampled_does_not_depend_on_the_steps() -> None:
    """The engine's answers follow from prompt and seed, so a trajectory of several steps is that of one."""
    one, several = collector(over_sample=2.0, chunk_turns=8), collector()
    texts = [
        {(s.prompt.uid, s.index, s.seed): (s.prompt.prompt_ids, s.response_ids, s.reward) for s in samples}
        for samples in (taken(one, 0), [s for step in range(3) for s in taken(several, step)])
    ]
    common = texts[0].keys() & texts[1].keys()
    assert len(common) >= 8 and all(texts[0][key] == texts[1][key] for key in common)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_resumed_run_repeats_what_was_under_way(at: int) -> None:
    whole, first, second = collector(), collector(), collector()
    expected = [content(taken(whole, step)) for step in range(STEPS)]
    assert [content(taken(first, step)) for step in range(at)] == expected[:at]
    state = json.dumps(first.state())
    second.load_state(json.loads(state))
    assert [content(taken(second, step)) for step in range(at, STEPS)] == expected[at:]
    assert json.dumps(second.state()) == json.dumps(whole.state())


def test_a_checkpoint_keeps_turns_that_no_step_has_repeated_and_tokens_whose_ids_are_unknown() -> None:
    """A resumed run may save before a step samples: left-over groups of dynamic sampling fill it."""
    first, second = collector(), collector()
    taken(first, 0)
    for trajectory in (one for group in first.waiting for one in group.under_way.values()):
        completion = trajectory.record[0][0]
        completion.kept.extend([None, *[np.array([3, 4], dtype=np.int32)] * (len(completion.response_ids) - 1)])
    state = json.dumps(first.state())
    second.load_state(json.loads(state))
    assert json.dumps(second.state()) == state
    second.generator.engine.version = 1  # type: ignore[misc]
    second._advance(second.waiting, 1)
    repeated = [one.record[0][0].kept for group in second.waiting for one in group.under_way.values()]
    assert len(repeated) == 2 and all(unknown is None and len(known) for unknown, known, *_ in repeated)


def test_an_environment_that_does_not_repeat_its_answers_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    first, second = collector(), collector(salt=64)
    taken(first, 0)
    second.load_state(json.loads(json.dumps(first.state())))
    samples = [s for step in range(1, STEPS) for s in taken(second, step)]
    assert "2 of 2 trajectories under way begin again" in caplog.text
    restarted = [s for s in samples if s.prompt.uid == "p/1" and s.segments[0].version == 1]
    assert restarted and not any(s.segments[0].version == 0 for s in samples if s.prompt.uid == "p/1")
    ends = [(s.seed, s.index) for s in samples if s.index < BRANCH]
    assert len(set(ends)) == len(ends) == (STEPS - 1) * BATCH * 2


def test_groups_that_are_too_old_release_their_environments() -> None:
    """Dynamic sampling calls in no step that left-over groups fill."""
    made, rows = collector(max_staleness=1), list[Any]()
    taken(made, 0)
    answers: Any = made.generator.answers
    assert len(answers.open) == 2
    taken(made, 3, rows)
    assert rows[0]["dropped_groups"] == 2 and not any("p/1#" in key for key in answers.open)
