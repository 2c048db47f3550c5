"""The checks on a stream of weights, without an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from grpo_megatron.rollout.engine import load_verified
from grpo_megatron.sync.tensors import SyncTensor
from grpo_megatron.types import WeightBucket

SHAPES = {"a": (2, 3), "b": (4,), "c": (1,)}


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, SyncTensor]:
    return {name: SyncTensor(name, shape, 0) for name, shape in shapes.items()}


GOOD: list[list[str] | None] = [["a"], ["b", "c"]]
CASES: dict[str, tuple[list[list[str] | None], str | None, int, int]] = {
    # name: the buckets (None: the stream raises), the problem, buckets loaded, buckets read
    "good": (GOOD, None, 2, 2),
    "missing": ([["a"]], "2 of 3 tensors are missing, b, c", 1, 1),
    "raises": ([["a"], None], "KeyError: 'the stream broke'", 1, 1),
    "unknown": ([["a", "x"], ["b", "c"]], "x is not a tensor of this model", 0, 2),
    "repeated in a bucket": ([["a", "a", "y"]], "a arrived twice, y is not a tensor of this model", 0, 1),
    "another shape": ([["B"]], "b has shape (1, 4), not (4,)", 0, 1),
    "repeated": ([["a"], ["a"], ["b", "c"]], "a arrived twice", 1, 3),
    "raises after a problem": ([["x"], ["a"], None], "x is not a tensor of this model", 0, 2),
    "an empty bucket": ([[], *GOOD], None, 3, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_a_stream_is_read_to_its_end_and_loaded_up_to_the_first_problem(name: str) -> None:
    buckets, problem, num_loaded, num_read = CASES[name]
    read: list[WeightBucket] = []
    loaded: list[WeightBucket] = []

    def stream() -> Iterator[WeightBucket]:
        for names in buckets:
            if names is None:
                raise KeyError("the stream broke")
            read.append([(n.lower(), torch.zeros((1, 4) if n == "B" else SHAPES.get(n, (1,)))) for n in names])
            yield read[-1]

    assert load_verified(stream(), tensors(SHAPES), loaded.append) == problem  # type: ignore[arg-type]
    assert (len(loaded), len(read)) == (num_loaded, num_read)


def test_nothing_is_loaded_after_a_failure_of_the_engine() -> None:
    loaded: list[WeightBucket] = []

    def load(bucket: WeightBucket) -> str | None:
        loaded.append(bucket)
        return "no room"

    stream = [[(name, torch.zeros(shape))] for name, shape in SHAPES.items()]
    assert load_verified(iter(stream), tensors(SHAPES), load) == "no room" and len(loaded) == 1
    assert load_verified(iter(stream), tensors(SHAPES), load, "asleep") == "asleep" and len(loaded) == 1


def test_a_long_list_of_problems_is_shortened() -> None:
    problem = load_verified(iter([]), tensors({f"layer.{i}": (1,) for i in range(50)}), lambda bucket: None)
    assert problem is not None and problem.endswith("layer.9, and 40 more") and problem.startswith("50 of 50")
