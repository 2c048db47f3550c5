"""What the project relies on in vLLM's model runner, one test each. They hold for whichever runner vLLM has chosen.

Group 5 is this file, in bfloat16 with CUDA graphs, as in a run, and in float32, where rounding hides nothing. Not run on a GPU
yet. The figures name the runner. `VLLM_USE_V2_MODEL_RUNNER=0 make test-gpu GROUP=5` tests the first runner, `=1` the second.

The tests on CPU only ever see the first runner (`v1/worker/gpu_model_runner.py`). On CUDA vLLM 0.26 takes the second
(`v1/worker/gpu/`) for dense models, vLLM 0.32 for all. VLLM_USE_V2_MODEL_RUNNER=0 or 1 in the environment decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests import tiny
from tests.gpu.building import ON_CPU
from tests.gpu.conftest import needs_vllm
from tests.gpu.runner_bench import EOS, MAX_MODEL_LEN, MODEL, VOCAB, Bench, long_prompt, requests, share_of_same

Record = Callable[..., None]


@pytest.fixture(scope="module")
def engine_bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, lone_rank: None) -> Bench:
    """One engine for the tests of a file, in the dtype that the file names."""
    needs_vllm()
    folder = tiny.make_model(tmp_path_factory.mktemp("runner") / "model", "qwen2", std=0.06, **MODEL)
    return Bench(folder, request.module.DTYPE, enforce_eager=request.module.DTYPE == "float32")


@pytest.fixture
def bench(engine_bench: Bench, record_figures: Record) -> Bench:
    """The engine with the first model's weights."""
    engine_bench.push(0)
    record_figures({"runner": engine_bench.runner})
    return engine_bench


# -- samples -------------------------------------------------------------------------------------------------------------


def test_seeds_alone_decide_the_draws(bench: Bench, record_figures: Record) -> None:
    """The same tokens again, alone, in another order and among other requests; other seeds sample other tokens."""
    some = requests(16)
    together = bench.draw(some)
    crowd = bench.draw([*requests(48, temperature=0.9)[16:], *some])[-16:]
    shares = {
        "again": share_of_same(bench.draw(some), together),
        "alone": share_of_same([bench.draw([request])[0] for request in some], together),
        "in reverse": share_of_same(bench.draw(some[::-1])[::-1], together),
        "in a crowd": share_of_same(crowd, together),
    }
    from grpo_megatron.rollout.engine import sample_seed

    others = bench.draw([replace(some[11], seed=sample_seed(0, 0, "prompt 11", index)) for index in range(1, 8)])
    assert len({tuple(c.response_ids) for c in [together[11], *others]}) == 8, "the same prompt with other seeds"
    assert min(shares.values()) >= bench.bounds.same, shares
    record_figures(shares)


def test_logprobs_are_of_the_distribution_drawn_from(bench: Bench, record_figures: Record) -> None:
    """`processed_logprobs`: after temperature, top_k and top_p, alone and mixed in one batch."""
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "temperature 0.7": {"temperature": 0.7},
        "temperature 1.3": {"temperature": 1.3},
        "top_k 5": {"top_k": 5},
        "top_p 0.6": {"top_p": 0.6},
        "all three": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    }
    found: dict[str, Any] = {}
    for name, settings in kinds.items():
        found[name] = list(
            bench.agree(0, requests(16, **settings), factor=1 if name == "plain" or "temp" in name else 3).values()
        )
    mixed = [replace(r, **list(kinds.values())[i % len(kinds)]) for i, r in enumerate(requests(24))]
    mixed = [replace(r, temperature=0.0) if i % 8 == 7 else r for i, r in enumerate(mixed)]
    found["mixed"] = list(bench.agree(0, mixed, factor=3).values())
    record_figures(found)


def test_greedy_draws_are_the_most_probable(bench: Bench, record_figures: Record) -> None:
    some = requests(8, temperature=0.0, max_tokens=8)
    completions = bench.draw(some)
    gaps = []
    with torch.no_grad():
        for request, completion in zip(some, completions, strict=True):
            ids = torch.tensor([[*request.prompt_ids, *completion.response_ids]], device=bench.models[0].device)
            logits = bench.models[0](ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
            drawn = logits.gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]
            gaps.append(float((logits.max(-1).values - drawn).max()))
    found = bench.compare(0, some, completions)
    bench.require(found)
    assert max(gaps) <= bench.bounds.worst, gaps
    record_figures({**found, "largest gap to the most probable token": max(gaps)})


def test_responses_end_with_their_stop_token(bench: Bench, record_figures: Record) -> None:
    some = requests(32, max_tokens=60)
    completions = bench.draw(some)
    for completion in completions:
        stops = [t for t, token in enumerate(completion.response_ids) if token in EOS]
        stopped = completion.finish_reason == "stop"
        assert stops == ([len(completion.response_ids) - 1] if stopped else []), completion
        assert stopped or len(completion.response_ids) == 60, completion
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    # Each request with its own tenth token as a further stop token: the same samples up to there.
    own = [
        replace(r, stop_token_ids=(c.response_ids[min(9, len(c.response_ids) - 1)],))
        for r, c in zip(some, completions, strict=True)
    ]
    same = 0
    for request, whole, cut in zip(own, completions, bench.draw(own), strict=True):
        (stop,) = request.stop_token_ids
        assert stop not in cut.response_ids[:-1]
        same += cut.response_ids == whole.response_ids[: whole.response_ids.index(stop) + 1]
    assert same / len(some) >= bench.bounds.same
    bench.push(0)  # directly after requests that ended at different times: nothing may still hold the cache
    record_figures(
        {"stopped": sum(c.finish_reason == "stop" for c in completions), "same up to the stop": same / len(some)}
    )


