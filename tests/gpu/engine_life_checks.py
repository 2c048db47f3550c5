"""Further checks of `runner_checks.py`: the engine sleeps and wakes, requests are aborted and preempted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.gpu.building import MIB, ON_CPU, free_mib
from tests.gpu.reports import Skipped
from tests.gpu.runner_bench import MAX_MODEL_LEN, VOCAB, Bench, long_prompt, requests, share_of_same
from tests.gpu.runner_checks import check


def _sleep_and_wake(bench: Bench, level: int) -> Mapping[str, Any]:
    """Three times: sleep, be refused, wake, load other weights, draw."""
    long = [replace(r, prompt_ids=long_prompt(600)) for r in requests(1)]
    before = bench.draw(requests(16))
    bench.draw(long)
    lost, freed, found = [], [], {}
    for number in (1, 0, 0):
        awake = free_mib()
        bench.engine._sleep_level = level
        bench.engine.sleep()
        freed.append(free_mib() - awake)
        try:
            bench.draw(requests(1))
        except RuntimeError as error:
            assert "asleep" in str(error)
        else:
            raise AssertionError("an engine that sleeps has answered")
        bench.engine.wake_weights()
        bench.push(number)
        bench.engine.wake_kv_cache()
        found[f"model {number}"] = list(bench.agree(number, [*long, *requests(16)]).values())
        lost.append(awake - free_mib())
    same = share_of_same(bench.draw(requests(16)), before)
    assert same >= bench.bounds.same
    if not ON_CPU:
        weights = sum(p.nbytes for p in bench.models[0].parameters()) / MIB
        assert min(freed) >= weights, f"the weights have {weights:.0f} MiB"
        assert lost[-1] <= 16, f"free memory fell by {lost} MiB in three rounds"
    return {**found, "freed": (freed, "MiB"), "lost": (lost, "MiB"), "same draws": same}


@check
def sleep_level_1(bench: Bench) -> Mapping[str, Any]:
    return _sleep_and_wake(bench, 1)


@check
def sleep_level_2(bench: Bench) -> Mapping[str, Any]:
    return _sleep_and_wake(bench, 2)


# -- requests that do not end by themselves -----------------------------------------------------------------------------


@check
def aborted_requests_leave_nothing_behind(bench: Bench) -> Mapping[str, Any]:
    """Sleeping aborts what still runs. Half of a batch is aborted after four steps: the others are as always."""
    some = requests(16)
    before = bench.draw(some)
    engine = bench.engine._llm.llm_engine
    step, steps = engine.step, [0]

    def stepping() -> Any:
        steps[0] += 1
        if steps[0] == 4:
            running = list(engine.output_processor.request_states)
            engine.abort_request(running[: len(running) // 2], internal=True)
        return step()

    with mock.patch.object(engine, "step", stepping):
        outputs = bench.raw(some)
    assert 0 < len(outputs) < len(some), f"{len(outputs)} of {len(some)} requests came back"
    expected = {tuple(r.prompt_ids): c.response_ids for r, c in zip(some, before, strict=True)}
    kept = [list(o.outputs[0].token_ids) == expected[tuple(o.prompt_token_ids)] for o in outputs]
    assert bench.engine._llm.reset_prefix_cache(), "aborted requests still hold blocks of the cache"
    same = share_of_same(bench.draw(some), before)
    assert min(sum(kept) / len(kept), same) >= bench.bounds.same
    return {"came back": len(outputs), "of them the same": sum(kept) / len(kept), "afterwards the same": same}


@check
def preempted_requests_go_on_as_they_were(bench: Bench) -> Mapping[str, Any]:
    """More tokens than the cache has room for: vLLM drops requests, computes them anew, and draws on."""
    engine = bench.engine._llm.llm_engine
    cache, scheduler = engine.vllm_config.cache_config, engine.engine_core.engine_core.scheduler
    room = cache.num_gpu_blocks * cache.block_size
    length = min(MAX_MODEL_LEN - 20, room // 8)
    some = [replace(r, max_tokens=length) for r in requests(24)]
    plain = {"stop_token_ids": [], "ignore_eos": True}  # every request runs to its end
    params = [bench.engine._queue.params(request) for request in some]
    for one in params:
        for name, value in plain.items():
            setattr(one, name, value)
    dropped = []
    real = scheduler._preempt_request

    def counting(request: Any, *arguments: Any, **options: Any) -> Any:
        dropped.append(request.request_id)
        return real(request, *arguments, **options)

    with mock.patch.object(scheduler, "_preempt_request", counting):
        outputs = bench.engine._run([list(r.prompt_ids) for r in some], params)
    if not dropped:
        raise Skipped(f"24 requests of {length} tokens fit into the cache of {room}")
    from grpo_megatron.rollout.vllm import _completion

    completions = [_completion(output.outputs[0]) for output in outputs]
    assert all(len(c.response_ids) == length and max(c.response_ids) < VOCAB for c in completions)
    found = bench.compare(0, some, completions)
    bench.require(found, factor=2)
    few = bench.engine._run([list(r.prompt_ids) for r in some[:4]], params[:4])
    same = share_of_same([_completion(output.outputs[0]) for output in few], completions[:4])
    return {**found, "preempted": len(dropped), "tokens each": length, "as without preemption": same}
