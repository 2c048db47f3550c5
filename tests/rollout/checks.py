"""Checks of what a live engine samples, computes and loads. `test_vllm.py` runs them in several worlds.

Each check first loads weights, and can fail on any rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from grpo_megatron.models.weights.stream import engine_tensors
from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.rollout.engine import Completion, Request, StopTexts, sample_seed
from grpo_megatron.rollout.vllm.process import inside_vllm
from grpo_megatron.types import WeightBucket
from tests.rollout import tiny
from tests.rollout.worlds import World, raises, requests, rng_state


def logprobs_equal_transformers_at_temperatures(world: World) -> None:
    model = world.push(1, 0)
    world.assert_samples_from(model, requests())
    world.assert_samples_from(model, requests(temperature=0.7))
    greedy = world.generate(requests(4, temperature=0.0, max_tokens=5))
    for request, completion in zip(requests(4), greedy, strict=True):
        assert completion.response_ids[0] == int(model(torch.tensor([request.prompt_ids])).logits[0, -1].argmax())


def seeds_alone_decide_the_samples(world: World) -> None:
    """And the generators of the host are untouched."""
    world.push(1, 0)
    some = requests(6)
    before = rng_state()
    together = world.generate(some)
    world.engine.logprobs([[1, 2, 3]])
    assert rng_state() == before
    assert world.generate(some) == together
    assert [world.generate([request])[0] for request in some] == together  # bitwise with one thread
    assert world.generate(some[::-1]) == together[::-1]
    others = world.generate([replace(some[1], seed=sample_seed(0, 0, "prompt 1", index)) for index in range(1, 5)])
    assert len({tuple(c.response_ids) for c in [together[1], *others]}) == 5  # same prompt, other samples


def generate_gives_what_vllm_itself_gives(world: World) -> None:
    """Bit for bit, in the order of the requests, although some finish early."""
    world.push(1, 0)
    some = [r for r, n in zip(requests(12), [3, 16, 9] * 4, strict=True) for r in [replace(r, max_tokens=n)]]
    engine = world.engine
    prompts, params = [{"prompt_token_ids": list(r.prompt_ids)} for r in some], [engine._queue.params(r) for r in some]
    with inside_vllm(world.device):
        expected = engine._llm.generate(prompts, params, use_tqdm=False)
    for completion, output in zip(world.generate(some), expected, strict=True):
        assert completion.response_ids == list(output.outputs[0].token_ids)
        assert completion.logprobs == list(output.outputs[0].logprobs.logprobs)
        assert completion.finish_reason == output.outputs[0].finish_reason


def requests_join_and_leave_a_running_engine(world: World) -> None:
    """Each sample stays what it is alone: also one that joins later, and beside one that is aborted."""
    world.push(1, 0)
    some = [replace(r, max_tokens=n) for r, n in zip(requests(5), (12, 4, 4, 30, 4), strict=True)]
    alone = [world.generate([request])[0] for request in some]
    engine, finished, sizes = world.engine, [], []

    def poll(times: int) -> None:
        for _ in range(times):
            step = engine.poll()
            finished.extend(step)
            sizes.append(len(step))

    assert engine.poll() == [] and engine.num_unfinished == 0
    for name, request in zip("dba", (some[3], some[1], some[0]), strict=True):
        engine.submit(name, request, 0)
    assert engine.num_unfinished == 3
    poll(2)
    engine.submit("e", some[4], 0)
    engine.submit("c", some[2], 0)
    poll(3)
    engine.abort(["d"])
    assert engine.num_unfinished == 4 - len(finished)
    poll(30)
    assert engine.num_unfinished == 0
    assert dict(finished) == dict(zip("abce", [alone[i] for i in (0, 1, 2, 4)], strict=True))
    assert [name for name, _ in finished if name in "ec"] == ["e", "c"]  # of one step: in order of submission
    assert 2 in sizes
    assert world.generate(some) == alone


def greedy_answers_equal_those_of_the_transformers_engine(world: World) -> None:
    model = world.push(1, 0)
    some = requests(temperature=0.0)
    greedy = world.generate(some)
    held, tensors, world.tensors = (
        world.engine,
        world.tensors,
        engine_tensors(world.architecture(), 1, reads_shards=False),
    )
    world.engine = world.build(engine="transformers")
    try:
        world.engine.load_weights(iter(tiny.buckets(model)), 0)
        for own, other in zip(world.generate(some), greedy, strict=True):
            assert (own.response_ids, own.finish_reason) == (other.response_ids, other.finish_reason)
            tiny.assert_close(own.logprobs, torch.tensor(other.logprobs))
    finally:
        world.engine, world.tensors = held, tensors


def responses_end_with_their_stop_token(world: World) -> None:
    world.push(1, 0)
    completions = world.generate(requests(32, max_tokens=40))
    for completion in completions:
        stops = [t for t, token in enumerate(completion.response_ids) if token in tiny.EOS]
        stopped = completion.finish_reason == "stop"
        assert stops == ([len(completion.response_ids) - 1] if stopped else [])
        assert stopped or len(completion.response_ids) == 40
        assert len(completion.logprobs) == len(completion.response_ids)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    assert {c.response_ids[-1] for c in completions if c.finish_reason == "stop"} == set(tiny.EOS)
    # With a stop token of its own, a request gives the same samples up to that token.
    whole = next(c for c in completions if c.finish_reason == "length")
    request = requests(32, max_tokens=40)[completions.index(whole)]
    cut = whole.response_ids.index(whole.response_ids[9]) + 1
    stopped_early = world.generate([replace(request, stop_token_ids=(whole.response_ids[9],))])[0]
    assert stopped_early == Completion(whole.response_ids[:cut], whole.logprobs[:cut], "stop")


class Pairs:
    """A tokenizer that writes each id as two letters, and the word "whole" as id 30."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(97 + i // 20) + chr(97 + i % 20) for i in ids)

    def get_vocab(self) -> dict[str, int]:
        return {"whole": 30}

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [30] if text == "whole" else [1, 2]}


