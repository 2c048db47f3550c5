"""What the ranks of the GPU checks run. (Functions of a module: a spawned process can import them.) Not run on a GPU yet."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from tests.models.gradients import named_gradients
from tests.tiny import make_batch, make_sequences

VOCABULARY = 32000
_meshes: list[Any] = []


def build(
    folder: Path, megatron: dict[str, Any], *, dtype: str = "bfloat16", lr: float = 1e-3, chunk: int = 2048
) -> Any:
    """A policy on this rank's GPU. Several policies in one process share the mesh."""
    from grpo_megatron.config import ActorConfig, ModelConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy
    from grpo_megatron.parallel.mesh import build_mesh

    device = Device("cuda")
    if not _meshes:
        cp = megatron.get("context_parallel_size", 1)
        _meshes.append(build_mesh(device, tp=1, pp=1, cp=cp, rollout_tp=1))
    actor = ActorConfig.model_validate({"megatron": megatron, "logprob_chunk_size": chunk, "optim": {"lr": lr}})
    model = ModelConfig(path=folder, dtype=dtype)
    policy = Policy(model, actor, read_architecture(folder), _meshes[0], device)
    policy.set_optimizer(actor.optim, 1)
    return policy


def sequences(count: int, longest: int) -> Any:
    return make_sequences(count, vocab=VOCABULARY, longest=longest)


def whole_batch(pairs: Any, per_micro: int = 4) -> Any:
    rows = list(range(len(pairs)))
    return make_batch(pairs, [[rows[i : i + per_micro] for i in range(0, len(rows), per_micro)]])


def likelihood(inputs: Any) -> Any:
    """Mean negative log-likelihood of the batch's tokens: weights are 1 / tokens of the whole batch."""
    from grpo_megatron.algo.losses import MetricSum

    value = -(inputs.logprobs * inputs.token_weights * inputs.mask).sum()
    return value, {"loss": MetricSum(value.detach(), None)}


def layer_class(policy: Any) -> str:
    """The class of the linear layers that were built."""
    from grpo_megatron.models.weights import unwrapped

    inner: Any = unwrapped(policy.ddp)
    return type(inner.decoder.layers[0].self_attention.linear_qkv).__name__


def free_gib() -> float:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 2**30


# -- layers ------------------------------------------------------------------------------------------------------------


def logprobs_and_gradients(folder: Path, megatron: dict[str, Any], dtype: str) -> dict[str, Any]:
    policy = build(folder, {"use_distributed_optimizer": False, **megatron}, dtype=dtype)
    batch = whole_batch(sequences(8, 400))
    logprobs = policy.logprobs(batch)
    policy.backward(batch, batch.mini_batches[0], likelihood, [])
    gradients = {name: g.float().cpu() for name, g in named_gradients(policy).items()}
    return {"layers": layer_class(policy), "logprobs": logprobs, "gradients": gradients, "mask": batch.response_mask}


def loss_curve(folder: Path, megatron: dict[str, Any], steps: int) -> dict[str, Any]:
    """The loss of each step of memorising 8 sequences of random tokens."""
    policy = build(folder, megatron, lr=3e-4)
    batch = whole_batch(sequences(8, 400))
    losses = []
    for _ in range(steps):
        sums, _ = policy.update(batch, likelihood)
        losses.append(float(sums[0]["loss"].total))
    streamed = {name: bool(t.isfinite().all()) for bucket in policy.hf_weights() for name, t in bucket}
    return {"losses": losses, "finite": all(streamed.values()), "names": len(streamed), "layers": layer_class(policy)}


