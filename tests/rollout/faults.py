"""Checks of what a live engine refuses and survives: faulty streams, stale versions, sleep, a failure inside vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from grpo_megatron.config import ConfigError
from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.types import WeightBucket
from tests.rollout import tiny
from tests.rollout.worlds import World, raises, requests


def _drop(buckets: list[WeightBucket]) -> Iterator[WeightBucket]:
    yield from buckets[:-1]
    yield buckets[-1][:-1]


def _unknown(buckets: list[WeightBucket]) -> Iterator[WeightBucket]:
    yield buckets[0]
    yield [*buckets[1], ("model.layers.9.weight", torch.zeros(3))]
    yield from buckets[2:]


def _shape(buckets: list[WeightBucket]) -> Iterator[WeightBucket]:
    for number, bucket in enumerate(buckets):
        yield [(name, tensor[..., :-1]) for name, tensor in bucket] if number == 2 else bucket


def _twice(buckets: list[WeightBucket]) -> Iterator[WeightBucket]:
    yield from buckets
    yield buckets[0][:1]


def _raise(buckets: list[WeightBucket]) -> Iterator[WeightBucket]:
    yield from buckets[:2]
    raise OSError("the policy is out of order")


FAULTS = {
    "missing": (_drop, "1 of .* tensors are missing, "),
    "unknown": (_unknown, "model.layers.9.weight is not a tensor of this model"),
    "shape": (_shape, "has shape .*, not "),
    "twice": (_twice, "arrived twice"),
    "raise": (_raise, "OSError: the policy is out of order"),
}
FIRST_BAD = {"unknown": 1, "shape": 2, "raise": 2}  # the first bucket that is not loaded; absent: all are


def _fault(world: World, name: str, where: str) -> None:
    """A faulty stream raises on every rank and leaves no usable weights. The next good stream makes the engine usable.

    A stream is read to its end on every rank, and nothing is loaded after a rank's first problem.
    """
    make, words = FAULTS[name]
    world.push(1, 0)
    before = world.draw(requests(3, max_tokens=6))
    good = tiny.buckets(world.models[2])
    bad_here = where == "all" or world.mesh.rank == world.mesh.world_size - 1
    read: list[int] = []

    def stream() -> Iterator[WeightBucket]:
        for bucket in make(good) if bad_here else good:
            read.append(len(bucket))
            yield bucket

    with mock.patch.object(world.engine, "_load", wraps=world.engine._load) as load:
        raises(RankError, words, lambda: world.engine.load_weights(stream(), 1))
    assert world.engine._broken is None
    if name != "raise" or not bad_here:
        assert len(read) >= len(good)
    if bad_here:
        assert load.call_count == FIRST_BAD.get(name, len(good))
    assert world.engine.version is None
    raises(RuntimeError, "no complete set of weights", lambda: world.engine.generate(requests(1), 0))
    raises(RuntimeError, "no complete set of weights", lambda: world.engine.generate(requests(1), 1))
    raises(RuntimeError, "no complete set of weights", lambda: world.engine.logprobs([[1, 2]]))
    world.push(1, 2)
    assert world.draw(requests(3, max_tokens=6)) == before


class Fault:
    """A check: fault `name` on "all" ranks or on the "last". (A class, because ranks get it by pickle.)"""

    def __init__(self, name: str, where: str) -> None:
        self.name, self.where = name, where
        self.__name__ = f"push_with_{name}_on_{where}"

    def __call__(self, world: World) -> None:
        _fault(world, self.name, self.where)


ON_ALL = [Fault(name, "all") for name in FAULTS]
ON_LAST = [Fault(name, "last") for name in FAULTS]


def stale_version_is_refused(world: World) -> None:
    world.push(1, 7)
    raises(RuntimeError, "version 6, the engine has 7", lambda: world.engine.generate(requests(1), 6))
    raises(RuntimeError, "version 8, the engine has 7", lambda: world.engine.generate([], 8))
    assert len(world.engine.generate(requests(1), 7)) == 1


def asleep_it_refuses_work(world: World) -> None:
    model = world.push(1, 0)
    engine = world.engine
    engine.sleep()
    engine.sleep()
    assert engine.version is None
    raises(RuntimeError, "asleep", lambda: engine.generate(requests(1), 0))
    raises(RuntimeError, "asleep", lambda: engine.logprobs([[1, 2]]))
    raises(RankError, "asleep", lambda: world.push(1, 1))
    raises(RuntimeError, "wake_kv_cache before wake_weights", engine.wake_kv_cache)
    engine.wake_weights()
    raises(RuntimeError, "asleep .kv_cache.", lambda: engine.generate(requests(1), 0))
    world.push(1, 2)
    raises(RuntimeError, "asleep .kv_cache.", lambda: engine.generate(requests(1), 2))
    engine.wake_kv_cache()
    world.assert_samples_from(model, requests(3))
    engine.sleep()
    engine.wake_weights()
    engine.wake_kv_cache()
    raises(RuntimeError, "no complete set of weights", lambda: engine.generate(requests(1), 2))


def unfinished_requests_keep_weights_and_cache(world: World) -> None:
    model = world.push(1, 0)
    engine = world.engine
    engine.submit("a", requests(1)[0], 0)
    raises(ValueError, "request 'a' is submitted already", lambda: engine.submit("a", requests(1)[0], 0))
    raises(ValueError, "does not fit", lambda: engine.submit("b", requests(1, max_tokens=999)[0], 0))
    raises(RuntimeError, "weights of version 1, the engine has 0", lambda: engine.submit("b", requests(1)[0], 1))
    raises(RuntimeError, "generate: 1 submitted requests are unfinished", lambda: world.draw(requests(1)))
    raises(RuntimeError, "logprobs: 1 submitted requests are unfinished", lambda: engine.logprobs([[1, 2]]))
    raises(RuntimeError, "sleep: 1 submitted requests are unfinished", engine.sleep)
    raises(ValueError, "no unfinished request has the id 'b'", lambda: engine.abort(["a", "b"]))
    assert engine.num_unfinished == 1 and engine.poll() == []
    raises(RankError, "1 submitted requests are unfinished: poll or abort them first", lambda: world.push(2, 1))
    raises(RuntimeError, "no complete set of weights", engine.poll)
    engine.abort(["a"])
    world.push(1, 2)
    world.assert_samples_from(model, requests(3))


def engine_kwargs_that_the_trainer_depends_on_are_refused(world: World) -> None:
    kwargs = {"logprobs_mode": "raw_logprobs", "max_num_seqs": 4}
    raises(ConfigError, "rollout.engine_kwargs: logprobs_mode cannot", lambda: world.build(engine_kwargs=kwargs))


def a_failure_inside_vllm_breaks_the_engine_on_all_ranks(world: World) -> None:
    """The last check of a world: afterwards the engine is unusable, and a new one works in the same process."""
    engine, llm = world.engine, world.engine._llm
    update, calls = llm.update_weights, []

    def fail_on_last_rank(request: Any) -> None:
        calls.append(1)
        if len(calls) == 3 and world.mesh.rank == world.mesh.world_size - 1:
            raise MemoryError("no room")
        update(request)

    with mock.patch.object(llm, "update_weights", fail_on_last_rank):
        raises(RankError, "vLLM failed in a weight update .MemoryError: no room", lambda: world.push(1, 0))
    for call in (lambda: engine.generate(requests(1), 0), lambda: engine.logprobs([[1]]), lambda: world.push(1, 1)):
        raises(RuntimeError, "must be built again", call)
    assert engine.num_unfinished == 0
    engine.shutdown()
    engine.shutdown()
    raises(RuntimeError, "shut down", lambda: engine.generate(requests(1), 0))
    # The ranks can still communicate: vLLM's own shutdown would have destroyed the default process group.
    raises(RankError, "shut down", lambda: world.push(1, 0))
    world.engine = world.build(free_cache_engine=False, engine_kwargs={"max_num_seqs": 3})
    assert world.engine._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs == 3
    world.assert_samples_from(world.push(2, 3), requests(4))
    world.engine.sleep()  # does nothing: rollout.free_cache_engine is off
    assert len(world.engine.generate(requests(1), 3)) == 1
    for number, error in enumerate((MemoryError("no room"), KeyboardInterrupt())):  # in the middle of a step
        engine = world.engine
        engine.submit("a", requests(1)[0], 3 + number)
        with mock.patch.object(engine._llm.llm_engine, "step", side_effect=error):
            raises(type(error), "", engine.poll)
        for call in (engine.poll, lambda e=engine: e.abort(["a"]), lambda e=engine: e.generate([], 3)):  # type: ignore[misc]
            raises(RuntimeError, f"must be built again: {type(error).__name__}", call)
        engine.shutdown()
        world.engine = world.build()
        world.push(2, 4 + number)
    world.engine.shutdown()
