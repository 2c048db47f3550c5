"""Seeds of the samples, their cut over the engine replicas, grading beside the sample, and rewards that fail."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from grpo_megatron.config import RolloutConfig
from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.step import record_samples
from grpo_megatron.rewards.reward import RewardFacts, RewardItem, RewardResult, rewards
from grpo_megatron.rollout.engine import Truncation, sample_seed
from grpo_megatron.sampling.generator import Generator, Grading, LengthHistory, check_failures
from grpo_megatron.types import GREEDY, Prompt, Sample
from tests.fakes import FakeRewardPool, LoneMesh, SeedEngine, prompt


def draw(
    numbers: list[int], n: int = 2, mesh: Any = None, rollout: Any = None, **changes: Any
) -> tuple[list[Sample], SeedEngine]:
    engine: Any = SeedEngine()
    rollout = RolloutConfig(seed=9, **(rollout or {}))
    generator = Generator(engine, None, Letters(), mesh or LoneMesh(), rollout, weights_digest=lambda: "d9")
    arguments: dict[str, Any] = {"round_id": 4, "version": 4, "max_tokens": 8, "temperature": 0.7, "metrics": Metrics()}
    return generator.sample([prompt(i) for i in numbers], n, **{**arguments, **changes}), engine


def test_a_seed_is_of_the_run_the_draw_the_prompt_and_the_sample() -> None:
    metrics = Metrics()
    samples, engine = draw([3, 5], metrics=metrics)
    assert [r.seed for r in engine.requests] == [
        sample_seed(9, 4, f"p/{i}#0", index) for i in (3, 5) for index in (0, 1)
    ]
    assert engine.versions == [4] * 4 and {r.temperature for r in engine.requests} == {0.7}
    assert [(s.prompt_index, s.index, s.version) for s in samples] == [(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 4)]
    assert {s.weights_digest for s in samples} == {"d9"}
    assert metrics.reduce()["rollout/prefix_cache_hit_rate"] == 0.75


def test_other_steps_other_rounds_and_repeated_prompts_draw_anew() -> None:
    seeds = [r.seed for round_id in (0, 1, 1 + (1 << 32)) for r in draw([3, 5, 3], round_id=round_id)[1].requests]
    assert len(set(seeds)) == 3 * 6


def test_a_greedy_response_is_one_more() -> None:
    samples, engine = draw([3], greedy=True, truncation=Truncation(0.9))
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


def draw_and_grade(pool: FakeRewardPool) -> tuple[list[Sample], SeedEngine]:
    engine: Any = SeedEngine(lambda: pool.events.append("step"))
    generator = Generator(engine, pool, Letters(), LoneMesh(), RolloutConfig(seed=9), lambda: "")  # type: ignore[arg-type]
    prompts = [prompt(i) for i in range(4)]
    arguments: dict[str, Any] = {"version": 0, "max_tokens": 8, "temperature": 1.0, "metrics": Metrics()}
    return generator.sample(prompts, 2, round_id=0, **arguments), engine


def test_slow_rewards_of_a_validation_are_graded_while_it_draws_although_those_of_training_are_quick() -> None:
    """And a validation of 13 samples of 0.01 s is worth it, against 0.1 s, where a step of 8 is not."""
    pool = FakeRewardPool()
    grading = Grading(pool, Letters())  # type: ignore[arg-type]

    def overlaps(reward: str, count: int, seconds: float) -> bool:
        pool.grade = lambda text, number: RewardResult(1.0, seconds=seconds)
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
    pool = FakeRewardPool()
    samples, _ = draw_and_grade(pool)
    first = sum(len(s.response_ids) == 1 for s in samples)
    assert 0 < first < 8
    steps = ["step", *["submit"] * first, "serve", "step", *["submit"] * (8 - first), "serve"]
    assert pool.events == ["begin", *steps, "collect"]
    assert [(s.prompt_index, s.index) for s in samples] == [(p, i) for p in range(4) for i in range(2)]
    assert [s.reward for s in samples] == [float(len(Letters().decode(s.response_ids, True))) for s in samples]
    assert len({s.reward for s in samples}) > 1  # each sample has its own, although they were graded in another order
    assert all(s.reward_metrics == {"acc": 1.0, "ok": 1.0, "timeout": 0.0} for s in samples)


def test_workers_that_cannot_run_stop_all_ranks_after_the_draw() -> None:
    pool = FakeRewardPool(problem="reward workers do not start")
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


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(3, 1.0), (8, 0.0)], [(1, 1.0), (3, 0.0)]),
        ([(1, 0.5)], [(0, 0.5)]),  # in the middle of a token
        ([(5, 1.0), (6, 0.0), (8, 0.5)], [(3, 0.5)]),  # steps within one token are one step
    ],
)
def test_a_step_ends_with_the_token_that_completes_it(
    steps: list[tuple[int, float]], expected: list[tuple[int, float]]
) -> None:
    """Tokens "ab" "c" "\\n" "defg" "": they end at 2, 3, 4, 8, 8."""
    grading = Grading(FakeRewardPool(lambda text, number: RewardResult(1.0, steps=tuple(steps))), Letters())  # type: ignore[arg-type]
    sample = Sample(prompt(0), 0, 0, [0, 1, 2, 3, 4], [0.0] * 5, "stop", 0)
    grading.begin(["reward"], 1)
    grading.add(sample)
    assert grading.finish() is None and sample.steps == expected


def test_a_reward_reads_the_whole_turn_and_what_is_known_of_it() -> None:
    """The prompt has opened the thought: 8 characters, which are not those of the response's steps."""
    steps = ((4, 0.5), (8 + 3, 1.0), (8 + 8, 0.0))
    pool = FakeRewardPool(lambda text, number: RewardResult(1.0, steps=steps))
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
    """Whichever was sampled first; nothing is queued before the last one."""
    monkeypatch.setattr(rewards, "facts", lambda name: RewardFacts(batch=True, compares=True))
    pool = FakeRewardPool()
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


