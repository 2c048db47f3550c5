"""What the ranks of the LoRA tests run. A layout is (world, tp, pp, ep, sequence parallelism)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests import tiny
from tests.models.gradients import named_gradients
from tests.models.policy_ranks import check_counts, loss, share, stream

Layout = tuple[int, int, int, int, bool]
LAYOUTS: dict[str, Layout] = {
    "1": (1, 1, 1, 1, False),
    "TP2": (2, 2, 1, 1, False),
    "TP2+SP": (2, 2, 1, 1, True),
    "PP2": (2, 1, 2, 1, False),
    "DP2": (2, 1, 1, 1, False),
    "EP2": (2, 1, 1, 2, False),
    "TP4+SP": (4, 4, 1, 1, True),
    "TP2xPP2+SP": (4, 2, 2, 1, True),
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
Tensors = dict[str, torch.Tensor]


def world(layout: Layout) -> tuple[Any, Any]:
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.mesh import build_mesh

    device = Device("cpu")
    return device, build_mesh(device, tp=layout[1], pp=layout[2], ep=layout[3], rollout_tp=1)


def build(
    folder: Path, layout: Layout, device: Any, mesh: Any, lora: Any, dtype: str = "float32", **megatron: Any
) -> Any:
    from grpo_megatron.config import ActorConfig
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy

    _, tp, pp, ep, sp = layout
    megatron |= {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "sequence_parallel": sp}
    megatron["expert_model_parallel_size"] = ep
    optim = {"lr": 1e-3, "clip_grad": 0.5, "eps": 1e-4}
    values = {"megatron": megatron, "optim": optim, "lora": lora, "logprob_chunk_size": 7}
    config = ActorConfig.model_validate(values)
    policy = Policy.load(folder, dtype, read_architecture(folder), config, mesh, device)
    policy.set_optimizer(config.optim, 1)
    check_counts(policy)
    return policy


def whole(policy: Any, local: Tensors) -> Tensors:
    """Canonical factors from every rank's, of this pipeline stage's or all. Collective. Replicas must be equal."""
    import torch.distributed as dist

    from grpo_megatron.models.lora.table import lora_rows

    mesh = policy.mesh
    gathered: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(gathered, (mesh.tp_rank, local))
    out: Tensors = {}
    for name, row in lora_rows(policy.arch, policy.actor.lora).items():
        shards: dict[int, torch.Tensor] = {}
        for tp_rank, held in gathered:
            if name in held:
                place = tp_rank if row.split_dim is not None else 0  # a whole factor is the same on all ranks
                assert torch.equal(shards.setdefault(place, held[name]), held[name]), f"{name} differs between replicas"
        out.update(zip(row.hf, row.merge([shards[t] for t in sorted(shards)], policy.arch), strict=True))
    return out


def factors(policy: Any) -> Tensors:
    from grpo_megatron.models.weights.stream import global_parameters

    parameters = global_parameters(policy.ddp)
    return whole(policy, {name: parameters[name].detach().clone() for name in policy.lora.rows})


def set_factors(policy: Any, values: Tensors) -> None:
    from grpo_megatron.models.weights.stream import global_parameters

    parameters = global_parameters(policy.ddp)
    with torch.no_grad():
        for name, row in policy.lora.rows.items():
            parameters[name].copy_(row.shard(values.__getitem__, policy.arch, policy.mesh.tp_rank, policy.mesh.tp))
    policy.optimizer.reload_model_params()


def passes(
    folders: dict[str, Path], layout: Layout, pairs: Any, values: dict[str, Tensors], cases: list[tuple[str, Any, Any]]
) -> list[dict[str, Any]]:
    """For each (family, lora, override): what the model computes, first with initial factors, then with `values`."""
    device, mesh = world(layout)
    rows = share(len(pairs), mesh.dp_rank, mesh.dp)
    micros = [[i] for i in range(len(rows))]
    batch = tiny.make_batch(pairs, [micros], rows)
    results = []
    for family, lora, override in cases:
        settings = {"override_transformer_config": override, "use_distributed_optimizer": False}
        policy = build(folders[family], layout, device, mesh, lora, **settings)
        one = tiny.make_batch(pairs, [[[0, 1], [2], [], [3, 4, 5]]])
        result: dict[str, Any] = {
            "initial": factors(policy),
            "served at first": stream(policy),
            "first": policy.logprobs(one),
        }
        set_factors(policy, values[family])
        with policy.lora.reading({}):
            result |= {"base": policy.logprobs(one), "served base": stream(policy)}
        result |= {"logprobs": policy.logprobs(one), "served": stream(policy)}
        policy.forward_backward(batch, micros, loss)
        result["gradients"] = whole(policy, named_gradients(policy))
        result["trained"] = {name for name, p in policy.ddp.named_parameters() if p.requires_grad}
        result["buffers"] = sum(buffer.grad_data.numel() for buffer in policy.ddp.buffers)
        result["norm"] = policy.update(batch, loss)[1]["actor/grad_norm"]
        results.append(result)
    return results


def chain(
    folder: Path, layout: Layout, pairs: Any, lora: Any, out: Path, done: int | None, count: int
) -> dict[str, Any]:
    """`count` updates, each saved as `out`/number; after the checkpoint of `done` updates, if any, which is saved again.

    `done` None: nothing is loaded or saved.
    """
    from grpo_megatron.models.weights.sharded_state import load_sharded, save_sharded

    device, mesh = world(layout)
    policy = build(folder, layout, device, mesh, lora)
    result: dict[str, Any] = {"initial": factors(policy), "updates": []}
    if done:
        load_sharded(policy, out / f"{done}" / "state", same_world=False)
        save_sharded(policy, out / f"{done} again" / "state")
    rows = share(len(pairs), mesh.dp_rank, mesh.dp)
    batch = tiny.make_batch(pairs, [[[i] for i in range(len(rows))]], rows)
    for number in range(count):
        _, metrics = policy.update(batch, loss)
        result["updates"].append({"norm": metrics["actor/grad_norm"], "factors": factors(policy)})
        if done is not None:
            save_sharded(policy, out / f"{done + number + 1}" / "state")
    return result


def bfloat16(folder: Path, layout: Layout, lora: Any, out: Path) -> tuple[Tensors, dict[str, bool]]:
    """The served weights of adapters from `lora.path`; for each adapted weight, whether the module multiplies by them.

    The adapters are exported to `out`.
    """
    from grpo_megatron.models.lora.peft_folder import save_peft
    from grpo_megatron.models.weights.hf_folder import Serving
    from grpo_megatron.models.weights.stream import global_parameters, served

    device, mesh = world(layout)
    policy = build(folder, layout, device, mesh, lora, dtype="bfloat16")
    stored, now = policy.lora.stored(lora["path"], policy.arch, mesh), policy.lora.copies()  # as a reference reads them
    assert all(torch.equal(a, b) for name, pair in now.items() for a, b in zip(pair, stored[name], strict=True))
    save_peft(policy, folder, folder, out, Serving(end_token_ids=[2]))
    parameters, seen = global_parameters(policy.ddp), {}
    for name, module in policy.lora.modules.items():
        used: list[torch.Tensor] = []
        base = type(module).__mro__[2]
        with mock.patch.object(base, "forward", lambda own, x, used=used: (used.append(own.weight), (x, None))[1]):
            module(torch.zeros(1))
        seen[name] = torch.equal(used[0], served(parameters[name])) and not torch.equal(used[0], module.weight)
    return stream(policy), seen
