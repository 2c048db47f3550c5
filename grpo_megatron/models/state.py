"""Policy and optimizer as Megatron-Core sharded state, and back. Any tp x pp x dp layout can read what another wrote."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async

from grpo_megatron.models.optimizer import finish_load, prepare_for_load
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights import unwrapped

# The other sharding types fix tp and pp, or cannot be saved at all.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def _sharded(policy: Policy, is_loading: bool) -> dict[str, Any]:
    model = unwrapped(policy.ddp).sharded_state_dict(metadata=METADATA)  # type: ignore[operator]
    optimizer = policy.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=METADATA)
    return {"model": model, "optimizer": optimizer}


def _rng(policy: Policy, state: Any) -> ShardedObject:
    mesh = policy.mesh
    return ShardedObject("rng", state, (mesh.world_size,), (mesh.rank,), replica_id=0)


def save(policy: Policy, folder: Path) -> None:
    """Collective: write weights, optimizer and every rank's random state into the existing, empty `folder`."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with policy.device.megatron():
        state = _sharded(policy, is_loading=False)
        rng = {"host": policy.device.rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
        state["rng"] = _rng(policy, rng)
        # Saving is synchronous, so a plain queue does. Left alone, Megatron spawns a Manager process for it: ten seconds
        # at the first save, and an orphan that outlives a killed rank with its output pipes open.
        filesystem_async._results_queue = queue.Queue()
        dist_checkpointing.save(state, str(folder))


def load(policy: Policy, folder: Path, *, same_world: bool) -> None:
    """Collective: the inverse of `save`. Random states are restored when the world has the size it had (`same_world`)."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with policy.device.megatron():
        prepare_for_load(policy.optimizer)
        wanted = _sharded(policy, is_loading=True)
        if same_world:
            wanted["rng"] = _rng(policy, None)
        state = dist_checkpointing.load(wanted, str(folder))
        missing, unexpected = unwrapped(policy.ddp).load_state_dict(state["model"], strict=False)
        lost = [name for name in [*missing, *unexpected] if "_extra_state" not in name]
        assert not lost, f"checkpoint and model differ in {lost}"  # dist_checkpointing has compared the tensors already
        policy.optimizer.load_state_dict(state["optimizer"])
        finish_load(policy.optimizer)
        if same_world:
            policy.device.set_rng_state(state["rng"]["host"])
            get_cuda_rng_tracker().set_states(state["rng"]["megatron"])