# -- A share of failed rewards above reward.max_failed_ratio stops every rank with one message, counted over all ranks ---


class WorldMesh(LoneMesh):
    """One rank of a world, whose other ranks send the given reports."""

    def __init__(self, reports: list[Any], rank: int) -> None:
        super().__init__(len(reports), rank)
        self.reports = reports

    def all_gather(self, value: Any) -> list[Any]:
        return [*self.reports[: self.rank], value, *self.reports[self.rank + 1 :]]


def graded(*rewards: float) -> list[Sample]:
    failures = [f"failure {i}" if math.isnan(reward) else "" for i, reward in enumerate(rewards)]
    return [
        Sample(prompt(0), 0, i, [1], [0.0], "stop", 0, reward=reward, reward_failure=failures[i])
        for i, reward in enumerate(rewards)
    ]


NAN = math.nan
RANKS = [
    graded(1.0, 0.0, 2.0, 3.0),
    [],
    graded(1.0, NAN, NAN, NAN),
    graded(NAN, NAN, 0.0, NAN),
]  # rank 1 has no pool
REPORTS = [(4, 0, 0, ""), (0, 0, 0, ""), (4, 3, 0, "failure 1"), (4, 3, 0, "failure 0")]  # 6 of 12


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_decides_alike_over_the_samples_of_all_ranks(rank: int) -> None:
    mesh = WorldMesh(REPORTS, rank)
    check_failures("step 3", RANKS[rank], 0.5, mesh)  # as many as are allowed
    problem = r"step 3: 6 of 12 samples \(50 %\) .* reward.max_failed_ratio=0.49 allows; the first failure: failure 1;"
    with pytest.raises(RankError, match=problem):
        check_failures("step 3", RANKS[rank], 0.49, mesh)


def test_what_is_no_failure_never_stops() -> None:
    """No samples, ratio one, and a sample that a reward has declined."""
    check_failures("step 0", [], 0.0, LoneMesh())
    check_failures("step 0", graded(NAN, NAN), 1.0, LoneMesh())
    with pytest.raises(RankError, match="1 of 9 samples"):
        check_failures("step 0", graded(NAN, *[0.0] * 8), 0.0, LoneMesh())
    declined = graded(*[NAN] * 8)
    for sample in declined:
        sample.reward_metrics = {"ok": 1.0, "timeout": 0.0}
    check_failures("step 0", [*declined, *graded(1.0)], 0.0, LoneMesh())


