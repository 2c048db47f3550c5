"""What the ranks run that have a policy and an engine: cycles of update and sync, and the memory of each phase."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from tests import vision
from tests.colocated import colocate
from tests.gpu.building import (
    KIND,
    MIB,
    ON_CPU,
    TRAINED_TOWER,
    batch_with_images,
    build_policy,
    build_rollout,
    free_mib,
    likelihood,
    mesh_of,
    runner_name,
    sequences,
    total_mib,
    whole_batch,
)

SEQUENCE = 1024


def _gap(policy: Any, engine: Any, version: int) -> torch.Tensor:
    """|policy - engine| of the log-probability of every token that the engine samples."""
    from grpo_megatron.rollout.engine import Request, sample_seed

    prompts = [p for p, _ in sequences(16, 16)]
    length = 32 if ON_CPU else 256
    requests = [Request(tuple(p), sample_seed(0, version, str(i), 0), max_tokens=length) for i, p in enumerate(prompts)]
    drawn = engine.generate(requests, version)
    scored = policy.logprobs(whole_batch([(p, c.response_ids) for p, c in zip(prompts, drawn, strict=True)]))
    parts = [(scored[i, : len(c.logprobs)] - torch.tensor(c.logprobs)).abs() for i, c in enumerate(drawn)]
    return torch.cat(parts)


def _powers_of_two(engine: Any) -> float:
    """The share of powers of two among the scales of the engine's FP8 blocks; 1 without any."""

    def scales(model: torch.nn.Module) -> list[torch.Tensor]:
        found = [getattr(module, "weight_scale_inv", None) for module in model.modules()]
        return [scale.float().flatten() for scale in found if scale is not None and scale.is_floating_point()]

    (parts,) = engine._llm.apply_model(scales)
    return float((torch.frexp(torch.cat(parts)).mantissa == 0.5).float().mean()) if parts else 1.0


def routes(folder: Path, tp: int) -> dict[str, Any]:
    """Three rollouts with routes, of which all but the first rank of a replica have none."""
    from grpo_megatron.config import RolloutConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.weights.stream import engine_tensors
    from grpo_megatron.parallel.mesh import build_mesh
    from grpo_megatron.rollout.build import build_engine
    from tests.rollout.test_second_runner import LIMITS, rollouts

    device = Device(KIND)  # type: ignore[arg-type]
    mesh = build_mesh(device, tp=1, pp=1, rollout_tp=tp)
    rollout = RolloutConfig(tensor_model_parallel_size=tp, gpu_memory_utilization=0.2, max_num_seqs=8)
    tensors = engine_tensors(read_architecture(folder), tp, reads_shards=True)
    engine = build_engine(rollout, folder, mesh, device, **LIMITS, dtype="bfloat16", tensors=tensors)
    return rollouts(engine, folder, device.torch_device)


