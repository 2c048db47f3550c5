"""TransformersEngine against transformers' own forward pass: the checks that vLLM's engine passes too, on two ranks.

Log-probabilities are compared within the project's bounds (mean 1e-6, max 1e-5). That samples do not depend on other requests
is compared bit for bit, which holds with one thread.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.config import ConfigError, RolloutConfig
from grpo_megatron.device import Device
from grpo_megatron.exact.rowwise import FEWEST_ROWS
from grpo_megatron.parallel.mesh import Mesh, build_mesh
from grpo_megatron.rollout.build import engine_problems
from grpo_megatron.rollout.engine import Request
from grpo_megatron.rollout.transformers_engine import RowCache, RowModel, RunningBatch, sample_tokens
from tests import worlds
from tests.rollout import checks, tiny
from tests.rollout.worlds import World, raises, requests, run_checks
from tests.tiny import make_model

# -- one token ---------------------------------------------------------------------------------------------------------


def sample(logits: torch.Tensor, seed: int = 0, **settings: Any) -> tuple[list[int], list[float], list[Any]]:
    request = Request((1,), 0, max_tokens=1, **settings)
    generator = random.Random(seed)
    return sample_tokens(logits, [request] * len(logits), [generator.random] * len(logits))


def test_tokens_have_the_frequencies_of_their_distribution() -> None:
    """20,000 samples: a count has a standard deviation of sqrt(20000 p (1 - p)), at most 71. The bound is five of them."""
    row = torch.tensor([0.0, 1.0, -1.0, 2.0, float("-inf"), 0.5])
    for temperature in (1.0, 0.5):
        tokens, logprobs, _ = sample(row.expand(20_000, -1), temperature=temperature)
        expected = (row / temperature).log_softmax(0)
        counts = Counter(tokens)
        for token, logprob in enumerate(expected.tolist()):
            p = math.exp(logprob)
            assert abs(counts[token] - 20_000 * p) <= 5 * math.sqrt(20_000 * p * (1 - p))
        assert torch.equal(torch.tensor(logprobs), expected[tokens])


def test_top_k_and_top_p_renormalise_and_greedy_takes_the_most_likely() -> None:
    row = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(200, -1)
    for settings, kept in [
        ({"top_k": 2}, {1: 0.4, 3: 0.3}),
        ({"top_p": 0.69}, {1: 0.4, 3: 0.3}),
        ({"top_p": 0.71}, {1: 0.4, 3: 0.3, 2: 0.2}),
        ({"top_p": 0.01}, {1: 1.0}),
        ({"top_k": 3, "top_p": 0.5}, {1: 0.4, 3: 0.3}),  # of 0.4 + 0.3 + 0.2, 0.4 is less than half
        ({"min_p": 0.49}, {1: 0.4, 3: 0.3, 2: 0.2}),
        ({"min_p": 0.49, "top_p": 0.7}, {1: 0.4, 3: 0.3}),  # of 0.9, 0.63
        ({"top_k": 9}, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
    ]:
        tokens, logprobs, sets = sample(row, max_kept=4, **settings)  # type: ignore[arg-type]
        assert set(tokens) == set(kept)
        assert all(ids.tolist() == sorted(kept) for ids in sets if ids is not None)
        assert (sets[0] is None) == (len(kept) == 4)  # as many as may be told, or more
        for token, logprob in zip(tokens, logprobs, strict=True):
            assert math.exp(logprob) == pytest.approx(kept[token] / sum(kept.values()), rel=1e-6)
    tokens, logprobs, _ = sample(row, temperature=0)
    assert set(tokens) == {1} and math.exp(logprobs[0]) == pytest.approx(0.4)
    # A token of probability zero is never sampled. 1 - 2**-53 times the sum may round to the sum: 1 stands for that.
    row = torch.tensor([[0.0, 0.3, float("-inf")]])
    assert sample_tokens(row, [Request((1,), 0, 1)], [lambda: 1.0])[0] == [1]
    assert sample_tokens(row.flip(1), [Request((1,), 0, 1)], [lambda: 0.0])[0] == [1]


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RowModel:
    made = RowModel(tiny.write_folder("qwen2", tmp_path_factory.mktemp("model")), "float32")
    made.module.load_state_dict(tiny.model("qwen2", 1).state_dict())
    return made


@torch.inference_mode()
def test_the_bits_of_a_row_do_not_depend_on_the_others(model: RowModel) -> None:
    """Prompts of 1 to 70 tokens: alone, together, and in a cache with longer and shorter rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        prompts = [[(7 * i + 3 * t) % tiny.VOCAB for t in range(n)] for i, n in enumerate((1, 31, 32, 33, 70))]
        together, computed = model.prefill(prompts)
        cache = RowCache()
        cache.reserve(FEWEST_ROWS, 80, computed)
        cache.insert(0, computed, range(5))
        tokens, lengths = [3, 1, 4, 1, 5], list(map(len, prompts))
        decoded = [model.decode(tokens, [n + t for n in lengths], cache) for t in range(3)]
        for row, prompt in enumerate(prompts):
            alone, own = model.prefill([prompt])
            assert torch.equal(alone[0], together[row])
            single = RowCache()
            single.reserve(FEWEST_ROWS, len(prompt) + 3, own)
            single.insert(0, own, [0])
            for t in range(3):
                after = model.decode([tokens[row]], [lengths[row] + t], single)
                assert torch.equal(after[0], decoded[t][row]), (row, t)
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3"])
def test_windows_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """A window of 5 in all layers, or in one of two: logits of a prefill, of decoding, and of full sequences."""
    of_family: dict[str, dict[str, Any]] = {
        "mistral": {},
        "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
        "gemma3": {"sliding_window_pattern": 2},
    }
    window = of_family[family]
    folder = make_model(tmp_path, family, num_hidden_layers=2, sliding_window=5, **window)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = [[3 * i * i % 101 for i in range(n)] for n in (40, 9)]
    made = RowModel(folder, "float32")
    made.module.load_state_dict(theirs.state_dict())
    after, computed = made.prefill([row[:-1] for row in ids])
    cache = RowCache()
    cache.reserve(FEWEST_ROWS, 41, computed)
    cache.insert(0, computed, range(2))
    decoded = made.decode([row[-1] for row in ids], [len(row) - 1 for row in ids], cache)
    for row, *got in zip(ids, after, decoded, strict=True):
        want = theirs(torch.tensor([row])).logits[0, -2:]
        torch.testing.assert_close(torch.stack(got), want, rtol=0, atol=1e-5)