def test_a_round_whose_environments_all_failed_stops() -> None:
    """Rewards of 0 are no failures, but there is nothing to learn from. One episode that ends is enough to go on."""
    ended = graded(0.0, 0.0)
    ended[0].status, ended[0].reward_failure = "raised", "KeyError: 'x'"
    check_failures("step 2", ended, 0.5, LoneMesh())
    ended[1].status = "timeout"
    with pytest.raises(
        RankError, match="step 2: the environments of all 2 samples failed.*the first failure: KeyError: 'x'"
    ):
        check_failures("step 2", ended, 0.99, LoneMesh())
    check_failures("step 2", ended, 1.0, LoneMesh())


@pytest.mark.parametrize(("round_id", "what"), [(4, "step 4: 1 of 4"), (-1, "the validation before step 4: 1 of 4")])
def test_a_draw_stops_and_says_why(round_id: int, what: str) -> None:
    """The first of four samples fails: 25 %."""
    failed = RewardResult(NAN, status="error", message="reward 'm:f': KeyError: 'x'")
    pool: Any = FakeRewardPool(lambda text, number: RewardResult(1.0) if number else failed)
    engine: Any = SeedEngine()
    for ratio, stops in ((0.25, False), (0.24, True)):
        rollout = RolloutConfig(seed=9)
        generator = Generator(engine, pool, Letters(), LoneMesh(), rollout, lambda: "", max_failed_ratio=ratio)
        arguments: dict[str, Any] = {"version": 4, "max_tokens": 8, "temperature": 0.7, "metrics": Metrics()}
        if stops:
            with pytest.raises(RankError, match=re.escape(what) + ".*first failure: reward 'm:f': KeyError: 'x'"):
                generator.sample([prompt(1), prompt(2)], 2, round_id=round_id, **arguments)
        else:
            drawn = generator.sample([prompt(1), prompt(2)], 2, round_id=round_id, **arguments)
            assert sorted(sample.reward_failure for sample in drawn) == ["", "", "", "reward 'm:f': KeyError: 'x'"]


def test_a_prompt_has_its_own_number_and_length_of_responses_in_training_only() -> None:
    """Prompt 0 has rollout.n = 3, prompt 1 its own 1 of at most 4 tokens; each also its greedy response."""
    prompts = [prompt(0), replace(prompt(1), n=1, max_tokens=4), prompt(2)]
    engine: Any = SeedEngine()
    generator = Generator(engine, None, Letters(), LoneMesh(), RolloutConfig(), weights_digest=lambda: "d")
    history = LengthHistory()
    arguments: dict[str, Any] = {"round_id": 0, "version": 0, "max_tokens": 9, "temperature": 1.0, "metrics": Metrics()}
    own = generator.sample(prompts, 3, greedy=True, limits_by_prompt=True, history=history, **arguments)
    assert [(s.prompt_index, s.index) for s in own] == [
        (0, -1),
        (0, 0),
        (0, 1),
        (0, 2),
        (1, -1),
        (1, 0),
        *((2, i) for i in range(-1, 3)),
    ]
    assert (
        sorted((r.prompt_ids[0], r.max_tokens) for r in engine.requests) == [(0, 9)] * 4 + [(1, 4)] * 2 + [(2, 9)] * 4
    )
    sizes = {place: len([s for s in own if s.prompt_index == place]) for place in range(3)}
    tokens = {place: sum(len(s.response_ids) for s in own if s.prompt_index == place) for place in range(3)}
    assert [history.lengths[f"p/{place}"] for place in range(3)] == [tokens[place] / sizes[place] for place in range(3)]
    others = generator.sample(prompts, 3, greedy=True, **arguments)
    assert len(others) == 12 and {s.seed for s in own} < {s.seed for s in others}
