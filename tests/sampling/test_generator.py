"""Seeds of the draws, their cut over the rollout blocks, and steps of the text -> tokens of the response."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_megatron.config import RolloutConfig
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.rewards.reward import RewardFacts, RewardItem, RewardResult, rewards
from grpo_megatron.rollout.engine import sample_seed
from grpo_megatron.sampling.generator import Generator
from grpo_megatron.sampling.grading import Grading
from grpo_megatron.training.report import record_samples
from grpo_megatron.types import GREEDY, Prompt, Sample
from tests.sampling.fakes import LoneMesh, SeedEngine, prompt


def draw(
    numbers: list[int], n: int = 2, mesh: Any = None, rollout: Any = None, **changes: Any
) -> tuple[list[Sample], SeedEngine]:
    engine: Any = SeedEngine()
    rollout = RolloutConfig(seed=9, **(rollout or {}))
    generator = Generator(engine, None, Letters(), mesh or LoneMesh(), rollout, weights_digest=lambda: "d9")
    arguments: dict[str, Any] = {"draw_id": 4, "version": 4, "max_tokens": 8, "temperature": 0.7, **changes}
    return generator.draw([prompt(i) for i in numbers], n, metrics=Metrics(), **arguments), engine


def test_a_seed_is_of_the_run_the_draw_the_prompt_and_the_sample() -> None:
    _, engine = draw([3, 5])
    assert [r.seed for r in engine.requests] == [
        sample_seed(9, 4, f"p/{i}#0", index) for i in (3, 5) for index in (0, 1)
    ]
    assert engine.versions == [4] * 4 and {r.temperature for r in engine.requests} == {0.7}


def test_other_steps_other_rounds_and_repeated_prompts_draw_anew() -> None:
    seeds = [r.seed for draw_id in (0, 1, 1 + (1 << 32)) for r in draw([3, 5, 3], draw_id=draw_id)[1].requests]
    assert len(set(seeds)) == 3 * 6


def test_samples_carry_the_version_they_were_drawn_with() -> None:
    samples, _ = draw([3, 5], draw_id=-1, version=6)
    assert [(s.prompt_index, s.index, s.version) for s in samples] == [(0, 0, 6), (0, 1, 6), (1, 0, 6), (1, 1, 6)]
    assert {s.weights_digest for s in samples} == {"d9"}


def test_a_greedy_response_is_one_more() -> None:
    samples, engine = draw([3], greedy=True, top_p=0.9)
    assert [s.index for s in samples] == [GREEDY, 0, 1]
    assert [(r.temperature, r.top_p) for r in engine.requests] == [(0.0, 1.0), (0.7, 0.9), (0.7, 0.9)]


def test_the_cut_over_blocks_changes_nothing_but_the_place() -> None:
    """Nine requests over two and over four blocks: 4 + 5 and 2 + 2 + 2 + 3."""
    whole, _ = draw([1, 2, 3], n=3)
    for blocks, sizes in ((2, [4, 5]), (4, [2, 2, 2, 3])):
        parts = [draw([1, 2, 3], n=3, mesh=LoneMesh(blocks, rank))[0] for rank in range(blocks)]
        assert [len(part) for part in parts] == sizes
        assert [sample for part in parts for sample in part] == whole


def test_the_stops_of_the_config_are_part_of_every_request() -> None:
    _, engine = draw([3], greedy=True, rollout={"stop": ["cab", "c"], "stop_token_ids": [7, 9]})
    for request in engine.requests:
        assert request.stop is not None
        assert (request.stop.texts, request.stop.token_ids) == (("cab", "c"), (1,))
        assert request.stop_token_ids == (7, 9)
    assert {r.stop for r in draw([3])[1].requests} == {None}


def test_the_share_of_cached_prompt_tokens_is_logged() -> None:
    metrics, engine = Metrics(), SeedEngine()
    arguments: dict[str, Any] = {"draw_id": 4, "version": 4, "max_tokens": 8, "temperature": 0.7}
    generator = Generator(engine, None, None, LoneMesh(), RolloutConfig(), lambda: "")  # type: ignore[arg-type]
    generator.draw([prompt(3)], 1, **arguments, metrics=metrics)
    assert metrics.reduce()["rollout/prefix_cache_hit_rate"] == 0.75


class SlowPool:
    """Grades a sample by its text's length, one for each call of `serve`. `events` tells the order of all calls."""

    num_workers = 2

    def __init__(self, problem: str | None = None, seconds: float = 0.0) -> None:
        self.events: list[str] = []
        self.seconds = seconds
        self.problem = problem
        self.items: list[RewardItem] = []

    def begin(self, names: list[str]) -> None:
        self.events, self.items = [f"begin {names}"], []

    def submit(self, item: RewardItem) -> None:
        self.events.append("submit")
        self.items.append(item)

    def serve(self) -> None:
        self.events.append("serve")
        if self.problem:
            raise RuntimeError(self.problem)

    def collect(self) -> list[RewardResult]:
        self.events.append("collect")
        return [RewardResult(float(len(text)), {"acc": 1.0}, seconds=self.seconds) for _, text, *_ in self.items]


