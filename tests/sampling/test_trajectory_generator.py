"""From trajectories to samples: seeds, the cut over blocks, rewards of turns and of the last turn, failed environments."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from grpo_megatron.config import RolloutConfig
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.step import record_samples
from grpo_megatron.rewards.reward import RewardResult
from grpo_megatron.sampling.multi_turn import Answer, Times, TrajectoryGenerator
from grpo_megatron.types import BRANCH, GREEDY, Prompt, Sample
from tests.fakes import FakeAnswers, FakeEngine, FakeRewardPool, LoneMesh


class Numbers:
    """Token n is the text "n "."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(f"{i} " for i in ids)


def prompts(*numbers: int) -> list[Prompt]:
    return [Prompt(f"p/{n}", (9,), "as loaded", "a", "task", "r", {"row": {"number": n}}) for n in numbers]


def draw(
    *numbers: int,
    n: int = 2,
    mesh: Any = None,
    fail: Any = None,
    pool: Any = None,
    failed: str = "keep",
    **changes: Any,
) -> tuple[list[Sample], FakeEngine, Metrics]:
    engine: Any = FakeEngine()
    answers: Any = FakeAnswers(fail=fail)
    answers.times = Times(calls=2, waited=1.0)
    multi_turn = {"max_assistant_turns": 4, "latency_ticks": 2, "failed": failed}
    rollout = RolloutConfig.model_validate({"seed": 9, "multi_turn": multi_turn})
    answers.multi_turn = rollout.multi_turn
    generator = TrajectoryGenerator(
        engine,
        pool,
        Numbers(),
        mesh or LoneMesh(),
        rollout,
        lambda: "d9",
        answers=answers,
        gives_rewards=pool is None,
        max_prompt_length=8,
    )
    arguments: dict[str, Any] = {"round_id": 4, "version": 3, "max_tokens": 40, "temperature": 0.7, **changes}
    metrics = Metrics()
    samples = generator.sample(prompts(*numbers), n, metrics=metrics, **arguments)
    assert not answers.open
    return samples, engine, metrics


def key(number: int, index: int, round_id: int = 4) -> str:
    return f'[{round_id}, "p/{number}#0", {index}]'


def ends(sample: Sample) -> list[int]:
    return [turn.end - 1 for turn in sample.turns if turn.kind == "assistant"]


