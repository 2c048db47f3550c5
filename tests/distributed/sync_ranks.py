"""What the ranks of the sync tests run: a real policy and a real engine in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests import tiny
from tests.colocated import colocate
from tests.models.policies import loss, share
from tests.tiny import make_batch

VOCAB = 101


def build(
    folder: Path,
    tp: int,
    pp: int,
    sp: bool,
    rollout_tp: int,
    temperature: float = 1.0,
    lr: float = 1e-2,
    dtype: str = "float32",
    sync: str = "full",
    ranks_per_node: int | None = None,
    lora: Any = None,
) -> Any:
    """`ranks_per_node`: the ranks of this machine are taken for several nodes of that size."""
    from grpo_megatron.config import ActorConfig, RolloutConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy
    from grpo_megatron.models.weights.stream import engine_tensors
    from grpo_megatron.parallel.mesh import build_mesh
    from grpo_megatron.rollout.build import build_engine
    from grpo_megatron.sync.weight_sync import DeltaLimits

    device = Device("cpu")
    mesh = build_mesh(device, tp=tp, pp=pp, rollout_tp=rollout_tp)
    if ranks_per_node is not None:
        mesh = dataclasses.replace(mesh, ranks_per_node=ranks_per_node)
    arch = read_architecture(folder)
    megatron = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "sequence_parallel": sp}
    actor = ActorConfig.model_validate({"megatron": megatron, "optim": {"lr": lr}, "lora": lora or {}})
    policy = Policy.load(folder, dtype, arch, actor, mesh, device, temperature=temperature)
    policy.set_optimizer(actor.optim, 1)
    rollout = RolloutConfig(tensor_model_parallel_size=rollout_tp, engine_options={"kv_cache_gib": 0.03})
    tensors = engine_tensors(arch, rollout_tp, reads_shards=True)
    engine = build_engine(
        rollout,
        folder,
        mesh,
        device,
        dtype=dtype,
        max_model_len=128,
        eos_token_ids=[2],
        tensors=tensors,
    )
    limits = DeltaLimits(full_every=5, max_density=0.1) if sync == "delta" else None
    return mesh, policy, engine, colocate(policy, engine, dtype=dtype, delta=limits)


def requests(step: int, temperature: float) -> Any:
    from grpo_megatron.rollout.engine import Request, sample_seed

    prompts = [p for p, _ in tiny.make_sequences(6, seed=7)]
    return [
        Request(tuple(p), sample_seed(1, step, str(i), 0), max_tokens=12, temperature=temperature)
        for i, p in enumerate(prompts)
    ]


def cycles(
    folder: Path,
    layout: tuple[int, int, int, bool],
    rollout_tp: int,
    num_cycles: int,
    lr: float,
    temperature: float = 1.0,
    dtype: str = "float32",
    ranks_per_node: int | None = None,
) -> dict[str, Any]:
    """`num_cycles` times: sync, generate, compute the policy's logprobs of the same tokens, update."""
    from grpo_megatron.report.metrics import Metrics

    _, tp, pp, sp, _ = layout
    mesh, policy, engine, colocation = build(
        folder, tp, pp, sp, rollout_tp, temperature, lr, dtype, ranks_per_node=ranks_per_node
    )
    pairs = tiny.make_sequences(6)
    rows = share(len(pairs), mesh.dp_rank, mesh.dp)
    batch = make_batch(pairs, [[list(range(len(rows)))]], rows)
    means, worsts, tokens = [], [], []
    for cycle in range(num_cycles):
        with colocation.rollout(cycle, Metrics()):
            completions = engine.generate(requests(0, temperature), cycle)
        prompts = [list(r.prompt_ids) for r in requests(0, temperature)]
        drawn = [(p, c.response_ids) for p, c in zip(prompts, completions, strict=True)]
        logprobs = policy.logprobs(make_batch(drawn, [[list(range(6))]]))
        differences = [logprobs[i, : len(c.logprobs)] - torch.tensor(c.logprobs) for i, c in enumerate(completions)]
        difference = torch.cat(differences).abs()
        means.append(difference.mean().item())
        worsts.append(difference.max().item())
        tokens.append([c.response_ids for c in completions])
        policy.update(batch, loss)
    return {"mean": means, "max": worsts, "tokens": tokens}