def responses_end_with_the_token_that_completes_a_stop_text(world: World) -> None:
    """The same samples as without the text, up to that token, alone and beside other requests; also at the last token."""
    world.push(1, 0)
    some = requests(8, max_tokens=24)
    whole = world.generate(some)
    number = next(i for i, c in enumerate(whole) if len(c.response_ids) == 24)
    ids = whole[number].response_ids
    text = Pairs().decode(ids[9:12], skip_special_tokens=True)[1:-1]  # begins and ends within a token
    first = next(t for t in range(1, 25) if text in Pairs().decode(ids[:t], skip_special_tokens=True))
    stop = StopTexts(Pairs(), [text, "nowhere"])
    stopped = replace(some[number], stop=stop)
    expected = Completion(ids[:first], whole[number].logprobs[:first], "stop")
    assert first <= 12 and world.generate([stopped]) == [expected]
    assert world.generate([replace(stopped, max_tokens=first)]) == [expected]
    others = [*some[:number], stopped, *some[number + 1 :]]
    assert world.generate(others) == [*whole[:number], expected, *whole[number + 1 :]]
    everyone = world.generate([replace(request, stop=stop) for request in some])
    for completion, unstopped in zip(everyone, whole, strict=True):
        length = len(completion.response_ids)
        assert completion.response_ids == unstopped.response_ids[:length]
        assert completion.logprobs == unstopped.logprobs[:length]
        has_text = text in Pairs().decode(completion.response_ids, skip_special_tokens=True)
        assert has_text or completion == unstopped
    own = StopTexts(Pairs(), ["whole"])  # its token is no text that the response contains: the engine must stop at it
    for completion, unstopped in zip(world.generate([replace(r, stop=own) for r in some]), whole, strict=True):
        length = unstopped.response_ids.index(30) + 1 if 30 in unstopped.response_ids else None
        assert completion.response_ids == unstopped.response_ids[:length]
    assert any(30 in c.response_ids[:-1] for c in whole)
    raises(ValueError, "to 160 are outside", lambda: world.generate([replace(stopped, stop_token_ids=(160,))]))
    greedy = replace(some[number], temperature=0.0)
    ids = world.generate([greedy])[0].response_ids
    text = Pairs().decode(ids[2:5], skip_special_tokens=True)
    first = next(t for t in range(1, 25) if text in Pairs().decode(ids[:t], skip_special_tokens=True))
    start = first - 1  # the text begins in what was written before
    later = replace(
        greedy,
        prompt_ids=(*greedy.prompt_ids, *ids[:start]),
        max_tokens=24 - start,
        stop=StopTexts(Pairs(), [text]),
        num_written=start,
    )
    assert world.generate([later])[0].response_ids == [ids[start]]
    assert world.generate([replace(later, num_written=0)])[0].response_ids[:1] == [ids[start]]
    world.push(2, 1)  # at once: nothing of the aborted requests holds the cache