def test_prompts_are_computed_once_and_rows_leave_and_join(model: RowModel) -> None:
    """Three rows at a time; the samples are those of a batch that has room for all."""
    some = [replace(r, max_tokens=3 + 2 * i) for i, r in enumerate(requests(7))]
    some[2] = replace(some[1], seed=5)

    def serve(max_rows: int) -> tuple[dict[str, Any], list[int], tuple[int, int]]:
        batch, finished, sizes = RunningBatch(model, max_rows, 64, tiny.EOS), {}, []
        for i, request in enumerate(some):
            batch.add(str(i), request)
        with torch.inference_mode():
            while batch:
                finished |= dict(batch.step())
                sizes.append(len(batch._running))
        return finished, sizes, batch.cache_statistics()

    few, sizes, _ = serve(3)
    assert max(sizes) == 3
    many, sizes, statistics = serve(100)
    assert sizes[0] == 3 and few == many  # two aligned prompts per step of 64 tokens, one of which is shared
    assert statistics == (sum(len(r.prompt_ids) for r in some), len(some[1].prompt_ids))


def test_models_that_it_cannot_compute_are_refused(tmp_path: Path) -> None:
    config = tiny.config("qwen2")
    config.layer_types = ["full_attention", "chunked_attention"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="of the types chunked_attention, full_attention.*set rollout.engine=vllm"):
        RowModel(tmp_path, "float32")


