"""vLLM 0.32's second model runner, the one of its GPUs, on the CPU: Triton interprets its kernels, and vLLM schedules ahead.

It records routes as on a GPU, with the real scheduler, connector and `EngineCore.step_with_batch_queue`. CUDA graphs, streams and
the memory of a sleeping engine are the only parts that a GPU adds; the attention and the experts are vLLM's for the CPU.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_megatron.config import RolloutConfig
from grpo_megatron.device import Device
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.weights.stream import engine_tensors
from grpo_megatron.parallel.mesh import build_mesh
from grpo_megatron.rollout.build import build_engine
from grpo_megatron.rollout.engine import Request
from grpo_megatron.rollout.vllm import process, versions
from tests import tiny, vision
from tests.rollout import checks, test_vllm_images
from tests.rollout import tiny as tiny_text
from tests.rollout.worlds import World, run_checks
from tests.worlds import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not versions.is_newest(), reason="vllm 0.26 has no second runner on the CPU"),
]
INTERPRETED = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "OMP_NUM_THREADS": "1"}
EOS = list(range(3, 20))


def enable_triton() -> None:
    """Makes vLLM take the interpreter for a Triton with a backend for the CPU (`HAS_TRITON` of triton_utils/importing.py)."""
    import triton.backends

    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # type: ignore[assignment]


class CudaLike(Device):
    """A CPU that the engine takes for a GPU."""

    is_cuda = True  # type: ignore[assignment]
    capability = (9, 0)
    preserve_rng = Device("cpu").preserve_rng  # type: ignore[assignment]
    preserve_torch_rng = Device("cpu").preserve_torch_rng  # type: ignore[assignment]

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None: ...


@contextlib.contextmanager
def like_a_gpu() -> Any:
    """Allow what vLLM's CPU platform forbids: scheduling ahead (platforms/cpu.py:331), and sleep, which frees nothing."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.gpu_worker import Worker

    update, arguments = CpuPlatform.check_and_update_config, process.vllm_arguments
    classes = process._classes(on_cpu=True)  # experts are packed as on the CPU

    def schedules_ahead(platform: Any, config: Any) -> None:
        update(config)
        config.scheduler_config.async_scheduling = True

    def with_executor(*args: Any, **named: Any) -> Any:  # vLLM's own but for the names of shared memory
        return {**arguments(*args, **named), "distributed_executor_backend": named["executor"]}

    with (
        mock.patch.object(CpuPlatform, "check_and_update_config", schedules_ahead),
        mock.patch.object(CpuPlatform, "is_sleep_mode_available", lambda self: True),
        mock.patch.object(Worker, "_maybe_get_memory_pool_context", lambda self, tag: contextlib.nullcontext()),
        mock.patch.object(process, "vllm_arguments", with_executor),
        mock.patch.object(process, "_classes", lambda on_cpu: classes),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


LIMITS: dict[str, Any] = {"max_model_len": 256, "eos_token_ids": EOS, "record_routes": True}


def record(folder: Path, tp: int) -> dict[str, Any]:
    enable_triton()
    with process.inside_vllm(Device("cpu")):
        process._import_vllm(Device("cpu"))
    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=tp)
    kwargs = {"kv_cache_memory_bytes": 1 << 25}
    rollout = RolloutConfig(
        tensor_model_parallel_size=tp,
        enforce_eager=True,
        engine_kwargs=kwargs,
        max_num_seqs=8,
        max_num_batched_tokens=256,
    )
    tensors = engine_tensors(read_architecture(folder), tp, reads_shards=True)
    with like_a_gpu():
        engine = build_engine(rollout, folder, mesh, CudaLike("cpu"), **LIMITS, dtype="float32", tensors=tensors)
        return rollouts(engine, folder, torch.device("cpu"))