def draw_and_grade(pool: SlowPool, num_draws: int = 1) -> tuple[list[Sample], SeedEngine]:
    engine: Any = SeedEngine(lambda: pool.events.append("step"))
    generator = Generator(engine, pool, Letters(), LoneMesh(), RolloutConfig(seed=9), lambda: "")  # type: ignore[arg-type]
    prompts = [prompt(i) for i in range(4)]
    arguments: dict[str, Any] = {"version": 0, "max_tokens": 8, "temperature": 1.0, "metrics": Metrics()}
    drawn = [generator.draw(prompts, 2, draw_id=0, **arguments) for _ in range(num_draws)]
    assert all(samples == drawn[0] for samples in drawn)
    return drawn[0], engine


@pytest.mark.parametrize(("seconds", "overlaps"), [(0.012, False), (0.013, True)])
def test_quick_rewards_are_graded_after_the_draw(seconds: float, overlaps: bool) -> None:
    """Eight of them, with two workers, against 0.05 s per worker."""
    pool = SlowPool(seconds=seconds)
    draw_and_grade(pool, num_draws=2)
    last_step = len(pool.events) - 1 - pool.events[::-1].index("step")
    assert ("submit" in pool.events[:last_step]) is overlaps
    assert pool.events.count("submit") == 8 and pool.events[-1] == "collect"


def test_slow_rewards_of_a_validation_are_graded_while_it_draws_although_those_of_training_are_quick() -> None:
    """And a validation of 13 samples of 0.01 s is worth it, against 0.1 s, where a step of 8 is not."""
    pool = SlowPool()
    grading = Grading(pool, Letters())  # type: ignore[arg-type]

    def overlaps(reward: str, count: int, seconds: float) -> bool:
        pool.seconds = seconds
        grading.begin([reward], count)
        for index in range(count):
            grading.add(Sample(replace(prompt(0), reward=reward), 0, index, [1], [0.0], "stop", 0))
        is_early = len(pool.items) == count
        assert grading.finish() is None and len(pool.items) == count
        return is_early

    assert [overlaps("quick", 8, 0.01), overlaps("slow", 8, 1.0)] == [True, True]  # not known yet
    assert [overlaps("quick", 8, 0.01), overlaps("slow", 8, 1.0)] == [False, True]
    assert [overlaps("quick", 13, 0.01), overlaps("quick", 8, 0.01)] == [True, False]


def test_a_response_is_graded_while_the_others_are_drawn() -> None:
    pool = SlowPool()
    samples, _ = draw_and_grade(pool)
    first = sum(len(s.response_ids) == 1 for s in samples)
    assert 0 < first < 8
    steps = ["step", *["submit"] * first, "serve", "step", *["submit"] * (8 - first), "serve"]
    assert pool.events == ["begin ['reward']", *steps, "collect"]
    assert [(s.prompt_index, s.index) for s in samples] == [(p, i) for p in range(4) for i in range(2)]
    assert [s.reward for s in samples] == [float(len(Letters().decode(s.response_ids, True))) for s in samples]
    assert len({s.reward for s in samples}) > 1  # each sample has its own, although they were graded in another order
    assert all(s.reward_metrics == {"acc": 1.0, "ok": 1.0, "timeout": 0.0} for s in samples)


def test_workers_that_cannot_run_stop_all_ranks_after_the_draw() -> None:
    pool = SlowPool(problem="reward workers do not start")
    with pytest.raises(RankError, match="reward workers do not start"):
        draw_and_grade(pool)
    assert pool.events.count("step") == 2  # the other ranks of the block are in the engine until the last step
    assert pool.events.count("serve") == 1 and "collect" not in pool.events