def prompts_may_be_more_than_a_step_computes(world: World) -> None:
    """30 prompts of 300 tokens, 8192 tokens per step. vLLM cannot divide a prompt on CPU if its request has a seed."""
    model = world.push(1, 0)
    tokens = [tuple((5 * t + i * t) % tiny.VOCAB for t in range(300)) for i in range(30)]
    some = [Request(ids, sample_seed(0, 0, "long", i), max_tokens=2) for i, ids in enumerate(tokens)]
    world.assert_samples_from(model, some)


def requests_that_vllm_would_alter_are_refused(world: World) -> None:
    world.push(1, 0)
    long = tuple([1] * (tiny.MAX_MODEL_LEN - 10))
    assert len(world.generate([Request((1,), 0, max_tokens=1), Request(long, 0, max_tokens=10)])) == 2
    for request, words in [
        (Request(long, 0, 11), "a prompt of 374 tokens with max_tokens 11 does not fit max_model_len 384"),
        (Request((), 0, 5), "a prompt of 0 tokens .* is empty"),
        (Request((1,), 0, 5, temperature=0.005), "temperature 0.005 is outside"),
        (Request((1,), 0, 5, temperature=2.5), "temperature 2.5 is outside"),
        (Request((1, tiny.VOCAB), 0, 5), "1 to 160 are outside the vocabulary of 160"),
    ]:
        raises(ValueError, words, lambda r=request: world.generate([*requests(3), r]))  # type: ignore[misc]
    raises(ValueError, "cannot compute logprobs of 384", lambda: world.engine.logprobs([[1] * 384]))
    raises(ValueError, "-1 to 5 are outside", lambda: world.engine.logprobs([[5, -1]]))
    assert (
        world.engine.logprobs([[1]]) == [[]] and world.engine.generate([], 0) == [] and world.engine.logprobs([]) == []
    )
    world.assert_samples_from(world.models[1], requests(3))  # the refused requests left nothing in the queue


def new_weights_change_the_samples(world: World) -> None:
    world.push(1, 0)
    before = world.generate(requests())
    second = world.push(2, 1)
    assert world.engine.version == 1
    world.assert_samples_from(second, requests())
    assert [c.response_ids for c in world.generate(requests())] != [c.response_ids for c in before]
    for version in range(2, 5):  # reloads of the same weights change nothing
        world.push(1, version)
    assert world.generate(requests()) == before


def order_of_the_stream_does_not_matter(world: World) -> None:
    model = world.models[1]
    reverse = [[pair] for bucket in tiny.buckets(model)[::-1] for pair in bucket[::-1]]
    world.engine.load_weights(iter(reverse), 0)
    world.assert_samples_from(model, requests(4))


def a_push_forgets_cached_prefixes(world: World) -> None:
    request = Request(tuple((5 * t + t * t) % tiny.VOCAB for t in range(300)), 0, max_tokens=8)  # > 2 blocks of 128

    def error_after(push: Callable[[], Any]) -> float:
        world.push(1, 0)
        world.generate([request])  # fills the cache
        model = push()
        completion = world.generate([request])[0]
        expected = tiny.logprobs(model, list(request.prompt_ids), completion.response_ids)
        return float((torch.tensor(completion.logprobs) - expected).abs().max())

    def push_without_reset() -> Any:
        with mock.patch.object(world.engine._llm, "reset_prefix_cache", lambda: True):
            return world.push(2, 1)

    assert error_after(lambda: world.push(2, 1)) <= 1e-5
    assert error_after(push_without_reset) > 1e-2  # shows that the assertion above can fail: the old prefix is used


