"""Seeds of the draws, their cut over the rollout blocks, and steps of the text -> tokens of the response."""

from __future__ import annotations

from typing import Any

from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.rollout.engine import Completion, Request, sample_seed
from grpo_megatron.sampling.generator import Generator, record_reward_metrics
from grpo_megatron.types import GREEDY, Prompt, Sample
from tests.sampling.fakes import LoneMesh, prompt


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
    assert engine.versions == [4] and {r.temperature for r in engine.requests} == {0.7}


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


def test_reward_metrics_are_means_without_the_greedy_response() -> None:
    samples, _ = draw([3], greedy=True)
    for sample, ok in zip(samples, (0.0, 1.0, 0.0), strict=True):
        sample.reward_metrics = {"ok": ok, "timeout": 1.0 - ok, "acc": ok}
    metrics = Metrics()
    record_reward_metrics(metrics, samples)
    assert metrics.reduce() == {
        "reward/failed_ratio": 0.5,
        "reward/timeout_ratio": 0.5,
        "reward/acc/mean": 0.5,
    }


class Letters:
    """Token n is the n-th of these pieces; token 4 is special and decodes to nothing."""

    PIECES = ("ab", "c", "\n", "defg", "")

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.PIECES[i] for i in ids)


def steps_of(ids: list[int], steps: list[tuple[int, float]]) -> list[tuple[int, float]]:
    nothing: Any = None
    sample = Sample(Prompt("u", (1,), "", "", "s", "r"), 0, 0, ids, [0.0] * len(ids), "stop", 0)
    return Generator(nothing, None, Letters(), nothing, 0, str)._step_tokens(sample, steps)


def test_a_step_ends_with_the_token_that_completes_it() -> None:
    ids = [0, 1, 2, 3, 4]  # "ab" "c" "\n" "defg" "": ends at 2, 3, 4, 8, 8
    assert steps_of(ids, [(3, 1.0), (8, 0.0)]) == [(1, 1.0), (3, 0.0)]
    assert steps_of(ids, [(1, 0.5)]) == [(0, 0.5)]  # in the middle of a token
    assert steps_of(ids, []) == []


def test_steps_within_one_token_are_one_step() -> None:
    assert steps_of([0, 1, 2, 3], [(5, 1.0), (6, 0.0), (8, 0.5)]) == [(3, 0.5)]
