"""The checks on a stream of weights, without an engine: faulty streams on 2 real gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from grpo_megatron.device import Device
from grpo_megatron.parallel.mesh import RankError, build_mesh
from grpo_megatron.rollout.census import Census, verified_stream
from grpo_megatron.types import WeightBucket
from tests.worlds import run

SHAPES = {"a": (2, 3), "b": (4,), "c": (1,)}


def test_census_names_everything_that_is_wrong() -> None:
    census = Census(SHAPES)
    assert census.admit([("a", torch.zeros(2, 3))]) is None
    assert census.admit([]) is None
    problem = census.admit([("a", torch.zeros(2, 3)), ("d", torch.zeros(1)), ("b", torch.zeros(1, 4))])
    assert problem == "a arrived twice, d is not a tensor of this model, b has shape (1, 4), not (4,)"
    assert census.admit([("c", torch.tensor([float("nan")]))]) == "c has non-finite values"
    assert census.missing() is None
    assert Census(SHAPES).missing() == "3 of 3 tensors are missing, a, b, c"


def test_census_shortens_long_lists() -> None:
    problem = Census({f"layer.{i}": (1,) for i in range(50)}).missing()
    assert problem is not None and problem.endswith("layer.9, and 40 more") and problem.startswith("50 of 50")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_census_finds_one_bad_value(value: float, dtype: torch.dtype) -> None:
    tensor = torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype)  # large but finite: sums would overflow
    assert Census({"w": (64, 64)}).admit([("w", tensor.clone())]) is None
    tensor[63, 63] = value
    assert Census({"w": (64, 64)}).admit([("w", tensor)]) == "w has non-finite values"


def _stream(plan: list[list[str] | None]) -> Iterator[WeightBucket]:
    for names in plan:
        if names is None:
            raise KeyError("the stream broke")
        yield [(name, torch.zeros(SHAPES.get(name, (1,)))) for name in names]


def _drain(plans: list[list[list[list[str] | None]]]) -> list[tuple[str | None, int]]:
    """For each case: the error's text, and the number of buckets received. Rank r reads plans[case][r]."""
    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    results: list[tuple[str | None, int]] = []
    for plan in plans:
        received, message = 0, None
        try:
            for _ in verified_stream(_stream(plan[mesh.rank]), SHAPES, mesh):
                received += 1
        except RankError as error:
            message = str(error)
        results.append((message, received))
    return results


GOOD: list[list[str] | None] = [["a"], ["b", "c"]]
CASES: dict[str, tuple[list[list[str] | None], list[list[str] | None], str | None, int]] = {
    # name: the streams of rank 0 and rank 1, part of the error on both, buckets received before it
    "good": (GOOD, GOOD, None, 2),
    "missing everywhere": ([["a"]], [["a"]], "2 of 3 tensors are missing, b, c", 1),
    "raises on rank 1": (GOOD, [["a"], None], "rank 1: KeyError: 'the stream broke'", 1),
    "unknown on rank 0": ([["a", "x"]], GOOD, "rank 0: x is not a tensor", 0),
    "rank 1 ends early": (GOOD, [["a"]], "rank 1: 2 of 3 tensors are missing", 1),
    "same names, cut differently": ([["a", "b"], ["c"]], GOOD, "streams differ", 0),
    "rank 1 has an empty bucket more": (GOOD, [*GOOD, []], "streams differ: next on this rank: the end", 2),
    "good again": (GOOD, GOOD, None, 2),
}


def test_a_fault_on_one_rank_stops_all_ranks() -> None:
    """None hangs: the deadline of `run` is far below the timeout of a collective."""
    results = run(_drain, 2, plans=[[zero, one] for zero, one, _, _ in CASES.values()])
    for rank, outcomes in enumerate(results):
        for (name, (_, _, words, num_buckets)), (message, received) in zip(CASES.items(), outcomes, strict=True):
            assert received == num_buckets, (name, rank, message)
            assert (message is None) if words is None else (message is not None and words in message), (name, message)