def delta_and_full(folder: Path, layout: tuple[int, int, int, bool], rollout_tp: int, lr: float) -> dict[str, Any]:
    """Six syncs by patches. After each, the engine's log-probabilities, and those after a full sync of the same weights.

    Before the fourth sync there is one that fails on the last rank.
    """
    from grpo_megatron.models.weights.stream import new_weight_sync
    from grpo_megatron.parallel.mesh import RankError
    from grpo_megatron.report.metrics import Metrics

    _, tp, pp, sp, _ = layout
    mesh, policy, engine, colocation = build(folder, tp, pp, sp, rollout_tp, 1.0, lr, "bfloat16", sync="delta")
    tensors, device = colocation.weight_sync.tensors, torch.device("cpu")
    full = new_weight_sync(
        policy.arch, mesh, policy.stage_of, tensors, dtype=torch.bfloat16, device=device, bucket_megabytes=1
    )
    pairs = tiny.make_sequences(6)
    rows = share(len(pairs), mesh.dp_rank, mesh.dp)
    batch = make_batch(pairs, [[list(range(len(rows)))]], rows)
    sequences = [prompt + response for prompt, response in pairs]
    out: dict[str, Any] = {"delta": [], "full": [], "metrics": [], "error": ""}
    for step in range(6):
        if step == 3:
            broken = mock.Mock(side_effect=RuntimeError("unreadable") if mesh.rank == 3 else None, wraps=engine.digests)
            with mock.patch.object(engine, "digests", broken):
                try:
                    with colocation.rollout(step, Metrics()):
                        raise AssertionError("the attestation has passed")
                except RankError as error:
                    out["error"] = str(error)
        metrics = Metrics()
        with colocation.rollout(step, metrics):
            out["delta"].append(engine.logprobs(sequences))
            out["metrics"].append(metrics.reduce(mesh.all_gather))
            engine.load_weights(policy.engine_weights(full, step), step)
            out["full"].append(engine.logprobs(sequences))
        policy.update(batch, loss)
    return out


def adapters(
    folder: Path, layout: tuple[int, int, int, bool], rollout_tp: int, lora: dict[str, Any], dtype: str
) -> dict[str, Any]:
    """Syncs of a policy with LoRA, each after an update; every one is attested.

    The third fails on the last rank. After the sixth, the reference is synced, which is the base. Before the eighth, one
    base weight is written to, on one rank.
    """
    from grpo_megatron.models.policy import AdapterReference
    from grpo_megatron.models.weights.stream import global_parameters
    from grpo_megatron.parallel.mesh import RankError
    from grpo_megatron.report.metrics import Metrics

    world, tp, pp, sp, _ = layout
    mesh, policy, engine, colocation = build(folder, tp, pp, sp, rollout_tp, 1.0, 1e-2, dtype, lora=lora)
    pairs, resharding = tiny.make_sequences(6), colocation.weight_sync
    rows = share(len(pairs), mesh.dp_rank, mesh.dp)
    batch = make_batch(pairs, [[list(range(len(rows)))]], rows)
    plans = {"base": resharding.plan, "factors": resharding.codec.plans[1]}
    out: dict[str, Any] = {name: plan.elements_received * resharding.dtype.itemsize for name, plan in plans.items()}
    out |= {"received": [], "digests": [], "drawn": [], "error": ""}
    reference = AdapterReference(policy, {})
    for step in range(9):
        if step == 2:
            broken = mock.Mock(side_effect=RuntimeError if mesh.rank == world - 1 else None, wraps=engine.digests)
            with mock.patch.object(engine, "digests", broken):
                try:
                    with colocation.rollout(step, Metrics()):
                        raise AssertionError("the attestation has passed")
                except RankError as error:
                    out["error"] = str(error)
        else:
            if step == 7 and mesh.rank == 0:
                next(iter(global_parameters(policy.ddp).values())).detach().mul_(1)
            with colocation.rollout(step, Metrics()):
                completions = engine.generate(requests(0, 1.0), step)
                out["drawn"].append([completion.response_ids for completion in completions])
                if step == 5:
                    colocation.sync_weights_from(reference, step, Metrics())
        out["received"].append(resharding.bytes_received)
        out["digests"].append(colocation.weights_digest)
        policy.update(batch, loss)
    return out


