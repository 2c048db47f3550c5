"""What the ranks of the mixture-of-experts tests run. A layout is (world, tp, pp, ep); sequence parallelism follows tp."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tests import tiny
from tests.models.gradients import named_gradients
from tests.models.grouped import grouped_experts
from tests.models.policy_ranks import check_counts, loss, share, stream, whole

Layout = tuple[int, int, int, int]


def world(layout: Layout, rollout_tp: int = 1) -> tuple[Any, Any]:
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.mesh import build_mesh

    device = Device("cpu")
    _, tp, pp, ep = layout
    return device, build_mesh(device, tp=tp, pp=pp, ep=ep, rollout_tp=rollout_tp)


def build(
    folder: Path,
    device: Any,
    mesh: Any,
    *,
    dtype: str = "float32",
    family: str | None = None,
    replay: str = "none",
    **megatron: Any,
) -> Any:
    from grpo_megatron.config import ActorConfig
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy

    megatron |= {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "expert_model_parallel_size": mesh.ep,
    }
    optim = {"lr": 1e-3, "clip_grad": 0.5, "eps": 1e-4}
    moe = {"route_replay": replay}
    config = ActorConfig.model_validate({"megatron": megatron, "optim": optim, "moe": moe, "logprob_chunk_size": 7})
    policy = Policy.load(folder, dtype, read_architecture(folder, family), config, mesh, device)
    policy.set_optimizer(config.optim, 1)
    check_counts(policy)
    return policy


def grouped(folders: list[Path], pairs: Any, layout: Layout) -> list[dict[str, Any]]:
    """`everything`, with grouped experts."""
    from grpo_megatron.models.weights.stream import global_parameters

    with grouped_experts():
        device, mesh = world(layout)
        model = build(folders[0], device, mesh).model
        names = {name for name, _ in model.named_parameters() if ".experts." in name}
        assert names and all(re.search(r"experts\.linear_fc[12]\.weight\d+$", name) for name in names), names
        shapes = {name: tuple(parameter.shape) for name, parameter in global_parameters(model).items()}
        return [{**result, "shapes": shapes} for result in everything(folders, pairs, (device, mesh))]


def everything(folders: list[Path], pairs: Any, layout: Any) -> list[dict[str, Any]]:
    """Per model: logprobs, the stream after loading, gradients of one backward pass, the stream after two updates."""
    device, mesh = world(layout) if len(layout) == 4 else layout
    rows = share(len(pairs), mesh.dp_rank, mesh.dp)
    micros = [[i] for i in range(len(rows))]
    batch = tiny.make_batch(pairs, [micros], rows)
    results = []
    for folder in folders:
        policy = build(folder, device, mesh)
        result: dict[str, Any] = {"loaded": stream(policy)}
        result["logprobs"] = policy.logprobs(tiny.make_batch(pairs, [[[0, 1], [2], [], [3, 4, 5]]]))
        result["norms"] = [policy.update(batch, loss)[1]["actor/grad_norm"] for _ in range(2)]
        result["updated"] = stream(policy)
        policy = build(folder, device, mesh, use_distributed_optimizer=False)  # leaves whole gradients on every rank
        policy.forward_backward(batch, micros, loss)
        result["gradients"] = whole(policy, named_gradients(policy))
        results.append(result)
    return results


def streamed(folder: Path, layout: Layout) -> dict[str, torch.Tensor]:
    """The stream after loading."""
    return stream(build(folder, *world(layout)))


def bfloat16(folder: Path, layout: Layout) -> tuple[dict[str, torch.Tensor], float]:
    policy = build(folder, *world(layout), dtype="bfloat16")
    pairs = tiny.make_sequences(6)
    rows = share(len(pairs), policy.mesh.dp_rank, policy.mesh.dp)
    batch = tiny.make_batch(pairs, [[[i] for i in range(len(rows))]], rows)
    loaded = stream(policy)
    return loaded, policy.update(batch, loss)[1]["actor/grad_norm"]


def engine_cycles(folder: Path, layout: Layout, rollout_tp: int, rollout_ep: int) -> list[float]:
    """Twice: sync, generate, compute the policy's logprobs of the same tokens, update. The largest difference per cycle."""
    from grpo_megatron.config import RolloutConfig
    from grpo_megatron.models.weights.stream import engine_tensors
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.rollout.build import build_engine
    from tests.colocated import colocate
    from tests.distributed.sync_ranks import requests

    device, mesh = world(layout, rollout_tp)
    policy = build(folder, device, mesh)
    sizes = {"tensor_model_parallel_size": rollout_tp, "expert_parallel_size": rollout_ep}
    rollout = RolloutConfig(**sizes, engine_options={"kv_cache_gib": 0.03})
    limits: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "eos_token_ids": [2]}
    tensors = engine_tensors(policy.arch, rollout_tp, reads_shards=True, rollout_ep=rollout_ep)
    engine = build_engine(rollout, folder, mesh, device, **limits, tensors=tensors)
    colocation = colocate(policy, engine, tensors)
    pairs = tiny.make_sequences(6)
    rows = share(len(pairs), mesh.dp_rank, mesh.dp)
    batch = tiny.make_batch(pairs, [[list(range(len(rows)))]], rows)
    worst = []
    for cycle in range(2):
        with colocation.rollout(cycle, Metrics()):
            completions = engine.generate(requests(0, 1.0), cycle)
        prompts = [list(r.prompt_ids) for r in requests(0, 1.0)]
        drawn = [(p, c.response_ids) for p, c in zip(prompts, completions, strict=True)]
        expected = policy.logprobs(tiny.make_batch(drawn, [[list(range(len(drawn)))]]))
        differences = [
            (expected[i, : len(c.logprobs)] - torch.tensor(c.logprobs)).abs() for i, c in enumerate(completions)
        ]
        worst.append(torch.cat(differences).max().item())
        policy.update(batch, loss)
    return worst


def logprobs(folders: list[Path], pairs: Any, families: list[str | None] | None = None) -> list[torch.Tensor]:
    """Log-probabilities of the pairs under each model, on one rank. `families`: `model.family` for each."""
    device, mesh = world((1, 1, 1, 1))
    batch = tiny.make_batch(pairs, [[list(range(len(pairs)))]])
    named = zip(folders, families or [None] * len(folders), strict=True)
    return [build(folder, device, mesh, family=family).logprobs(batch) for folder, family in named]


def checkpointed(
    folder: Path, pairs: Any, layout: Layout, save_to: Path | None, load_from: Path | None, is_grouped: bool = False
) -> dict[str, Any]:
    """Update once, or load a checkpoint of any layout; save; update once more. The streams before and after the last update."""
    from grpo_megatron.models.weights import sharded_state

    device, mesh = world(layout)
    rows = share(len(pairs), mesh.dp_rank, mesh.dp)
    batch = tiny.make_batch(pairs, [[[i] for i in range(len(rows))]], rows)
    with grouped_experts(is_grouped):
        policy = build(folder, device, mesh)
    if load_from is not None:
        sharded_state.load_sharded(policy, load_from, same_world=False)
    else:
        policy.update(batch, loss)
    before = stream(policy)
    if save_to is not None:
        sharded_state.save_sharded(policy, save_to)
    policy.update(batch, loss)
    return {"before": before, "after": stream(policy)}