def test_reward_metrics_are_means_without_the_greedy_response() -> None:
    samples, _ = draw([3], greedy=True)
    for sample, ok in zip(samples, (0.0, 1.0, 0.0), strict=True):
        sample.reward_metrics = {"ok": ok, "timeout": 1.0 - ok, "acc": ok}
    metrics = Metrics()
    record_samples(metrics, samples, has_sources=False)
    assert metrics.reduce() == {
        "reward/failed_ratio": 0.5,
        "reward/timeout_ratio": 0.5,
        "reward/acc/mean": 0.5,
    }


class Letters:
    """Token n is the n-th of these pieces; token 4 is special and decodes to nothing. Further tokens are "x"."""

    PIECES = ("ab", "c", "\n", "defg", "", *"x" * 96)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.PIECES[i] for i in ids)

    def get_vocab(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self.PIECES[:4])}

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [self.PIECES.index(text)] if text in self.PIECES else [1, 1]}


def steps_of(ids: list[int], steps: list[tuple[int, float]]) -> list[tuple[int, float]]:
    sample = Sample(Prompt("u", (1,), "", "", "s", "r"), 0, 0, ids, [0.0] * len(ids), "stop", 0)
    return Grading(None, Letters())._step_tokens(sample, steps)


def test_a_step_ends_with_the_token_that_completes_it() -> None:
    ids = [0, 1, 2, 3, 4]  # "ab" "c" "\n" "defg" "": ends at 2, 3, 4, 8, 8
    assert steps_of(ids, [(3, 1.0), (8, 0.0)]) == [(1, 1.0), (3, 0.0)]
    assert steps_of(ids, [(1, 0.5)]) == [(0, 0.5)]  # in the middle of a token
    assert steps_of(ids, []) == []


def test_steps_within_one_token_are_one_step() -> None:
    assert steps_of([0, 1, 2, 3], [(5, 1.0), (6, 0.0), (8, 0.5)]) == [(3, 0.5)]


def test_a_reward_reads_the_whole_turn_and_what_is_known_of_it() -> None:
    """The prompt has opened the thought: 8 characters, which are not those of the response's steps."""
    pool = SlowPool()
    pool.collect = lambda: [RewardResult(1.0, steps=((4, 0.5), (8 + 3, 1.0), (8 + 8, 0.0)))]  # type: ignore[method-assign]
    grading = Grading(pool, Letters())  # type: ignore[arg-type]
    chat = [{"role": "user", "content": "Q"}]
    prompt = Prompt("u", (1,), "Q <think>\n", "42", "s", "gsm8k", columns={"a": 1}, data_source="d", messages=chat)
    sample = Sample(prompt, 0, 0, [0, 1, 2, 3], [0.0] * 4, "stop", 7)
    grading.begin(["gsm8k"], 1)
    grading.add(sample)
    assert grading.finish() is None
    about = {"prompt": "Q <think>\n", "messages": chat, "columns": {"a": 1}, "data_source": "d", "is_chat": True}
    whole = RewardItem("gsm8k", "<think>\nabc\ndefg", "42", **about, completion_ids=[0, 1, 2, 3], step=7)
    assert pool.items == [whole]
    assert sample.text == "abc\ndefg"
    assert sample.steps == [(0, 0.5), (1, 1.0), (3, 0.0)]


def test_a_reward_that_compares_gets_all_samples_by_prompt_and_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever was drawn first; nothing is queued before the last one."""
    monkeypatch.setattr(rewards, "facts", lambda name: RewardFacts(batch=True, compares=True))
    pool = SlowPool()
    grading = Grading(pool, Letters())  # type: ignore[arg-type]
    grading.begin(["r"], 3)
    about = Prompt("u", (1,), "", "", "s", "r")
    drawn = [
        Sample(about, p, i, [0] * (2 * p + i + 1), [0.0] * (2 * p + i + 1), "stop", 0)
        for p, i in [(1, 0), (0, 1), (0, 0)]
    ]
    for sample in drawn:
        grading.add(sample)
    assert not pool.items
    grading.finish()
    assert [item.completion for item in pool.items] == ["ab", "abab", "ababab"]
    assert [sample.reward for sample in drawn] == [6.0, 4.0, 2.0]  # each has its own