def throughput(folder: Path, megatron: dict[str, Any], length: int, count: int, steps: int) -> dict[str, Any]:
    """Seconds per update of `count` sequences of `length`, 16k tokens per micro-batch, after two warmup updates."""
    policy = build(folder, {"transformer_impl": "auto", **megatron}, lr=1e-5)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (count, length), generator=generator).tolist()
    batch = whole_batch([(t[:256], t[256:]) for t in tokens], per_micro=16384 // length)
    seconds = []
    for _ in range(steps + 2):
        policy.device.synchronize()
        start = time.monotonic()
        policy.update(batch, likelihood)
        policy.device.synchronize()
        seconds.append(time.monotonic() - start)
    start = time.monotonic()
    policy.logprobs(batch)
    policy.device.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30
    seconds = sorted(seconds[2:])
    return {
        "seconds": seconds[len(seconds) // 2],
        "logprob_seconds": time.monotonic() - start,
        "peak_gib": peak,
        "layers": layer_class(policy),
    }


# -- optimizer ---------------------------------------------------------------------------------------------------------


def resumed(folder: Path, checkpoint: Path, megatron: dict[str, Any]) -> dict[str, Any]:
    """Two updates, save, two more updates; compared with a new policy that loads and makes the last two updates.

    Local layers are deterministic with attention as plain matrix products and torch's deterministic algorithms.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from grpo_megatron.models import state
    from grpo_megatron.models.optimizer import each_optimizer

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # saves time only
    batch = whole_batch(sequences(8, 200))

    def weights(policy: Any) -> dict[str, torch.Tensor]:
        return {name: t.cpu() for bucket in policy.hf_weights() for name, t in bucket}

    def inner_state(policy: Any) -> list[torch.Tensor]:
        """Main parameters, moments and step counts, in the order of the parameter groups."""
        out = []
        for one in each_optimizer(policy.optimizer):
            for group in one.optimizer.param_groups:
                for parameter in group["params"]:
                    held = {"step": group.get("step", 0), **one.optimizer.state[parameter]}  # torch: one per parameter
                    out += [parameter.detach().cpu(), *(torch.as_tensor(held[name]).cpu() for name in sorted(held))]
        return out

    def two_updates(policy: Any) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            for _ in range(2):
                policy.update(batch, likelihood)

    first = build(folder, megatron)
    two_updates(first)
    checkpoint.mkdir()
    state.save_sharded(first, checkpoint)
    at_save = inner_state(first)
    kind = type(each_optimizer(first.optimizer)[0].optimizer).__module__
    second = build(folder, megatron)
    state.load_sharded(second, checkpoint, same_world=True)
    second.load_state(first.state())
    restored = inner_state(second)
    out = {
        "optimizer": kind,
        "state": len(at_save) == len(restored) and all(map(torch.equal, at_save, restored)),
        "saved_tensors": len(at_save),
    }
    for policy in (first, second):
        two_updates(policy)
    expected, resumed_weights = weights(first), weights(second)
    out["weights"] = all(torch.equal(expected[name], resumed_weights[name]) for name in expected)
    out["difference"] = max(float((expected[name] - resumed_weights[name]).abs().max()) for name in expected)
    return out


def offloaded(folder: Path) -> dict[str, float]:
    """GiB that offloading the optimizer frees, and the size of its states and gradient buffers."""
    policy = build(folder, {"offload_optimizer": True})
    batch = whole_batch(sequences(8, 200))
    policy.update(batch, likelihood)
    gradients = sum(buffer.grad_data.nbytes for buffer in policy.ddp.buffers) / 2**30
    before = free_gib()
    start = time.monotonic()
    policy.offload()
    offload_s = time.monotonic() - start
    freed, states = free_gib() - before, policy._offloaded.num_bytes / 2**30
    policy.logprobs(batch)  # needs neither optimizer states nor gradients
    start = time.monotonic()
    policy.onload()
    onload_s = time.monotonic() - start
    _, metrics = policy.update(batch, likelihood)
    finite = float(metrics["actor/skipped_updates"] == 0)
    return {"freed": freed, "held": states + gradients, "offload_s": offload_s, "onload_s": onload_s, "finite": finite}


# -- the engine --------------------------------------------------------------------------------------------------------


def engine_of(folder: Path, policy: Any, **rollout: Any) -> Any:
    from grpo_megatron.config import RolloutConfig
    from grpo_megatron.models.sync_parameters import engine_tensors
    from grpo_megatron.rollout.build import build_engine

    settings = {"gpu_memory_utilization": 0.3, "max_num_seqs": 64, **rollout}
    return build_engine(
        RolloutConfig.model_validate(settings),
        folder,
        policy.mesh,
        policy.device,
        dtype="bfloat16",
        max_model_len=1024,
        eos_token_ids=[2],
        tensors=engine_tensors(policy.arch, policy.mesh.rollout_tp, reads_shards=True),
    )


def gap(policy: Any, engine: Any, version: int) -> torch.Tensor:
    """|policy - engine| of the log-probability of every token that the engine draws."""
    from grpo_megatron.rollout.engine import Request, sample_seed

    prompts = [p for p, _ in sequences(16, 16)]
    requests = [Request(tuple(p), sample_seed(0, version, str(i), 0), max_tokens=256) for i, p in enumerate(prompts)]
    drawn = engine.generate(requests, version)
    scored = policy.logprobs(whole_batch([(p, c.response_ids) for p, c in zip(prompts, drawn, strict=True)]))
    parts = [(scored[i, : len(c.logprobs)] - torch.tensor(c.logprobs)).abs() for i, c in enumerate(drawn)]
    return torch.cat(parts)


def cycles(folder: Path, count: int, tolerance: float, **rollout: Any) -> dict[str, Any]:
    """`count` times: sync, probe, generate, compare, sleep, update with a learning rate that changes every weight."""
    from grpo_megatron.models.sync_parameters import engine_tensors
    from grpo_megatron.observability.metrics import Metrics
    from grpo_megatron.training.colocation import Colocation
    from grpo_megatron.training.probe import Probe
    from grpo_megatron.training.provenance import Provenance

    policy = build(folder, {"offload_optimizer": True}, lr=1e-3)
    batch = whole_batch(sequences(8, 200))
    engine = engine_of(folder, policy, **rollout)
    awake = free_gib()
    colocation = Colocation(
        policy,
        engine,
        policy.mesh,
        tensors=engine_tensors(policy.arch, policy.mesh.rollout_tp, reads_shards=True),
        probe=Probe(policy.arch.vocab_size, 1024, dtype="bfloat16", tolerance=tolerance),
        provenance=Provenance(policy.mesh, max_staleness=0, is_drawn=True),
        bucket_megabytes=64,
    )
    out: dict[str, Any] = {"gaps": [], "asleep_gib": [free_gib()], "awake_gib": [awake], "sync_s": []}
    for version in range(count):
        metrics = Metrics(policy.device.synchronize)
        with colocation.rollout(version, metrics):
            out["awake_gib"].append(free_gib())
            differences = gap(policy, engine, version)
            out["gaps"].append((differences.mean().item(), differences.max().item()))
        out["asleep_gib"].append(free_gib())
        out["sync_s"].append(metrics.reduce(policy.mesh.all_gather)["timing_s/update_weights"])
        policy.update(batch, likelihood)
    with colocation.rollout(count, Metrics()):
        policy.onload()  # the policy is updated, and the engine keeps the old weights
        policy.update(batch, likelihood)
        out["stale"] = gap(policy, engine, count).mean().item()
    out["total_gib"] = torch.cuda.mem_get_info()[1] / 2**30
    return out