def blocks(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The bytes and scales of Transformer Engine's blocks of 128 x 128, and of vLLM's, of the same weight."""
    tex: Any = importlib.import_module("transformer_engine_torch")
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = (0.02 * torch.randn(shape, device=KIND)).bfloat16()
    kinds: dict[str, Any] = {"rowwise": True, "columnwise": False, "force_pow_2_scales": False, "block_scaling_dim": 2}
    trained = Float8BlockQuantizer(tex.DType.kFloat8E4M3, amax_epsilon=0.0, **kinds)(weight)
    served, scales = per_block_cast_to_fp8(weight)
    rows, columns = scales.shape
    found = {"trained": trained._rowwise_data, "trained scales": trained._rowwise_scale_inv[:rows, :columns]}
    found |= {"served": served.view(torch.uint8), "served scales": scales}
    return {name: tensor.cpu() for name, tensor in found.items()}


def cycles(
    folder: Path, count: int, tolerance: float | None, megatron: dict[str, Any] | None = None, **rollout: Any
) -> dict[str, Any]:
    """`count` times: sync, probe, generate, compare, sleep, update. Then the same comparison with stale weights.

    `tolerance` None: the bounds of a run, for a quantised engine those of FP8.
    """
    from grpo_megatron.report.metrics import Metrics

    rollout_tp = rollout.get("tensor_model_parallel_size", 1)
    policy = build_policy(folder, {"offload_optimizer": True, **(megatron or {})}, lr=3e-4, rollout_tp=rollout_tp)
    batch = whole_batch(sequences(8, 200))
    engine = build_rollout(folder, policy.mesh, policy.device, max_model_len=SEQUENCE, **rollout)
    colocation = colocate(
        policy, engine, dtype="bfloat16", max_length=SEQUENCE, tolerance=tolerance, bucket_megabytes=64
    )
    colocation.probe.dtype = "fp8" if "quantization" in rollout else "bfloat16"
    out: dict[str, Any] = {"runner": runner_name(engine), "gaps": [], "asleep": [], "awake": []}
    deep_gemm: Any = importlib.import_module("vllm.utils.deep_gemm")
    out |= {"sync_s": [], "attest_s": [], "kept": [], "DeepGEMM": deep_gemm.is_deep_gemm_supported()}
    for version in range(count):
        metrics = Metrics(policy.device.synchronize)
        with colocation.rollout(version, metrics):
            out["awake"].append(free_mib())
            differences = _gap(policy, engine, version)
            out["powers of two"] = _powers_of_two(engine)
            out["gaps"].append((differences.mean().item(), differences.max().item()))
        out["asleep"].append(free_mib())
        times = metrics.reduce(policy.mesh.all_gather)
        out["sync_s"].append(times["timing_s/update_weights"])
        out["attest_s"].append(times["timing_s/attest"])
        out["kept"].append(times.get("perf/device_memory_asleep_gb", 0.0))
        out["probes"] = [mean for means in colocation.probe._healthy.values() for mean in means]
        policy.update(batch, likelihood)
    with colocation.rollout(count, Metrics()):
        policy.onload()  # the policy goes on learning, and the engine keeps the old weights
        for _ in range(5):
            policy.update(batch, likelihood)
        out["stale"] = _gap(policy, engine, count).mean().item()
    return out


def images(folder: Path, count: int) -> dict[str, Any]:
    """`count` times: sync, probe, sample from prompts with 0 to 2 images, compare, update with a trained tower.

    `others`: the last comparison, with other pixels in the policy's images.
    """
    from dataclasses import replace

    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.rollout.engine import Request

    policy = build_policy(folder, {"offload_optimizer": True}, lr=3e-4, **TRAINED_TOWER)
    engine = build_rollout(folder, policy.mesh, policy.device, eos_token_ids=(vision.EOS,), max_model_len=512)
    colocation = colocate(policy, engine, dtype="bfloat16", max_length=512, tolerance=0.1)
    prompts = vision.make_prompts()
    out: dict[str, Any] = {"runner": runner_name(engine), "gaps": []}
    for version in range(count):
        with colocation.rollout(version, Metrics()):
            requests = [Request(tuple(ids), seed, 64, images=own) for seed, (ids, own, _) in enumerate(prompts)]
            drawn = engine.generate(requests, version)
            rows = [(ids, own, done.response_ids) for (ids, own, _), done in zip(prompts, drawn, strict=True)]
            served = torch.cat([torch.tensor(done.logprobs) for done in drawn])

            def gap(rows: Any, served: torch.Tensor = served) -> float:
                batch = batch_with_images(rows)
                return (policy.logprobs(batch)[batch.response_mask] - served).abs().mean().item()

            out["gaps"].append(gap(rows))
            out["others"] = gap(
                [
                    (ids, tuple(replace(one, digest=f"not {one.digest}", pixels=one.pixels[::-1]) for one in own), done)
                    for ids, own, done in rows
                ]
            )
        policy.update(batch_with_images(prompts), likelihood)
    return out


# -- memory ------------------------------------------------------------------------------------------------------------


HELD = ("weights", "gradients", "optimizer")  # what stays between the passes


def planned_mib(folder: Path, utilization: float) -> dict[str, float]:
    """The plan's phases for one rank: what the policy holds in them, and what the engine may take."""
    from grpo_megatron.config import Config
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.planning.parameters import parameters_from_table
    from grpo_megatron.planning.phases import memory_phases

    raw: dict[str, Any] = {"model": {"path": str(folder)}, "rollout": {"gpu_memory_utilization": utilization}}
    raw["actor"] = {"use_kl_loss": False, "megatron": {"offload_optimizer": True}}
    config, arch = Config.model_validate(raw), read_architecture(folder)
    stages = parameters_from_table(arch, config.actor.megatron)
    phases = {phase.name: phase for phase in memory_phases(config, arch, 1, stages, [])}
    planned = {name: sum(phase.parts.get(part, 0.0) for part in HELD) / MIB for name, phase in phases.items()}
    planned["peak of load"] = planned["load"] + phases["load"].parts["copy of weights"] / MIB
    return {**planned, "engine": phases["rollout"].utilization * total_mib()}


def _allocated_mib() -> float:
    """What torch's tensors hold, without the workspace of cuBLAS, which torch keeps between calls."""
    if ON_CPU:
        return 0.0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated() / MIB


def phases(folder: Path, utilization: float, **rollout: Any) -> dict[str, Any]:
    """MiB in each phase of a step, of torch's tensors (`tensors`) and free on the whole device (`free`)."""
    from grpo_megatron.device import Device
    from grpo_megatron.report.metrics import Metrics

    planned = planned_mib(folder, utilization)  # before the world exists: counting makes a fake one
    device = Device(KIND)  # type: ignore[arg-type]
    mesh_of(device)
    free, tensors = {"empty": free_mib()}, {"empty": _allocated_mib()}

    def note(phase: str) -> None:
        free[phase], tensors[phase] = free_mib(), _allocated_mib() - tensors["empty"]

    megatron = {"offload_optimizer": True, "transformer_impl": "local"}
    policy = build_policy(folder, megatron, chunk=512, has_optimizer=False)
    peak = 0.0 if ON_CPU else torch.cuda.max_memory_allocated() / MIB
    batch = whole_batch(sequences(4, 100))
    note("load")
    policy.set_optimizer(policy.actor.optim, 10)
    policy.update(batch, likelihood)  # the first step makes the optimizer's states
    note("update")
    policy.offload()
    note("rollout")
    engine = build_rollout(
        folder, policy.mesh, device, max_model_len=SEQUENCE, gpu_memory_utilization=utilization, **rollout
    )
    free["engine built"] = free_mib()
    colocation = colocate(policy, engine, dtype="bfloat16", max_length=SEQUENCE, bucket_megabytes=256)
    free["asleep"] = free_mib()
    for version in range(3):
        with colocation.rollout(version, Metrics()):
            free[f"awake {version}"] = free_mib()
        policy.update(batch, likelihood)
        note(f"asleep {version}")
    cache = engine._llm.llm_engine.vllm_config.cache_config
    return {
        "runner": runner_name(engine),
        "planned": planned,
        "free": free,
        "tensors": {**tensors, "peak of load": peak},
        "cache_tokens": cache.num_gpu_blocks * cache.block_size,
        "total": total_mib(),
    }
