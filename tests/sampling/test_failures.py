"""A share of failed rewards above reward.max_failed_ratio stops every rank with one message, counted over all ranks."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from grpo_megatron.config import RolloutConfig
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.rewards.reward import RewardResult
from grpo_megatron.sampling.generator import Generator
from grpo_megatron.sampling.grading import check_failures
from grpo_megatron.types import Sample
from tests.sampling.fakes import LoneMesh, SeedEngine, prompt
from tests.sampling.test_generator import Letters


class WorldMesh(LoneMesh):
    """One rank of a world, whose other ranks send the given reports."""

    def __init__(self, reports: list[Any], rank: int) -> None:
        super().__init__(len(reports), rank)
        self.reports = reports

    def all_gather(self, value: Any) -> list[Any]:
        return [*self.reports[: self.rank], value, *self.reports[self.rank + 1 :]]


def samples(*rewards: float) -> list[Sample]:
    return [
        Sample(
            prompt(0),
            0,
            i,
            [1],
            [0.0],
            "stop",
            0,
            reward=reward,
            reward_failure=f"failure {i}" if math.isnan(reward) else "",
        )
        for i, reward in enumerate(rewards)
    ]


NAN = math.nan
RANKS = [
    samples(1.0, 0.0, 2.0, 3.0),
    [],
    samples(1.0, NAN, NAN, NAN),
    samples(NAN, NAN, 0.0, NAN),
]  # rank 1 has no pool
REPORTS = [(4, 0, ""), (0, 0, ""), (4, 3, "failure 1"), (4, 3, "failure 0")]  # 6 of 12


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_decides_alike_over_the_samples_of_all_ranks(rank: int) -> None:
    mesh = WorldMesh(REPORTS, rank)
    check_failures("step 3", RANKS[rank], 0.5, mesh)  # as many as are allowed
    with pytest.raises(RankError) as raised:
        check_failures("step 3", RANKS[rank], 0.49, mesh)
    assert str(raised.value) == (
        "step 3: 6 of 12 samples (50 %) have no reward, more than reward.max_failed_ratio=0.49 allows; the first failure:"
        " failure 1; correct the reward function, or raise reward.max_failed_ratio"
    )


def test_no_samples_and_ratio_one_never_stop() -> None:
    check_failures("step 0", [], 0.0, LoneMesh())
    check_failures("step 0", samples(NAN, NAN), 1.0, LoneMesh())
    with pytest.raises(RankError, match="1 of 9 samples"):
        check_failures("step 0", samples(NAN, *[0.0] * 8), 0.0, LoneMesh())


class FailingPool:
    """Fails on the first sample of a draw."""

    num_workers = 1
    num_items = 0

    def begin(self, names: list[str]) -> None:
        self.num_items = 0

    def submit(self, item: tuple[str, str, str]) -> None:
        self.num_items += 1

    def serve(self) -> None: ...

    def collect(self) -> list[RewardResult]:
        failed = RewardResult(NAN, status="error", message="reward 'm:f': KeyError: 'x'")
        return [failed, *[RewardResult(1.0)] * (self.num_items - 1)]


@pytest.mark.parametrize(("draw_id", "what"), [(4, "step 4: 1 of 4"), (-1, "the validation before step 4: 1 of 4")])
def test_a_draw_stops_and_says_why(draw_id: int, what: str) -> None:
    """The first of four samples fails: 25 %."""
    pool: Any = FailingPool()
    engine: Any = SeedEngine()
    for ratio, stops in ((0.25, False), (0.24, True)):
        generator = Generator(
            engine, pool, Letters(), LoneMesh(), RolloutConfig(seed=9), lambda: "", max_failed_ratio=ratio
        )
        arguments: dict[str, Any] = {"version": 4, "max_tokens": 8, "temperature": 0.7, "metrics": Metrics()}
        if stops:
            with pytest.raises(RankError, match=re.escape(what) + ".*first failure: reward 'm:f': KeyError: 'x'"):
                generator.draw([prompt(1), prompt(2)], 2, draw_id=draw_id, **arguments)
        else:
            drawn = generator.draw([prompt(1), prompt(2)], 2, draw_id=draw_id, **arguments)
            assert sorted(sample.reward_failure for sample in drawn) == ["", "", "", "reward 'm:f': KeyError: 'x'"]


def test_a_sample_that_a_reward_has_declined_is_no_failure() -> None:
    declined = samples(*[NAN] * 8)
    for sample in declined:
        sample.reward_metrics = {"ok": 1.0, "timeout": 0.0}
    check_failures("step 0", [*declined, *samples(1.0)], 0.0, LoneMesh())
