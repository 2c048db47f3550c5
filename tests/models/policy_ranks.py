"""What the ranks of the model tests run. (Functions of a module, so that the fork server can find them.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.models.gradients import named_gradients
from tests.tiny import make_batch

# name -> (world, tp, pp, sequence parallel)
LAYOUTS: dict[str, tuple[int, int, int, bool]] = {
    "1": (1, 1, 1, False),
    "DP2": (2, 1, 1, False),
    "TP2": (2, 2, 1, False),
    "TP2+SP": (2, 2, 1, True),
    "PP2": (2, 1, 2, False),
    "TP2xPP2+SP": (4, 2, 2, True),
    "DP2xTP2": (4, 2, 1, False),
    "TP4": (4, 4, 1, True),
    "PP4": (4, 1, 4, False),
}


Layout = tuple[int, int, int, bool]
_meshes: dict[tuple[int, int], Any] = {}  # of this rank: a process has one layout for its whole life


def world(layout: Layout) -> tuple[Any, Any]:
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.mesh import build_mesh

    _, tp, pp, _ = layout
    device = Device("cpu")
    mesh = _meshes.get((tp, pp)) or _meshes.setdefault((tp, pp), build_mesh(device, tp=tp, pp=pp, rollout_tp=1))
    return device, mesh


def actor(layout: Layout, *, megatron: Any = None, **values: Any) -> Any:
    from grpo_megatron.config import ActorConfig

    _, tp, pp, sp = layout
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "sequence_parallel": sp}
    return ActorConfig.model_validate({"megatron": {**sizes, **(megatron or {})}, **values})


def build(
    folder: Path, tp: int, pp: int, sp: bool, *, dtype: str = "float32", temperature: float = 1.0, **values: Any
) -> Any:
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy

    layout = (0, tp, pp, sp)
    device, mesh = world(layout)
    config = actor(layout, **{"logprob_chunk_size": 7, **values})
    policy = Policy.load(folder, dtype, read_architecture(folder), config, mesh, device, temperature=temperature)
    policy.set_optimizer(config.optim, 1)
    check_counts(policy)
    return policy


def check_counts(policy: Any, has_output_head: bool = True) -> None:
    """Megatron-Core's modules have as many parameters as the plan of the run counts in the weight table."""
    from grpo_megatron.planning.parameters import parameters_from_table

    parts = policy.arch, policy.actor.megatron
    chosen = {"lora": policy.actor.lora, "vision": policy.actor.vision}
    stages = parameters_from_table(*parts, has_output_head=has_output_head, **chosen)
    stage = stages[policy.mesh.pp_rank]
    held = [parameter for name, parameter in policy.ddp.named_parameters() if "score." not in name]
    assert sum(parameter.numel() for parameter in held) == stage.held
    assert sum(parameter.numel() for parameter in held if parameter.requires_grad) == stage.trained.total
    if policy.lora is not None:
        of_layer: dict[str, list[int]] = {}
        for name, module in policy.lora.modules.items():
            of_layer.setdefault(name.split(".")[2], []).append(module.weight.numel())
        assert stage.merged_layer == max(map(sum, of_layer.values()))
        assert stage.merged_weight == max(map(max, of_layer.values()))


def share(count: int, dp_rank: int, dp: int) -> list[int]:
    return list(range(count))[dp_rank::dp]


KL_COEF, ENTROPY_COEF = 0.1, 0.05


def hand_built_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """Per token [N], from the formulas: clip 0.2, dual clip 3, k3."""
    ratio = (logprobs - old).exp()
    surrogate = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    surrogate = torch.where(advantages < 0, surrogate.minimum(-3 * advantages), surrogate)
    k3 = (ref - logprobs).exp() - 1 - (ref - logprobs)
    return surrogate + KL_COEF * k3 - ENTROPY_COEF * entropy


def loss(inputs: Any) -> Any:
    """Clipped surrogate + KL + entropy, composed by the real code. `hand_built_loss` computes the same by hand."""
    from grpo_megatron.algo.kl import kl_penalties
    from grpo_megatron.algo.losses import policy_losses, total_loss
    from grpo_megatron.config import ActorConfig

    config = ActorConfig(kl_loss_coef=KL_COEF, entropy_coeff=ENTROPY_COEF)
    return total_loss(inputs, config, policy_losses.get("vanilla"), kl_penalties.get("low_var_kl"))


