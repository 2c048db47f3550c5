"""Offload and onload of optimizer and reference: same objects, same bits, in an order that leaves room for the engine.

On the CPU the "device" is the host. Storages are emptied and filled in the same way.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_megatron.config import Config, RolloutConfig
from grpo_megatron.device import Device
from grpo_megatron.models.optimizer import HostBuffer, OffloadedTensors, state_tensors
from grpo_megatron.models.policy import Reference
from grpo_megatron.models.weights import sharded_state
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.rollout.vllm.arguments import VllmOptions, runner_environment, vllm_arguments
from grpo_megatron.rollout.vllm.engine import VllmEngine
from grpo_megatron.training import colocation
from tests import tiny
from tests.models.policies import LAYOUTS, build, loss, same, share, stream
from tests.worlds import ranks


@pytest.mark.parametrize("block", [HostBuffer.BLOCK, 8])
def test_tensors_return_as_they_were(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a tensor's bytes are in several blocks of the host's buffer."""
    monkeypatch.setattr(HostBuffer, "BLOCK", block)
    monkeypatch.setattr(HostBuffer, "SMALLEST", min(block, HostBuffer.SMALLEST))
    alone, buffer, one = torch.arange(6.0), torch.arange(10.0), torch.tensor(3.0)
    view_of_alone, part = alone.view(2, 3), buffer[2:5]
    tensors = OffloadedTensors(Device("cpu"))
    tensors.offload([alone, part, one, alone])
    assert tensors.is_offloaded and tensors.num_bytes == 24
    assert alone.untyped_storage().nbytes() == 0
    assert buffer.untyped_storage().nbytes() == 40 and one.item() == 3.0  # a view of a larger buffer; one number
    tensors.offload([torch.zeros(5)])  # already offloaded: does nothing
    tensors.onload()
    assert not tensors.is_offloaded and tensors.num_bytes == 0
    assert torch.equal(view_of_alone, torch.arange(6.0).view(2, 3)) and torch.equal(alone, torch.arange(6.0))
    alone += 1
    version = alone._version
    tensors.offload([alone])
    tensors.onload()
    tensors.onload()
    assert alone._version == version  # torch's count of changes: the bits are the same
    assert torch.equal(view_of_alone.flatten(), torch.arange(1.0, 7.0))
    alone += 1
    tensors.offload([alone], unchanged=True)  # not true here: shows that the old host copy is used
    tensors.onload()
    assert torch.equal(alone, torch.arange(1.0, 7.0))


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (7 << 20) + 5, (3 << 30) + (5 << 28) + 1])
def test_the_buffer_has_powers_of_two_and_loses_less_than_a_mebibyte(size: int) -> None:
    """A pinned block is rounded up to a power of two, so that others would take up to twice their bytes."""
    with mock.patch("torch.empty", lambda size, **_: range(size)):
        buffer = HostBuffer(size, pinned=True)
    assert all(len(block) & (len(block) - 1) == 0 for block in buffer.blocks)
    assert 0 <= sum(map(len, buffer.blocks)) - size < HostBuffer.SMALLEST


@ranks(2)
def trained(folder: Path, dtype: str, distributed: bool) -> dict[str, Any]:
    """Weights after three updates, with and without offloading between them, and the offloaded bytes."""
    out: dict[str, Any] = {}
    for offload in (False, True):
        megatron = {"offload_optimizer": offload, "use_distributed_optimizer": distributed}
        policy = build(folder, LAYOUTS["1"], dtype=dtype, megatron=megatron, optim={"lr": 1e-3})
        batch = tiny.make_batch(tiny.make_sequences(6), [[[0, 1, 2]]], share(6, policy.mesh.dp_rank, 2))
        for _ in range(3):
            policy.update(batch, loss)
            gradients = policy.ddp.buffers[0].grad_data.untyped_storage()
            before = gradients.nbytes()
            policy.offload()
            out["offloaded bytes"] = policy._offloaded.num_bytes
            assert gradients.nbytes() == (0 if offload else before)
            copies = {"weight": torch.ones(1)}  # as Transformer Engine's layers have
            next(policy.ddp.modules())._fp8_workspaces = copies
            out[f"logprobs {offload}"] = policy.logprobs(batch)
            assert not copies, "the FP8 copies of weights are freed after each pass"
            list(policy.hf_weights(1))
            policy.onload()
            assert gradients.nbytes() == before
        out[f"weights {offload}"] = stream(policy)
    out["parameters"] = sum(p.numel() for p in policy.ddp.parameters())
    out["reference"] = referred(folder, policy, batch)
    return out