def test_a_group_shares_its_environments_seed() -> None:
    seeds = {}

    class Watched(FakeAnswers):
        def start(self, trajectories: Any) -> None:
            seeds.update({t.key: t.environment_seed for t in trajectories})
            super().start(trajectories)

    for round_id in (4, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{__name__}.FakeAnswers", Watched)
            draw(1, 2, 1, round_id=round_id, greedy=True)
    assert len(seeds) == 2 * 3 * 3
    assert len(set(seeds.values())) == 2 * 3  # per sample: two prompts, one of them twice
    assert seeds[key(1, 0)] == seeds[key(1, 1)] == seeds[key(1, GREEDY)] != seeds[key(2, 0)]


def test_greedy_trajectories_are_drawn_at_temperature_0() -> None:
    samples, engine, _ = draw(1, greedy=True)
    assert [sample.index for sample in samples] == [GREEDY, 0, 1]
    assert {k: r.temperature for k, r in engine.requests} == {key(1, GREEDY): 0.0, key(1, 0): 0.7, key(1, 1): 0.7}


def test_an_environment_that_grades_gives_the_sum_over_its_turns() -> None:
    samples, _, _ = draw(1, 2, n=4)
    assert len({sample.reward for sample in samples}) > 1
    lines, (first, second) = samples[0].text.splitlines(), samples[0].turns[:2]  # as the log shows it
    assert lines[0] == f"[assistant, {first.end} tokens]" and lines[-1] == "[ok]"
    assert lines[1] == Numbers().decode(samples[0].response_ids[: first.end], False)
    assert lines[2] == f"[observation, {second.end - second.start} tokens]"
    for sample in samples:
        assert sample.reward == 0.5 * len(sample.turn_rewards)
        assert sample.steps == sample.turn_rewards
        assert {token for token, _ in sample.turn_rewards} <= set(ends(sample))
        assert sample.prompt.prompt_ids == (1, 2, sample.prompt.extra["row"]["number"])  # type: ignore[index]
        assert sample.prompt.text == f"1 2 {sample.prompt.prompt_ids[2]} "
    assert {(s.version, s.weights_digest) for s in samples} == {(3, "d9")}


def test_a_reward_function_reads_the_last_turn_and_adds_to_what_turns_have_earned() -> None:
    pool = FakeRewardPool(lambda text, number: RewardResult(1.0, {"acc": 1.0}))
    samples, _, _ = draw(1, 2, n=4, pool=pool)
    texts = [Numbers().decode(s.response_ids[s.turns[-1].start : s.turns[-1].end], True) for s in samples]
    assert sorted(item.completion for item in pool.items) == sorted(texts)
    for sample in samples:
        last = sample.turns[-1]
        assert sample.reward == 1.0 + 0.5 * len(sample.turn_rewards)
        assert sample.reward_metrics["acc"] == 1.0
        assert not sample.steps or math.isclose(sum(reward for _, reward in sample.steps), sample.reward)
        assert not sample.steps or sample.steps[-1][0] == last.end - 1
    assert any(sample.steps for sample in samples)
    pool.grade = lambda text, number: RewardResult(1.0, steps=((1, 0.25),))  # its steps are in the last turn
    samples, _, _ = draw(1, 2, pool=pool)
    assert [sample.steps for sample in samples] == [[(sample.turns[-1].start, 0.25)] for sample in samples]


@pytest.mark.parametrize("failed", ["keep", "mask"])
def test_trajectories_whose_environment_failed_are_kept_or_masked(failed: str) -> None:
    samples, _, _ = draw(1, 2, fail={(key(1, 1), 2): "died", (key(2, 0), 0): "timeout"}, failed=failed)
    assert [sample.status for sample in samples] == ["ok", "died", "timeout", "ok"]
    assert samples[1].response_ids and math.isfinite(samples[1].reward) == (failed == "keep")
    assert samples[1].reward_failure and not samples[0].reward_failure
    never_began = samples[2]
    assert math.isnan(never_began.reward) and never_began.response_ids == [] and never_began.prompt.text == "as loaded"


class Branching(FakeAnswers):
    """After the first turn of each sequence, a whole prompt that is too long for one; three sequences, then the end."""

    def _answer(self, t: Any) -> Answer:
        self.asked.remove(t.key)
        if not t.turns:
            return Answer([1, 2, t.row["number"]])
        if t.num_generated == 3:
            return Answer([], reward=0.25 + json.loads(t.key)[2], done=True)
        return Answer([50 + t.num_generated] * 10, reward=0.5, branch=True)


@pytest.mark.parametrize("graded", [False, True])
def test_a_branch_is_a_sample_with_the_reward_of_the_end(monkeypatch: pytest.MonkeyPatch, graded: bool) -> None:
    """Prompts have 8 tokens: of the 10 of a branch, two are an observation."""
    monkeypatch.setattr(f"{__name__}.FakeAnswers", Branching)
    pool = FakeRewardPool(lambda text, number: RewardResult(0.0)) if graded else None
    samples, engine, _ = draw(1, greedy=True, pool=pool)
    assert [sample.index for sample in samples] == [GREEDY, 0, 1, BRANCH, BRANCH + 1, 2 * BRANCH, 2 * BRANCH + 1]
    assert [sample.reward for sample in samples] == [0.25, 1.25, 2.25] + 2 * [
        1.25,
        2.25,
    ]  # the branches' turns earn 0.5
    assert [s.prompt.prompt_ids for s in samples[1::2]] == [(52,) * 8, (1, 2, 1), (51,) * 8]
    assert samples[1].response_ids[:2] == [52, 52] and samples[5].response_ids[:2] == [51, 51]
    assert [s.turns[0].kind for s in samples[1::2]] == ["observation", "assistant", "observation"]
    assert all(
        s.loss_mask == [int(t.kind == "assistant") for t in s.turns for _ in range(t.start, t.end)] for s in samples
    )
    assert {s.status for s in samples} == {"ok"} and [len(s.turn_rewards) for s in samples] == [1] * 7
    assert len({request.seed for _, request in engine.requests}) == 9  # each turn has samples of its own
    if pool is not None:
        assert len(pool.items) == 3  # a branch is not graded


def test_metrics_are_means_over_trajectories() -> None:
    samples, _, metrics = draw(1, 2, fail={(key(1, 1), 2): "died", (key(2, 0), 0): "timeout"}, greedy=True)
    record_samples(metrics, samples, has_sources=False)
    single = replace(samples[1], turns=[], status="ok")
    record_samples(metrics, [single], has_sources=False)
    reduced = metrics.reduce()
    drawn = [sample for sample in samples if sample.index != GREEDY]
    observed = sum(sample.loss_mask.count(0) for sample in drawn)
    assert reduced["trajectory/turns/mean"] == (3 + 2 + 0 + 3) / 4 and reduced["trajectory/turns/max"] == 3
    assert reduced["trajectory/observation_tokens/mean"] == observed / 4
    assert reduced["trajectory/observation_share"] == observed / sum(len(sample.response_ids) for sample in drawn)
    assert reduced["trajectory/generated_tokens/mean"] == sum(sum(sample.loss_mask) for sample in drawn) / 4
    statuses = {name: value for name, value in reduced.items() if name.startswith("trajectory/status/") and value}
    assert statuses == {"trajectory/status/ok": 0.5, "trajectory/status/died": 0.25, "trajectory/status/timeout": 0.25}
    assert reduced["trajectory/calls/mean"] == (3 + 1 + 3) / 3
    assert reduced["timing_s/waiting_for_environments"] == 1.0