def logprobs(folders: dict[str, Path], pairs: Any, layout: tuple[int, int, int, bool]) -> dict[str, torch.Tensor]:
    """Family -> log-probabilities, in micro-batches of different sizes, one of them empty."""
    _, tp, pp, sp = layout
    batch = make_batch(pairs, [[[0, 1], [2], [], [3, 4, 5]]])
    return {family: build(folder, tp, pp, sp).logprobs(batch) for family, folder in folders.items()}


def updates(
    folders: dict[str, Path], pairs: Any, layout: tuple[int, int, int, bool], micro: int
) -> dict[tuple[str, bool], dict[str, Any]]:
    """(family, distributed optimizer?) -> what `update` gives. The passes themselves are checked in one family."""
    first = next(iter(folders))
    return {
        (family, distributed): update(folder, pairs, layout, micro, distributed, distributed and family == first)
        for family, folder in folders.items()
        for distributed in (False, True)
    }


def update(
    folder: Path,
    pairs: Any,
    layout: tuple[int, int, int, bool],
    micro: int,
    distributed: bool,
    checks_passes: bool = False,
) -> dict[str, Any]:
    """Gradients before an optimizer step and weights after it, as whole Hugging Face tensors; the gradient norm.

    The batch has tokens outside the loss, and a row without a loss token. With plain DDP every rank has the whole summed
    gradient; with the distributed optimizer only a part of it.
    """
    _, tp, pp, sp = layout
    # Adam's first step is lr * g / (|g| + eps): with a small eps, rounding picks the sign where g is almost zero.
    optim = {"lr": 1e-3, "clip_grad": 0.5, "eps": 1e-4}
    policy = build(folder, tp, pp, sp, optim=optim, megatron={"use_distributed_optimizer": distributed})
    rows = share(len(pairs), policy.mesh.dp_rank, policy.mesh.dp)
    local = list(range(len(rows)))
    micros = [local[i : i + micro] for i in range(0, len(local), micro)]
    packings = {} if distributed else both_packings(policy, pairs, micros, rows)
    gradients: dict[str, torch.Tensor] = {}
    step = policy._step

    def record_and_step(*arguments: Any) -> float:
        gradients.update(whole(policy, named_gradients(policy)))
        return step(*arguments)

    policy._step = record_and_step
    sums, metrics = policy.update(make_batch(pairs, [micros], rows, masked=True), loss)
    weights = stream(policy)
    policy._step = step
    found = {"gradients": gradients, "weights": weights, "norm": metrics["actor/grad_norm"], "sums": sums}
    found["packings"] = packings
    if checks_passes:
        found["folded"] = folded(policy, make_batch(pairs, [micros], rows, masked=True))
        found["without backward"] = without_backward(policy, make_batch(pairs, [[[], *micros]], rows, masked=True))
        found["shared prompts"] = shared_prompts(policy, pairs, micros, rows)
    return found


def folded(policy: Any, batch: Any) -> dict[str, bool]:
    """Old log-probabilities of a pass before the update, and of the update's own forward pass: are their bits the same?"""
    (micros,) = batch.mini_batches
    batch.old_logprobs = before = policy.logprobs(batch)
    separate = policy.forward_backward(batch, micros, loss)
    gradients = named_gradients(policy)
    batch.old_logprobs = None
    own = policy.forward_backward(batch, micros, loss)
    gradients_equal = all(torch.equal(g, gradients[name]) for name, g in named_gradients(policy).items())
    policy.optim_step()
    return {
        "step": not torch.equal(policy.logprobs(batch), before),
        "logprobs": torch.equal(policy.from_last_stage(own.host_logprobs()), before),
        "gradients": gradients_equal,
        "metrics": all(torch.equal(part.total, separate.sums[name].total) for name, part in own.sums.items()),
    }


