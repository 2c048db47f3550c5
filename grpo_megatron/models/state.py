"""Policy and optimizer as Megatron-Core sharded state, and back. A checkpoint can be read in any tp x pp x dp layout.

`sharded_write.py` brings the state to the disk.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

from grpo_megatron.models.optimizer import (
    finish_load,
    group_settings,
    prepare_for_load,
    restore_settings,
    steps_of_empty_parts,
)
from grpo_megatron.models.plain_data import check_plain, plain_data_only
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.sharded_write import ShardedWrite, Writes
from grpo_megatron.models.weights import unwrapped
from grpo_megatron.parallel.mesh import on_every_rank

# The other sharding types fix tp and pp, or cannot be saved at all.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def _sharded(policy: Policy, is_loading: bool) -> dict[str, Any]:
    model = unwrapped(policy.ddp).sharded_state_dict(metadata=METADATA)  # type: ignore[operator]
    with steps_of_empty_parts(policy.optimizer):
        optimizer = policy.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=METADATA)
    return {"model": model, "optimizer": optimizer}


def _rng(policy: Policy, state: Any) -> ShardedObject:
    mesh = policy.mesh
    return ShardedObject("rng", state, (mesh.world_size,), (mesh.rank,), replica_id=0)


def save_sharded(policy: Policy, folder: Path, writes: Writes | None = None) -> None:
    """Collective: write weights, optimizer and every rank's random state into the empty `folder`.

    `writes` None: at once; otherwise when and as it says. Megatron gathers the optimizer's state over the data-parallel ranks on
    the device. Without `overlap_grad_reduce` that is as large as the gradient buffers, which are freed meanwhile.
    Raises RankError on every rank when any rank cannot write.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    mesh, writes = policy.mesh, writes or Writes()
    on_every_rank(
        mesh, f"cannot write checkpoint {folder}", functools.partial(folder.mkdir, parents=True, exist_ok=True)
    )
    with policy.device.megatron(), policy.without_gradients():
        state = _sharded(policy, is_loading=False)
        rng = {"host": policy.device.rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
        state["rng"] = _rng(policy, rng)
        writes.add(ShardedWrite(state, folder, policy.device, mesh, keeps_copy=writes.in_background))


def _without_unknown_extra_state(model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`model` without the FP8 state that the checkpoint lacks.

    Transformer Engine's norms ask for such a state, which is always empty; a checkpoint of local layers has none of them.
    """
    stored = load_sharded_metadata(str(folder))
    return {name: entry for name, entry in model.items() if "_extra_state" not in name or entry.unique_key in stored}


def load_sharded(policy: Policy, folder: Path, *, same_world: bool) -> None:
    """Collective: the inverse of `save_sharded`. With `same_world` (the world size is unchanged) random states are restored.

    Raises RankError on every rank when the checkpoint holds anything but plain data.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    mesh = policy.mesh
    check = functools.partial(check_plain, folder, mesh.rank, mesh.world_size)
    on_every_rank(mesh, f"cannot read checkpoint {folder}", check)
    with policy.device.megatron():
        prepare_for_load(policy.optimizer)
        wanted = _sharded(policy, is_loading=True)
        if same_world:
            wanted["rng"] = _rng(policy, None)
        with plain_data_only():
            wanted["model"] = _without_unknown_extra_state(wanted["model"], folder)
            state = dist_checkpointing.load(wanted, str(folder))
        missing, unexpected = unwrapped(policy.ddp).load_state_dict(state["model"], strict=False)
        lost = [name for name in [*missing, *unexpected] if "_extra_state" not in name]
        assert not lost, f"checkpoint and model differ in {lost}"  # dist_checkpointing has compared the tensors already
        settings = group_settings(policy.optimizer)  # of the config, which may differ from that of the checkpoint
        policy.optimizer.load_state_dict(state["optimizer"])
        restore_settings(policy.optimizer, settings)
        finish_load(policy.optimizer)
        if same_world:
            policy.device.set_rng_state(state["rng"]["host"])
            get_cuda_rng_tracker().set_states(state["rng"]["megatron"])
