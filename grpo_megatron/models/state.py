"""Policy and optimizer as Megatron-Core sharded state, and back. A checkpoint can be read in any tp x pp x dp layout.

`save_sharded` repeats the steps of `dist_checkpointing.save`. Megatron's rank 0 writes common.pt, .metadata and metadata.json
between collectives. An error there (a full disk) would stop rank 0 only, and the other ranks would wait in the next
collective until the timeout. Here such an error is kept until the last collective is over, then raised on every rank.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from grpo_megatron.child import forks_end_with_this_process
from grpo_megatron.models.optimizer import (
    finish_load,
    group_settings,
    prepare_for_load,
    restore_settings,
    steps_of_empty_parts,
)
from grpo_megatron.models.plain_data import check_plain, plain_data_only
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights import unwrapped
from grpo_megatron.parallel.disk import on_every_rank
from grpo_megatron.storage.space import describe_space

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


class _Writer(TorchDistSaveShardedStrategy):
    """Megatron's writer of sharded state. This rank's disk errors are collected in `problems`, not raised."""

    def __init__(self, folder: Path) -> None:
        super().__init__("torch_dist", 1)
        self.folder = folder
        self.problems: list[str] = []
        self.failure: CheckpointException | None = None

    def attempt(self, action: Callable[..., object], *arguments: Any) -> None:
        try:
            action(*arguments)
        except (OSError, RuntimeError) as error:
            self.problems.append(self._described(error))

    def _described(self, error: Exception) -> str:
        """torch reports a full disk as a RuntimeError with two numbers ("unexpected pos 704 vs 598")."""
        if not isinstance(error, RuntimeError):
            return str(error)
        return f"{describe_space(self.folder)}; if that is too little, no space was left. torch says: {error}"

    def problem(self, task: str) -> str | None:
        """This rank's errors as one message for `Mesh.agree`."""
        return f"{task}: {'; '.join(dict.fromkeys(self.problems))}" if self.problems else None

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Collective. Megatron raises CheckpointException, a BaseException, on every rank when a file of one rank fails."""
        try:
            super().save(sharded_state_dict, checkpoint_dir)
        except CheckpointException as error:
            self.failure = error

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        """Megatron's request, in which neither the *.distcp files nor .metadata (`writer.finish`) can raise."""
        writer.finish = functools.partial(self.attempt, writer.finish)
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:  # nothing to write on this rank
            return request
        return request._replace(async_fn=functools.partial(self._write_files, request.async_fn))

    def _write_files(self, write: Callable[..., None], rank: int, buckets: Any, results: Any) -> None:
        """Call Megatron's own `write`, which puts into a queue either its results or the exception that ended it.

        It forks one process per file. When this rank was killed, such a process waited for it for ever.
        """
        outcomes: queue.Queue[Any] = queue.Queue()
        with forks_end_with_this_process():
            self.attempt(write, rank, buckets, outcomes)
        outcome = RuntimeError("the files were not written") if outcomes.empty() else outcomes.get()
        if isinstance(outcome, Exception):
            self.problems.append(self._described(outcome))
        results.put(outcome)


def save_sharded(policy: Policy, folder: Path) -> None:
    """Collective: write weights, optimizer and every rank's random state into the empty `folder`.

    Megatron gathers the optimizer's state over the data-parallel ranks on the device. Without `overlap_grad_reduce` that is
    as large as the gradient buffers, which are freed meanwhile.
    Raises RankError on every rank when any rank cannot write.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    mesh, task = policy.mesh, f"cannot write checkpoint {folder}"
    on_every_rank(mesh, task, functools.partial(folder.mkdir, parents=True, exist_ok=True))
    with policy.device.megatron(), policy.without_gradients():
        state = _sharded(policy, is_loading=False)
        rng = {"host": policy.device.rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
        state["rng"] = _rng(policy, rng)
        # Saving is synchronous, so a plain queue is enough. By default Megatron starts a Manager process for it, which
        # takes ten seconds at the first save and outlives a killed rank with the rank's output pipes open.
        filesystem_async._results_queue = queue.Queue()
        sharded, common = save_preprocess(state)
        writer = _Writer(folder)
        if mesh.rank == 0:
            writer.attempt(torch.save, common, folder / "common.pt")
        mesh.agree(writer.problem(task))  # before the large files
        writer.save(sharded, folder)
        if mesh.rank == 0:
            writer.attempt(save_config, CheckpointingConfig(writer.backend, writer.version), str(folder))
        mesh.agree(writer.problem(task))
        if writer.failure is not None:  # an error that is in no rank's `problems`
            raise writer.failure


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