def without_backward(policy: Any, batch: Any) -> dict[str, bool]:
    """The last micro-batch has no advantage, and no backward pass: do gradients, metrics, log-probabilities stay?"""
    (micros,) = batch.mini_batches
    batch.advantages[micros[-1]] = 0.0
    results = []
    for count in (0, 1):
        own = policy.forward_backward(batch, micros, policy_loss, count)
        results.append((named_gradients(policy), own.sums, policy.from_last_stage(own.host_logprobs())))
    (gradients, metrics, before), (fewer, same, after) = results
    return {
        "gradients": all(torch.equal(g, fewer[name]) for name, g in gradients.items()),
        "metrics": all(torch.allclose(part.total, same[name].total, rtol=1e-6) for name, part in metrics.items()),
        "counts": [part.num_tokens for part in metrics.values()] == [same[name].num_tokens for name in metrics],
        "logprobs": torch.equal(before, after),
    }


def shared_prompts(policy: Any, pairs: Any, micros: list[list[int]], rows: list[int]) -> dict[str, float]:
    """Two prompts for all rows: largest differences of shared prompts to plain packs, gradients relative to their tensor's."""
    from grpo_megatron.models.layers import modules

    batch = make_batch(with_two_prompts(pairs), [micros], rows, masked=True)
    results = []
    for batch.shares_prompts in (False, True):
        with mock.patch.object(modules, "QUERY_BLOCK", 16):  # the responses are short
            sizes = [pack.tokens.numel() for pack in policy.packs(batch, micros)]
            before = policy.logprobs(batch)
            policy.forward_backward(batch, micros, loss)
        results.append((named_gradients(policy), before, sum(sizes)))
    (gradients, plain, all_tokens), (shared, tree, fewer) = results
    errors = [(g - shared[name]).abs().max() / g.abs().max() for name, g in gradients.items() if g.abs().max() > 0]
    return {"gradients": max(errors).item(), "logprobs": (plain - tree).abs().max().item(), "saved": all_tokens - fewer}


def with_two_prompts(pairs: Any) -> Any:
    return [(pairs[0 if row < 3 else 3][0], response) for row, (_, response) in enumerate(pairs)]


def both_packings(
    policy: Any, pairs: Any, micros: list[list[int]], rows: list[int]
) -> dict[bool, dict[str, torch.Tensor]]:
    """Two prompts for all rows: shares its prompts? -> the gradients, as whole Hugging Face tensors."""
    batch, found = make_batch(with_two_prompts(pairs), [micros], rows, masked=True), {}
    for batch.shares_prompts in (False, True):
        policy.forward_backward(batch, micros, loss)
        found[batch.shares_prompts] = whole(policy, named_gradients(policy))
    return found


def policy_loss(inputs: Any) -> Any:
    from grpo_megatron.algo.losses import policy_losses, total_loss
    from grpo_megatron.config import ActorConfig

    return total_loss(inputs, ActorConfig(), policy_losses.get("vanilla"), None)


def stream(policy: Any) -> dict[str, torch.Tensor]:
    """Copies of the tensors that the model streams: every one once."""
    out: dict[str, torch.Tensor] = {}
    for bucket in policy.hf_weights(1):
        for name, tensor in bucket:
            assert name not in out, name
            out[name] = tensor.clone()
    return out


def whole(policy: Any, local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face tensors from every rank's Megatron tensors, merged by the weight rows, not by weights/folder.py. Collective.

    Replicas must be equal, unless the distributed optimizer leaves each rank a part of the sums.
    """
    import torch.distributed as dist

    from grpo_megatron.models.weights.stream import model_rows

    mesh, are_equal = policy.mesh, not policy.actor.megatron.use_distributed_optimizer
    gathered: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(gathered, (mesh.tp_rank, mesh.ep_rank, local))
    out = {}
    for name, row in model_rows(policy.arch).items():
        if row.is_constant:
            continue
        owner = row.ep_rank(policy.arch, mesh.ep)
        shards: dict[int, torch.Tensor] = {}  # of the first replica
        for tp_rank, ep_rank, held in gathered:
            assert name not in held or owner in (None, ep_rank), f"{name} is on expert-parallel rank {ep_rank}"
            if name in held:
                first = shards.setdefault(tp_rank, held[name])
                assert not are_equal or torch.equal(held[name], first), f"{name} differs between replicas"
        merged = row.merge([shards[t] for t in sorted(shards)], policy.arch)
        out.update(zip(row.hf, merged, strict=True))
    return out