def a_second_turn_costs_its_own_tokens(world: World) -> None:
    """Prompt 200 + turn 70 + observation 20 = 290 tokens: blocks of 128, so 2 of them (256) are in the cache.

    Without the cache, an engine computes the same log-probabilities.
    """
    prompt = tuple((5 * t + t * t) % tiny.VOCAB for t in range(200))
    observation = tuple(range(20, 40))

    def two_turns() -> tuple[list[Completion], list[tuple[int, int]]]:
        world.push(1, 0)
        drawn = (world.generate([Request(prompt, seed, max_tokens=70)])[0] for seed in range(200))
        first = next(completion for completion in drawn if len(completion.response_ids) == 70)
        ids = [*prompt, *first.response_ids, *observation]
        world.engine.cache_statistics()
        second = world.generate([Request(tuple(ids), 1, max_tokens=8)])[0]
        statistics = [world.engine.cache_statistics(), world.engine.cache_statistics()]
        expected = tiny.logprobs(world.models[1], ids, second.response_ids)
        tiny.assert_close(second.logprobs, expected)
        assert len(ids) == 290
        return [first, second], statistics

    cached, statistics = two_turns()
    assert statistics == [(290, 256), (0, 0)]
    world.engine.shutdown()
    world.engine = world.build(enable_prefix_caching=False)
    computed, statistics = two_turns()
    assert statistics == [(290, 0), (0, 0)]
    for one, other in zip(cached, computed, strict=True):
        assert one.response_ids == other.response_ids
        assert (torch.tensor(one.logprobs) - torch.tensor(other.logprobs)).abs().max() <= 1e-6
    world.engine.shutdown()
    world.engine = world.build()


def weights_are_loaded_with_the_engines_config_set(world: World) -> None:
    """vLLM's quantised layers need it. 0.32's worker sets it; for 0.26, `rollout/vllm/process.py` does."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    seen = []
    with contextlib.ExitStack() as patches:
        for owner, name in (
            (reload, "initialize_layerwise_reload"),
            (Qwen2ForCausalLM, "load_weights"),
            (reload, "finalize_layerwise_reload"),
        ):
            original = getattr(owner, name)

            def spy(*args: Any, original: Callable[..., Any] = original, name: str = name) -> Any:
                seen.append((name, get_current_vllm_config_or_none() is world.engine._llm.llm_engine.vllm_config))
                return original(*args)

            patches.enter_context(mock.patch.object(owner, name, spy))
        world.push(1, 0)
    assert dict(seen) == {
        "initialize_layerwise_reload": True,
        "load_weights": True,
        "finalize_layerwise_reload": True,
    }
    assert get_current_vllm_config_or_none() is None


def replicas_generate_independently(world: World) -> None:
    """Ranks serve different requests, or none. The samples equal those of one rank that serves all requests."""
    model = world.push(1, 0)
    everything = world.generate(requests())
    share = slice(0, 5) if world.mesh.rank == 0 else slice(5, 12)
    assert world.generate(requests()[share]) == everything[share]
    if world.mesh.rank == 1:
        world.assert_samples_from(model, requests(3))
    else:
        assert world.generate([]) == []
    assert world.push(2, 1) is world.models[2]  # a collective call still works
    world.assert_samples_from(world.models[2], requests(2 + world.mesh.rank))


def the_cache_has_the_blocks_that_a_plan_counts(world: World) -> None:
    """planning/phases.py against the blocks that vLLM makes of so many bytes."""
    from grpo_megatron.models.engine_cache import EngineCache, kv_token_bytes
    from grpo_megatron.models.families import read_architecture

    real = world.engine._llm.llm_engine.vllm_config.cache_config
    token_bytes = kv_token_bytes(read_architecture(Path(world.folder)), world.mesh.rollout_tp, itemsize=4)
    planned = EngineCache(0.0, 0.0, real.kv_cache_memory_bytes, token_bytes, real.block_size)
    assert planned.tokens == real.num_gpu_blocks * real.block_size


# -- what a live engine refuses and survives: faulty streams, stale versions, sleep, a failure inside vLLM -------------


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
    before = world.generate(requests(3, max_tokens=6))
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
    assert world.generate(requests(3, max_tokens=6)) == before


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
    raises(RuntimeError, "generate: 1 submitted requests are unfinished", lambda: world.generate(requests(1)))
    raises(RuntimeError, "logprobs: 1 submitted requests are unfinished", lambda: engine.logprobs([[1, 2]]))
    raises(RuntimeError, "sleep: 1 submitted requests are unfinished", engine.sleep)
    raises(ValueError, "no unfinished request has the id 'b'", lambda: engine.abort(["a", "b"]))
    assert engine.num_unfinished == 1 and engine.poll() == []
    raises(RankError, "1 submitted requests are unfinished: poll or abort them first", lambda: world.push(2, 1))
    raises(RuntimeError, "no complete set of weights", engine.poll)
    engine.abort(["a"])
    world.push(1, 2)
    world.assert_samples_from(model, requests(3))


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
        if number == 0:
            world.engine = world.build()
            world.push(2, 4)