def faulty(folder: Path, faults: list[str]) -> dict[str, tuple[str, bool]]:
    """A PP2 policy. Per fault, a sync that fails on rank 1 only, after one that is good: (error, refused afterwards)."""
    from grpo_megatron.parallel.mesh import RankError
    from grpo_megatron.report.metrics import Metrics

    mesh, policy, engine, colocation = build(folder, 1, 2, False, rollout_tp=1)
    results = {}
    for good, fault in enumerate(faults):
        with colocation.rollout(2 * good, Metrics()):
            engine.generate(requests(0, 1.0), 2 * good)
        version = 2 * good + 1
        with _broken(policy, engine, fault) if mesh.rank == 1 else contextlib.nullcontext():
            try:
                with colocation.rollout(version, Metrics()):
                    engine.generate(requests(0, 1.0), version)
                error = "none"
            except RankError as raised:
                error = str(raised)
        refused = fault in ("stale", "other_model")  # attestation or probe fails; the stream itself was complete
        if not refused:
            try:
                engine.generate(requests(0, 1.0), version)
            except RuntimeError:
                refused = True
        results[fault] = error, refused
    return results


def killed(folder: Path) -> None:
    """A PP2 policy whose rank 1 dies in the middle of the second sync. The other rank raises what it is told."""
    from grpo_megatron.report.metrics import Metrics

    mesh, policy, _, colocation = build(folder, 1, 2, False, rollout_tp=1)
    with colocation.rollout(0, Metrics()):
        pass
    if mesh.rank == 1:
        real = policy.engine_weights

        def stream(resharding: Any, version: int) -> Any:
            yield next(real(resharding, version))
            os.kill(os.getpid(), signal.SIGKILL)

        policy.engine_weights = stream
    with colocation.rollout(1, Metrics()):
        raise AssertionError("rank 0 has not noticed")


@contextlib.contextmanager
def _broken(policy: Any, engine: Any, fault: str) -> Iterator[None]:
    from grpo_megatron.models.weights.stream import unwrapped

    layers = unwrapped(policy.ddp).decoder.layers
    down, up = layers[0].mlp.linear_fc2, layers[-1].mlp.linear_fc1.weight.data
    stream, logprobs = policy.engine_weights, engine.logprobs
    old = {"model.layers.1.mlp.down_proj.weight": layers[-1].mlp.linear_fc2.weight.detach() / 2}

    def raising(resharding: Any, version: int) -> Any:
        """A stream ends its communication before it raises."""
        first, *_ = stream(resharding, version)
        yield first
        raise KeyError("broken stream")

    def stale(resharding: Any, version: int) -> Any:
        """The engine keeps one tensor of an earlier step."""
        for bucket in stream(resharding, version):
            yield [(name, old.get(name, tensor)) for name, tensor in bucket]

    def other(sequences: Any) -> Any:
        """The engine computes something else: only the probe can find this."""
        return [[logprob - 0.3 for logprob in row] for row in logprobs(sequences)]

    if fault == "missing":
        weight = down.weight
        del down.weight
        yield
        down.weight = weight
    elif fault == "nan":
        kept = up[3, 5].clone()
        up[3, 5] = torch.nan
        yield
        up[3, 5] = kept
    else:
        owner, name, stand_in = {
            "exception": (policy, "engine_weights", raising),
            "stale": (policy, "engine_weights", stale),
            "other_model": (engine, "logprobs", other),
        }[fault]
        with mock.patch.object(owner, name, stand_in):
            yield
