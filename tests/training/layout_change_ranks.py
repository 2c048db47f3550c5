"""What the ranks of test_layout_change.py run: a policy is loaded in one layout, updated, and saved for the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests import tiny
from tests.models.policies import LAYOUTS, Layout, build, loss, share, stream

OPTIM = {"lr": 1e-3, "clip_grad": 0.5, "eps": 1e-4, "lr_decay_style": "linear"}  # eps: see tests/models/policies.py


def _build(model: Path, layout: Layout, num_updates: int, **optim: Any) -> Any:
    from grpo_megatron.config import OptimConfig

    policy = build(model, layout)
    policy.set_optimizer(OptimConfig.model_validate({**OPTIM, **optim}), num_updates)
    return policy


def _config(model: Path) -> Any:
    from grpo_megatron.config import Config

    return Config.model_validate({"model": {"path": model}})


def _update(policy: Any, pairs: Any) -> dict[str, Any]:
    """The loss over all ranks, the gradient norm, the learning rate, and the weights after the update."""
    rows = share(len(pairs), policy.mesh.dp_rank, policy.mesh.dp)
    batch = tiny.make_batch(pairs, [[[i] for i in range(len(rows))]], rows)
    (sums,), metrics = policy.update(batch, loss)
    counts = policy.mesh.is_first_replica_rank
    parts = policy.mesh.all_gather(float(sums["actor/pg_loss"].total) if counts else 0.0)
    return {
        "loss": sum(parts),
        "norm": metrics["actor/grad_norm"],
        "lr": metrics["actor/lr"],
        "weights": stream(policy),
    }


def whole_run(model: Path, pairs: Any, out: Path, num_updates: int) -> list[dict[str, Any]]:
    """`num_updates` updates on one rank; saves after the first."""
    from grpo_megatron.training.checkpoint import Checkpoints

    policy = _build(model, LAYOUTS["1"], num_updates)
    results = [_update(policy, pairs)]
    Checkpoints(out, policy.mesh, keep=None).save(1, policy, _config(model))
    return results + [_update(policy, pairs) for _ in range(1, num_updates)]


def one_update(model: Path, pairs: Any, out: Path, layout: Layout, done: int, num_updates: int) -> dict[str, Any]:
    """Load the checkpoint of `done` updates, save it again as it is (into out/again), update once, save."""
    from grpo_megatron.training.checkpoint import Checkpoints

    policy = _build(model, layout, num_updates)
    checkpoints = Checkpoints(out, policy.mesh, keep=None)
    newest = checkpoints.newest()
    assert newest is not None and checkpoints.load(newest, policy) == done
    config = _config(model)
    Checkpoints(out / "again", policy.mesh, keep=None).save(done, policy, config)
    result = _update(policy, pairs)
    checkpoints.save(done + 1, policy, config)
    return result


def changed_settings(model: Path, pairs: Any, out: Path) -> list[dict[str, Any]]:
    """Two updates of a run of two; then three of the same run, extended to five with other settings."""
    from grpo_megatron.training.checkpoint import Checkpoints

    policy = _build(model, LAYOUTS["1"], 2)
    mesh = policy.mesh
    first = [_used(policy, pairs) for _ in range(2)]
    path = Checkpoints(out, mesh, keep=None).save(2, policy, _config(model))
    changes = {"lr": 2e-3, "min_lr": 5e-4, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}
    policy = _build(model, LAYOUTS["1"], 5, **changes)
    Checkpoints(out, mesh, keep=None).load(path, policy)
    return first + [_used(policy, pairs) for _ in range(3)]


def _used(policy: Any, pairs: Any) -> dict[str, Any]:
    """The settings of each parameter group inside the optimizer's step, and Adam's step count after it."""
    from grpo_megatron.models.optimizer import each_optimizer, group_settings

    seen: dict[str, Any] = {}
    step = policy.optimizer.step

    def watched() -> Any:
        seen["groups"] = [dict(group) for group in group_settings(policy.optimizer)]
        return step()

    with mock.patch.object(policy.optimizer, "step", watched):
        _update(policy, pairs)
    states = [state for part in each_optimizer(policy.optimizer) for state in part.optimizer.state.values()]
    return {**seen, "steps": {float(torch.as_tensor(state["step"])) for state in states}}


def positions(model: Path) -> list[int]:
    """The place in the schedule after 6 updates, 2 per training step, with 2, 4 and 1 updates per training step."""
    from grpo_megatron.config import OptimConfig

    policy = _build(model, LAYOUTS["1"], 20)
    state = {"schedule": {"num_steps": 6, "period": 2}, "num_skipped_in_a_row": 0}
    found = []
    for period in (2, 4, 1):
        policy.set_optimizer(OptimConfig(), 20, period=period)
        policy.load_state(state)
        found.append(policy.num_updates)
    return found


def alone(model: Path, pairs: Any, out: Path, num_updates: int) -> dict[str, Any]:
    """All that one rank does, in one world."""
    return {
        "updates": whole_run(model, pairs, out, num_updates),
        "settings": changed_settings(model, pairs, out / "settings"),
        "positions": positions(model),
    }


def in_both_ways(model: Path, pairs: Any, out: Path, layout: Layout) -> None:
    """A checkpoint in pieces, and one that Megatron gathers; then each is loaded by the other's reader, and saved again."""
    import contextlib

    from grpo_megatron.models.weights import sharded_state
    from grpo_megatron.training.checkpoint import Checkpoints

    @contextlib.contextmanager
    def gathered() -> Any:
        whole = {
            "optimizer_as_local_shards": contextlib.nullcontext,
            "divide_among_replicas": lambda model, mesh: model,
        }
        with mock.patch.multiple(sharded_state, **whole):
            yield

    policy, config = _build(model, layout, 2), _config(model)
    _update(policy, pairs)
    for name, way in (("pieces", contextlib.nullcontext), ("whole", gathered)):
        with way():
            Checkpoints(out / name, policy.mesh, keep=None).save(1, policy, config)
    for name, way in (("whole", contextlib.nullcontext), ("pieces", gathered)):
        checkpoints, other = Checkpoints(out / name, policy.mesh, keep=None), _build(model, layout, 2)
        newest = checkpoints.newest()
        assert newest is not None
        with way():
            checkpoints.load(newest, other)
        Checkpoints(out / f"{name} again", policy.mesh, keep=None).save(1, other, config)