def test_generators_of_the_host_are_untouched(bench: Bench, record_figures: Record) -> None:
    def states() -> list[bytes]:
        state = bench.device.rng_state()
        tensors = [state[name].numpy().tobytes() for name in ("torch", "cuda") if name in state]
        return [repr(state["python"]).encode(), repr(state["numpy"]).encode(), *tensors]

    before = states()
    bench.draw(requests(4))
    bench.engine.logprobs([[1, 2, 3]])
    assert states() == before


# -- given text --------------------------------------------------------------------------------------------------------


def test_logprobs_of_given_text(bench: Bench, record_figures: Record) -> None:
    """`prompt_logprobs=0`: texts of one token, and of more than a step computes (256); also when the cache knows them."""
    from grpo_megatron.rollout.engine import Request

    texts = [list(long_prompt(length, start)) for start, length in enumerate((1, 2, 16, 17, 129, 300, 700))]

    def difference() -> torch.Tensor:
        got = bench.engine.logprobs(texts)
        assert [len(row) for row in got] == [len(text) - 1 for text in texts]
        exact = [bench.exact(0, Request((text[0],), 0, 1), text[1:]) for text in texts if len(text) > 1]
        return (torch.tensor([value for row in got for value in row]) - torch.cat(exact)).abs()

    first = difference()
    bench.draw([Request(tuple(text), 1, max_tokens=4) for text in texts])  # their blocks are now in the prefix cache
    second = difference()
    for found in (first, second):
        bench.require({"mean": found.mean().item(), "max": found.max().item(), "outside": 0.0})
    record_figures(
        {"first": [first.mean().item(), first.max().item()], "cached": [second.mean().item(), second.max().item()]}
    )


def test_long_prompts_are_computed_in_chunks(bench: Bench, record_figures: Record) -> None:
    """Prompts of up to 700 tokens, 256 tokens per step, among short ones that already sample."""
    some = requests(8)
    lengths = (700, 257, 256, 255)
    some = [*some[:4], *(replace(r, prompt_ids=long_prompt(n, n)) for r, n in zip(some[4:], lengths, strict=True))]
    record_figures(bench.agree(0, some))


# -- weights and cache -------------------------------------------------------------------------------------------------


def test_an_update_forgets_cached_prefixes(bench: Bench, record_figures: Record) -> None:
    (request,) = [replace(r, prompt_ids=long_prompt(600)) for r in requests(1)]
    first, second = (bench.raw([request])[0].num_cached_tokens for _ in range(2))
    assert first == 0 and second >= 384, f"{first}, then {second} of 600 tokens were in the cache"

    def error() -> float:
        completion = bench.draw([request])[0]
        return float(
            (torch.tensor(completion.logprobs) - bench.exact(1, request, completion.response_ids)).abs().mean()
        )

    with mock.patch.object(bench.engine._llm, "reset_prefix_cache", lambda: True):
        bench.push(1)
    without = error()
    bench.push(0)
    bench.draw([request])
    bench.push(1)
    cached = bench.raw([request])[0].num_cached_tokens
    bench.push(1)
    left = error()
    assert cached == 0, f"{cached} tokens of the old weights were used"
    assert left <= bench.bounds.mean
    assert without >= 5 * left, "without the reset the old weights' keys would not show: this check proves nothing"
    record_figures({"tokens from the cache": second, "error": left, "error without the reset": without})


def test_updates_replace_all_weights_in_place(bench: Bench, record_figures: Record) -> None:
    """Layer-wise reload: other weights, in any order, in large or small buckets; CUDA graphs keep the addresses."""
    some = requests(16)
    before = bench.draw(some)
    addresses = _addresses(bench)
    found = {}
    for name, size, backwards in (("small buckets", 1, False), ("one bucket", 1000, False), ("backwards", 5, True)):
        bench.push(1, size, backwards)
        found[name] = list(bench.agree(1, some).values())
        assert share_of_same(bench.draw(some), before) < 0.5
        bench.push(0)
    assert ON_CPU or _addresses(bench) == addresses, "parameters have moved: CUDA graphs would read old memory"
    for _ in range(8):
        bench.push(0)
    found["back"] = [share_of_same(bench.draw(some), before)]
    assert found["back"][0] >= bench.bounds.same
    record_figures(found)


def _addresses(bench: Bench) -> dict[str, int]:
    (found,) = bench.engine._llm.apply_model(lambda model: {n: p.data_ptr() for n, p in model.named_parameters()})
    return found


# -- requests that do not end by themselves -----------------------------------------------------------------------------


def test_aborted_requests_leave_nothing_behind(bench: Bench, record_figures: Record) -> None:
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
    record_figures({"came back": len(outputs), "of them the same": sum(kept) / len(kept), "afterwards the same": same})


def test_preempted_requests_go_on_as_they_were(bench: Bench, record_figures: Record) -> None:
    """More tokens than the cache has room for: vLLM drops requests, computes them anew, and samples on."""
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
        outputs = bench.raw(some, params)
    if not dropped:
        pytest.skip(f"24 requests of {length} tokens fit into the cache of {room}")
    from grpo_megatron.rollout.vllm.engine import _completion, _Entry

    found_all = [_completion(_Entry(0, None, 0, []), output) for output in outputs]
    completions = [completion for completion in found_all if completion is not None]
    assert len(completions) == len(found_all)
    assert all(len(c.response_ids) == length and max(c.response_ids) < VOCAB for c in completions)
    found = bench.compare(0, some, completions)
    bench.require(found, factor=2)
    few = bench.raw(some[:4], params[:4])
    same = share_of_same([_completion(_Entry(0, None, 0, []), output) for output in few], completions[:4])
    record_figures({**found, "preempted": len(dropped), "tokens each": length, "as without preemption": same})