def referred(folder: Path, policy: Any, batch: Any) -> dict[str, Any]:
    """An offloaded reference gives the same logprobs as one on the device, before and after `copy_from`."""
    out = []
    for offload in (False, True):
        megatron = policy.actor.megatron.model_copy(update={"offload_reference": offload})
        actor = policy.actor.model_copy(update={"megatron": megatron})
        reference = Reference.load(folder, "float32", policy.arch, actor, policy.mesh, policy.device)
        first = reference.logprobs(batch)
        streamed = [t.sum() for bucket in reference.hf_weights(1) for _, t in bucket]
        reference.copy_from(policy)
        sizes = {p.untyped_storage().nbytes() for p in reference.model.parameters()}
        out.append((first, reference.logprobs(batch), torch.stack(streamed), sizes == {0}))
    (first, second, sums, is_empty_without), (first_offloaded, second_offloaded, sums_offloaded, is_empty_with) = out
    return {
        "same logprobs": torch.equal(first, first_offloaded) and torch.equal(second, second_offloaded),
        "same stream": torch.equal(sums, sums_offloaded),
        "copied": not torch.equal(first, second),
        "is empty": (is_empty_without, is_empty_with),
    }


@pytest.mark.parametrize(("dtype", "distributed"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_offloading_changes_no_bit_of_the_training(tmp_path: Path, dtype: str, distributed: bool) -> None:
    """Per parameter, float32 has two moments and bfloat16 also a float32 copy. The distributed optimizer halves each."""
    folder = tiny.make_model(tmp_path / "model", "qwen2")
    for result in trained(folder=folder, dtype=dtype, distributed=distributed):
        without, with_offload = result["weights False"], result["weights True"]
        same(with_offload, without)
        assert torch.equal(result["logprobs False"], result["logprobs True"])
        numbers = (2 if dtype == "float32" else 3) * (0.5 if distributed else 1.0) * result["parameters"]
        assert result["offloaded bytes"] == pytest.approx(4 * numbers, rel=0.02)
        assert result["reference"] == {
            "same logprobs": True,
            "same stream": True,
            "copied": True,
            "is empty": (False, True),
        }


@ranks(1)
def started(folder: Path) -> list[dict[str, Any]]:
    """Bytes on the device when the engine is constructed, and weights after two updates, with a checkpoint in between.

    Three policies: not beside an engine and not saved; beside one without, and with, `offload_optimizer`.
    """
    out = []
    for beside_engine, offload in ((False, False), (True, False), (True, True)):
        megatron = {"offload_optimizer": offload}
        policy = build(folder, LAYOUTS["1"], dtype="bfloat16", megatron=megatron, optim={"lr": 1e-3})
        held: dict[str, Any] = {}

        def construct(*arguments: Any, policy: Any = policy, held: dict[str, Any] = held) -> Any:
            moments = [t for t in state_tensors(policy.optimizer) if t.numel() > 1]
            held["gradients"] = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in policy.ddp.buffers)
            held["optimizer"] = sum(t.untyped_storage().nbytes() for t in moments)
            held["weights"] = sum(p.nbytes for p in policy.ddp.parameters() if p.untyped_storage().nbytes())
            sleep = lambda: held.update(slept=policy._offloaded.is_offloaded)  # noqa: E731
            return SimpleNamespace(sleep=sleep, reads_shards=True)

        if beside_engine:
            config = Config.model_validate({"model": {"path": folder}, "actor": policy.actor.model_dump()})
            with mock.patch.object(colocation, "build_rollout_engine", construct):
                colocation.build_colocation(config, SimpleNamespace(), policy)  # type: ignore[arg-type]
        batch = tiny.make_batch(tiny.make_sequences(6), [[[0, 1, 2]]])
        policy.update(batch, loss)
        if beside_engine:
            sharded_state.save_sharded(policy, folder.parent / f"checkpoint {offload}")
        policy.update(batch, loss)
        held["trained"] = stream(policy)
        held["parameters"] = sum(p.numel() for p in policy.ddp.parameters())
        out.append(held)
    return out


def test_the_engine_is_constructed_while_only_weights_are_on_the_device(tmp_path: Path) -> None:
    """And the policy is onloaded only when the engine sleeps; none of it changes a bit of the training.

    Without `offload_optimizer` everything is still there: 4 bytes of gradients and 12 of optimizer per parameter.
    """
    (results,) = started(folder=tiny.make_model(tmp_path / "model", "qwen2"))
    plain, without, with_offload = results
    numbers = plain["parameters"]
    assert (with_offload["gradients"], with_offload["optimizer"]) == (0, 0)
    assert without["gradients"] == pytest.approx(4 * numbers, rel=0.02)
    assert without["optimizer"] == pytest.approx(12 * numbers, rel=0.02)
    assert with_offload["weights"] == without["weights"] == 2 * numbers
    assert (without["slept"], with_offload["slept"]) == (False, True)
    for other in (without, with_offload):
        same(other["trained"], plain["trained"])


class Recorder:
    """A stand-in for engine, policy or device, which records every call."""

    def __init__(self, name: str, calls: list[str], **values: Any) -> None:
        self._name, self._calls = name, calls
        self.__dict__.update(values)

    def __getattr__(self, method: str) -> Any:
        return lambda *args, **kwargs: self._calls.append(f"{self._name}.{method}")


def test_the_order_frees_memory_before_it_is_needed() -> None:
    """The engine wakes after the optimizer is offloaded, its cache after the weights are loaded; then the reverse."""
    calls: list[str] = []
    device = Recorder("device", calls)
    policy: Any = Recorder("policy", calls, arch=SimpleNamespace(vocab_size=50), device=device)
    engine: Any = Recorder("engine", calls)
    nothing: Any = SimpleNamespace()
    beside = colocation.Colocation(policy, engine, nothing, probe=nothing, provenance=nothing)
    beside._sync = lambda *args: calls.append("sync")  # type: ignore[method-assign,assignment,func-returns-value]
    beside._probe = lambda *args: calls.append("probe")  # type: ignore[method-assign,assignment,func-returns-value]
    assert calls == ["engine.sleep"]  # at construction: a warmup trains before the first rollout
    calls.clear()
    with contextlib.suppress(KeyError), beside.rollout(0, Metrics()):
        calls.append("generate")
    assert calls == [
        *("policy.offload", "device.empty_cache", "device.memory", "engine.wake_weights", "sync"),
        *("device.empty_cache", "engine.wake_kv_cache", "probe", "generate", "device.memory"),
        *("engine.sleep", "device.empty_cache", "device.memory", "policy.onload"),
    ]


@pytest.mark.parametrize("level", [1, 2])
def test_the_engine_sleeps_and_wakes_in_halves(level: int) -> None:
    """The calls to vLLM on a GPU, weights first. An engine that slept has no version, at either level."""
    calls: list[tuple[str, Any]] = []

    class Idle(list[Any]):
        def drain(self) -> None:
            calls.append(("drain", 0))

    engine = VllmEngine.__new__(VllmEngine)
    state = {
        "_can_sleep": True,
        "_sleep_level": level,
        "_asleep": set(),
        "_version": 3,
        "_broken": None,
        "_queue": Idle(),
    }
    engine.__dict__.update(state, _device=SimpleNamespace(is_cuda=True))
    engine._llm = SimpleNamespace(
        sleep=lambda level: calls.append(("sleep", level)), wake_up=lambda tags: calls.append(("wake", tags))
    )
    engine.sleep()
    engine.sleep()
    assert engine.version is None
    with pytest.raises(RuntimeError, match="the weights must be loaded in between"):
        engine.wake_kv_cache()
    engine.wake_weights()
    engine.wake_kv_cache()
    engine.wake_kv_cache()
    assert calls == [("drain", 0), ("sleep", level), ("wake", ["weights"]), ("wake", ["kv_cache"])]


def test_what_vllm_is_built_with_on_a_gpu() -> None:
    rollout = RolloutConfig(quantization="fp8_per_block", free_cache_engine=True, gpu_memory_utilization=0.4)
    context: dict[str, Any] = {"max_model_len": 64, "rollout_tp": 4, "executor": None, "transfer": "transfer"}
    context["on_cuda"] = True
    built = vllm_arguments(rollout, VllmOptions(), **context)
    plain = vllm_arguments(RolloutConfig(), VllmOptions(), **context)
    assert built["quantization"] == "fp8_per_block" and plain["quantization"] is None
    assert built["enable_sleep_mode"] and built["gpu_memory_utilization"] == 0.4
    assert (built["distributed_executor_backend"], built["tensor_parallel_size"]) == ("external_launcher", 4)
    assert built["load_format"] == "dummy" and built["weight_transfer_config"] == "transfer"


def test_which_model_runner_vllm_is_told_to_use() -> None:
    """0.26 rounds bfloat16 logits after dividing them by a temperature."""
    warm = RolloutConfig(temperature=0.7)
    assert runner_environment(warm, "bfloat16", "0.26.0") == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    for rollout, dtype, version in (
        (RolloutConfig(), "bfloat16", "0.26.0"),
        (warm, "float32", "0.26.0"),
        (warm, "bfloat16", "0.32.0"),
    ):
        assert runner_environment(rollout, dtype, version) == {}
    hopper, blackwell = (runner_environment(warm, "bfloat16", "0.26.0", capability) for capability in ((9, 0), (10, 0)))
    assert hopper == {
        "VLLM_USE_DEEP_GEMM_E8M0": "0",
        **blackwell,
    }  # Blackwell's kernels need scales that are powers of two


def test_on_cpu_every_prompt_is_computed_in_one_step() -> None:
    rollout = RolloutConfig(max_num_batched_tokens=256)
    context: dict[str, Any] = {"rollout_tp": 1, "on_cuda": False, "executor": None, "transfer": None}
    for length, step in ((100, 256), (1024, 1024)):
        built = vllm_arguments(rollout, VllmOptions(), max_model_len=length, **context)
        assert (built["enable_chunked_prefill"], built["max_num_batched_tokens"]) == (False, step)