def rollouts(engine: Any, folder: Path, device: torch.device) -> dict[str, Any]:
    """Two rollouts with a sleep after each, of requests that end by a token; per request (tokens, routes, reason)."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {"sequences": [], "ahead": []}
    core = engine._llm.llm_engine.engine_core.engine_core
    weights = {name: tensor.to(device) for name, tensor in load_file(folder / "model.safetensors").items()}
    for version in range(2):
        engine.wake_weights()
        engine.load_weights(iter([list(weights.items())]), version)
        engine.wake_kv_cache()
        prefix = tuple(20 + n % 60 for n in range(140))  # a block of the cache has 128 tokens
        for turn in range(2):  # the second finds the prefix in the cache
            requests = [Request(prefix[: 140 - n], 10 * version + n, 20) for n in range(turn, 3 + turn)]
            for request, completion in zip(requests, engine.generate(requests, version), strict=True):
                ids = [*request.prompt_ids, *completion.response_ids]
                found["sequences"].append((ids, completion.routes, completion.finish_reason))
        found["cached"] = engine.cache_statistics()[1]
        found["ahead"].append(sum(bool(batch[1].num_scheduled_tokens) for batch in core.batch_queue or ()))
        engine.sleep()
    return found


def make_experts(folder: Path) -> Path:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    sizes = {"vocab_size": 80, "head_dim": 64, "std": 0.05}
    return tiny.make_model(folder, "llama2", model_type="qwen3_moe", **sizes, **experts)


@torch.no_grad()
def expected_routes(folder: Path, sequences: list[list[int]], k: int) -> list[torch.Tensor]:
    """transformers' choices [tokens, layers, k], sorted."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    for ids in sequences:
        logits = model(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
        found.append(torch.stack([layer.topk(k, -1).indices.sort(-1).values for layer in logits], 1))
    return found


@pytest.mark.soak
@pytest.mark.parametrize("tp", [1, 2])
def test_routes_are_recorded_over_several_rollouts_that_schedule_ahead(tmp_path: Path, tp: int) -> None:
    """A batch is left when the last request has ended by its end token. Only the first rank of a replica has routes."""
    folder = make_experts(tmp_path)
    first, *others = run(record, tp, fresh=INTERPRETED, folder=folder, tp=tp)
    assert first["ahead"] == [1, 1] and first["cached"] > 0
    sequences, routes, reasons = zip(*first["sequences"], strict=True)
    assert "stop" in reasons
    for own, wanted in zip(routes, expected_routes(folder, list(sequences), 2), strict=True):
        assert torch.equal(torch.from_numpy(own).view(wanted.shape).long().sort(-1).values, wanted)
    for other in others:
        assert [(ids, None, reason) for ids, _, reason in first["sequences"]] == other["sequences"]


# -- the checks of the first runner --------------------------------------------------------------------------------------

TEXT = [
    checks.logprobs_equal_transformers_at_temperatures,
    checks.seeds_alone_decide_the_samples,
    checks.requests_join_and_leave_a_running_engine,
    checks.new_weights_change_the_samples,
    checks.a_push_forgets_cached_prefixes,
    checks.unfinished_requests_keep_weights_and_cache,
]
IMAGES = [
    test_vllm_images.drawn_tokens_equal_transformers,
    test_vllm_images.given_tokens_equal_transformers,
    test_vllm_images.continuations_go_on,
    test_vllm_images.equal_texts_with_different_images_are_not_mixed,
    test_vllm_images.features_are_computed_once_per_image_and_version,
]


def serve(folder: Path, kind: str) -> tuple[str, dict[str, str | None]]:
    enable_triton()
    if kind == "text":
        world = World("qwen2", str(folder), 1, {})
        world.push(1, 0)
    else:
        world = test_vllm_images.ImageWorld(folder, 1)
    runner = world.engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return type(runner).__module__, run_checks(world, TEXT if kind == "text" else IMAGES)  # type: ignore[arg-type]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["text", "images"])
def test_samples_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """The interpreter is slow: a minute or two."""
    folder = vision.make_model(tmp_path) if kind == "images" else Path(tiny_text.write_folder("qwen2", tmp_path))
    [(runner, reports)] = run(serve, 1, fresh=INTERPRETED, folder=folder, kind=kind)
    assert runner == "vllm.v1.worker.cpu.model_runner"  # a subclass of v1/worker/gpu/model_runner.py's
    assert not any(reports.values()), "\n".join(f"{name}:\n{report}" for name, report in reports.items() if report)