def test_options_of_other_engines_are_refused() -> None:
    rollout = RolloutConfig(
        engine="transformers", tensor_model_parallel_size=2, quantization="mxfp8", engine_kwargs={"block_size": 16}
    )
    keys = ("tensor_model_parallel_size=2", "quantization=mxfp8", "engine_kwargs={'block_size': 16}")
    for problem, key in zip(engine_problems(rollout), keys, strict=True):
        assert problem.startswith(f"rollout.{key} with rollout.engine=transformers: ")
    assert list(engine_problems(RolloutConfig(engine="transformers"))) == []
    assert "whole tensors" in next(engine_problems(RolloutConfig(engine="transformers", sync="delta")))


# -- a live engine on two ranks ----------------------------------------------------------------------------------------


class TransformersWorld(World):
    """World with this engine in the place of vLLM's."""

    def __init__(self, kind: str, folder: str, mesh: Mesh) -> None:
        from grpo_megatron.models.families import read_architecture
        from grpo_megatron.models.weights.stream import engine_tensors

        self.kind, self.folder, self.device, self.mesh = kind, folder, Device("cpu"), mesh
        self.models = {seed: tiny.model(kind, seed) for seed in (1, 2)}
        self.tensors = engine_tensors(read_architecture(Path(folder)), 1, reads_shards=False)
        self.engine = self.build()

    def build(self, **kwargs: Any) -> Any:
        return super().build(engine="transformers", **kwargs)


def the_memory_is_digested(world: World) -> None:
    from grpo_megatron.sync.digest import slice_digest

    model, engine = world.push(1, 0), world.engine
    expected = {
        name: int(slice_digest(tensor, world.tensors.tensors[name], 0)) for name, tensor in tiny.weights(model).items()
    }
    assert engine.digests() == expected
    next(engine._model.module.parameters()).data[5, 3] += 1e-3
    assert len(set(engine.digests().items()) - set(expected.items())) == 1


def a_failure_in_a_step_breaks_the_engine(world: World) -> None:
    world.push(1, 0)
    engine = world.engine
    engine.submit("a", requests(1)[0], 0)
    engine._queue._model = None
    raises(AttributeError, "prefill", engine.poll)
    raises(RuntimeError, "must be built again: AttributeError", engine.poll)
    assert engine.num_unfinished == 0
    engine.shutdown()
    engine.shutdown()
    raises(RuntimeError, "shut down", lambda: engine.generate(requests(1), 0))
    raises(
        ConfigError,
        r"kv_cache_gib=1e-06: one sequence of 384 tokens needs 1024 bytes x 384",
        lambda: world.build(engine_options={"kv_cache_gib": 1e-6}),
    )
    world.engine = world.build(free_cache_engine=False)
    world.push(1, 3)
    world.engine.sleep()
    world.assert_samples_from(world.models[1], requests(2))


CHECKS: list[Callable[[World], None]] = [
    checks.logprobs_equal_transformers_at_temperatures,
    checks.seeds_alone_decide_the_samples,
    checks.requests_join_and_leave_a_running_engine,
    checks.responses_end_with_their_stop_token,
    checks.responses_end_with_the_token_that_completes_a_stop_text,
    checks.new_weights_change_the_samples,
    checks.prompts_may_be_more_than_a_step_computes,
    checks.order_of_the_stream_does_not_matter,
    checks.replicas_generate_independently,
    checks.stale_version_is_refused,
    checks.asleep_it_refuses_work,
    checks.unfinished_requests_keep_weights_and_cache,
    *checks.ON_ALL,
    *checks.ON_LAST,
    the_memory_is_digested,
    a_failure_in_a_step_breaks_the_engine,
]


def serve(folders: dict[str, str]) -> list[str | None]:
    """All checks with one model, those of the values with the others. Per check None or its traceback."""
    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    return [
        report
        for kind, folder in folders.items()
        for report in run_checks(
            TransformersWorld(kind, folder, mesh), CHECKS if kind == "qwen2" else CHECKS[:2]
        ).values()
    ]


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_live_engine(tmp_path: Path) -> None:
    folders = {kind: tiny.write_folder(kind, tmp_path / kind) for kind in ("qwen2", "llama")}
    for reports in worlds.run(serve, 2, folders=folders):
        assert len(reports) == len(CHECKS) + 2
        assert [report for report in reports if report] == []
