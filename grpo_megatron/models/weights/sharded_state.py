"""Policy and optimizer as Megatron-Core sharded state, and back. A checkpoint can be read in any tp x pp x dp layout.

A save is three parts (`ShardedWrite`). `Writes` does them at once, or lets them wait:

    construction   collective: Megatron plans the files of every rank, and the tensors come to the host
    write          this rank's files, in any thread, without communication
    finish         collective: rank 0 writes the table of contents
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from grpo_megatron.device import Device
from grpo_megatron.models.lora.layers import sharded_factors
from grpo_megatron.models.optimizer import load_optimizer, steps_of_empty_parts
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.local_shards import divide_among_replicas, optimizer_as_local_shards
from grpo_megatron.models.weights.plain_data import check_plain, plain_data_only
from grpo_megatron.models.weights.stream import unwrapped
from grpo_megatron.parallel.control import RankError
from grpo_megatron.parallel.mesh import Mesh, on_every_rank
from grpo_megatron.storage.files import describe_space, sha256_of


class ShardedWrite:
    """One sharded state on its way to the disk. All ranks must call `write`, then `finish`.

    The steps are those of `dist_checkpointing.save`, with two differences. Megatron forks a process per file, which must not
    be done in a process with threads, and which waits for ever when its parent is killed; here it is a thread per file. And
    Megatron's rank 0 writes common.pt, .metadata and metadata.json between collectives. An error there (a full disk) would
    stop rank 0 only, and the other ranks would wait until the timeout. Here `finish` raises it as RankError on every rank.

    `keeps_copy`: the files get the current state, even if the model changes before they are written.
    """

    def __init__(self, state: dict[str, Any], folder: Path, device: Device, mesh: Mesh, *, keeps_copy: bool) -> None:
        self.folder, self.device, self.mesh, self.task = folder, device, mesh, f"cannot write checkpoint {folder}"
        self.hashes: dict[Path, str] = {}  # sha256 of this rank's files, once they are written
        # A plain queue. By default Megatron starts a Manager process for it, which takes ten seconds at the first save and
        # outlives a killed rank with the rank's output pipes open.
        self._results: queue.Queue[Any] = queue.Queue()
        filesystem_async._results_queue = self._results
        sharded, common = save_preprocess(state)
        self._strategy = _Strategy(folder)
        if mesh.rank == 0:
            self._strategy.attempt(torch.save, common, folder / "common.pt")
        mesh.agree(self.problem())  # before the large files
        self._request: AsyncRequest | None = None
        try:
            self._request = self._strategy.async_save(sharded, folder)
        except CheckpointException as error:
            self._strategy.failure = error
        self._buckets = self._on_host(keeps_copy) if self._request is not None else []

    def problem(self) -> str | None:
        """Returns this rank's errors so far, as one message for `Mesh.agree`."""
        problems = self._strategy.problems
        return f"{self.task}: {'; '.join(dict.fromkeys(problems))}" if problems else None

    def write(self) -> None:
        """Write and hash this rank's files. Their tensors are then forgotten."""
        buckets, self._buckets = self._buckets, []
        if not buckets:
            return
        with ThreadPoolExecutor(len(buckets)) as threads:
            outcomes = list(threads.map(self._write_file, range(len(buckets)), buckets))
        failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        self._results.put(failed[0] if failed else dict(enumerate(outcomes)))

    def finish(self) -> None:
        """Write the table of contents. Collective. Raises RankError."""
        with self.device.megatron():
            torch.distributed.barrier()
            for finalize in self._request.finalize_fns if self._request is not None else []:
                try:
                    finalize()
                except CheckpointException as error:  # a BaseException, on every rank when a file of one rank fails
                    self._strategy.failure = error
        if self.mesh.rank == 0:
            config = CheckpointingConfig(self._strategy.backend, self._strategy.version)
            self._strategy.attempt(save_config, config, str(self.folder))
        self.mesh.agree(self.problem())
        if self._strategy.failure is not None:  # an error that is in no rank's `problems`
            raise self._strategy.failure

    def _on_host(self, keeps_copy: bool) -> list[Any]:
        """Returns (path, name, (bytes, tensors)) of each file. Megatron copies only tensors that are on a device."""
        assert self._request is not None
        if self._request.preload_fn is None:  # nothing to write on this rank
            return []
        files, staged = self._request.async_fn_args[1], self._request.preload_fn()
        if keeps_copy:
            for (_, _, (_, before)), (_, _, (_, tensors)) in zip(files, staged, strict=True):
                for place, ((_, original), (item, tensor)) in enumerate(zip(before, tensors, strict=True)):
                    if original.device.type == "cpu":  # from a device it is a copy already
                        tensors[place] = item, tensor.clone()
        # Megatron's request lives until `finish`: it must not keep this rank's state on the device.
        files[:] = [(path, name, ([], [])) for path, name, _ in files]
        return list(staged)

    def _write_file(self, number: int, bucket: Any) -> Any:
        """Writes one file by Megatron's own function. Returns the results of that, or the exception that ended it."""
        outcomes: queue.Queue[Any] = queue.Queue()
        counts: queue.Queue[int] = queue.Queue()
        counts.put(number)
        self._strategy.attempt(self._strategy.write_one, number, bucket, outcomes, counts)
        _, outcome = (number, RuntimeError("the file was not written")) if outcomes.empty() else outcomes.get()
        if isinstance(outcome, Exception):
            self._strategy.note(outcome)
        else:
            path = Path(bucket[0])
            self._strategy.attempt(lambda: self.hashes.update({path: sha256_of(path)}))
        return outcome


class Writes:
    """The sharded states of one checkpoint. `in_background`: each is copied at once, and written when `write` is called."""

    def __init__(self, *, in_background: bool = False) -> None:
        self.in_background = in_background
        self.states: list[ShardedWrite] = []

    def add(self, state: ShardedWrite) -> None:
        """Write the state now, or in the background. Collective. Raises RankError as `ShardedWrite.finish` does."""
        self.states.append(state)
        if not self.in_background:
            state.write()
            state.finish()

    def write(self) -> None:
        """Write all states if they are written in the background. No communication."""
        for state in self.states if self.in_background else []:
            state.write()

    def finish(self) -> None:
        """Finish all states after `write`. Collective. Raises RankError."""
        for state in self.states if self.in_background else []:
            state.finish()

    def problem(self) -> str | None:
        """Returns this rank's errors so far."""
        return "; ".join(text for state in self.states if (text := state.problem()) is not None) or None

    def hashes(self, folder: Path) -> dict[str, str]:
        """Returns the sha256 of this rank's files, by their paths in `folder`."""
        return {path.relative_to(folder).as_posix(): sha for state in self.states for path, sha in state.hashes.items()}


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's writer of sharded state. This rank's disk errors are collected in `problems`."""

    def __init__(self, folder: Path) -> None:
        super().__init__("torch_dist", 1)
        self.folder = folder
        self.problems: list[str] = []
        self.failure: CheckpointException | None = None
        self.transforms: list[Any] = []  # of the bytes of each tensor

    def attempt(self, action: Callable[..., object], *arguments: Any) -> None:
        try:
            action(*arguments)
        except (OSError, RuntimeError) as error:
            self.note(error)

    def note(self, error: Exception) -> None:
        """Add an error. torch reports a full disk as a RuntimeError with two numbers ("unexpected pos 704 vs 598")."""
        text = str(error)
        if isinstance(error, RuntimeError):
            text = f"{describe_space(self.folder)}; if that is too little, no space was left. torch says: {error}"
        self.problems.append(text)

    def write_one(self, number: int, bucket: Any, outcomes: Any, counts: Any) -> None:
        write = filesystem_async.FileSystemWriterAsync.write_preloaded_data
        write(self.transforms, number, bucket, outcomes, counts, use_fsync=True)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        """Returns Megatron's request, in which .metadata (`writer.finish`) cannot raise."""
        self.transforms = [writer.transforms] if hasattr(writer, "transforms") else []
        writer.finish = functools.partial(self.attempt, writer.finish)
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)


# The other sharding types fix tp and pp, or cannot be saved at all.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def _sharded(policy: Policy, is_loading: bool) -> dict[str, Any]:
    model = unwrapped(policy.ddp).sharded_state_dict(metadata=METADATA)  # type: ignore[operator]
    if policy.lora is not None:  # what is trained: the factors, and a scalar head
        model = {name: entry for name, entry in model.items() if name.startswith("score.")}
        model |= sharded_factors(policy.ddp, policy.lora, policy.arch, policy.mesh)
    with steps_of_empty_parts(policy.optimizer), optimizer_as_local_shards():
        optimizer = policy.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=METADATA)
    return {"model": model if is_loading else divide_among_replicas(model, policy.mesh), "optimizer": optimizer}


def _rng(policy: Policy, state: Any) -> ShardedObject:
    mesh = policy.mesh
    return ShardedObject("rng", state, (mesh.world_size,), (mesh.rank,), replica_id=0)


def random_state(policy: Policy) -> bytes:
    """Return the states of torch's and Megatron's generators on this rank. Those of Python and numpy take 0.2 ms to copy."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states = [
        *policy.device.torch_states(),
        *(state for _, state in sorted(get_cuda_rng_tracker().get_states().items())),
    ]
    return b"".join(state.cpu().numpy().tobytes() for state in states)


def save_sharded(policy: Policy, folder: Path, writes: Writes | None = None) -> None:
    """Write weights, optimizer and every rank's random state into the empty `folder`. Collective.

    `writes` None: at once; otherwise when and as it says. Every rank writes its own shard of the optimizer's state, and an equal
    part of its data-parallel group's weights. From a GPU that part is copied to the host.
    Raises RankError on every rank when any rank cannot write.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    mesh, writes = policy.mesh, writes or Writes()
    on_every_rank(
        mesh, f"cannot write checkpoint {folder}", functools.partial(folder.mkdir, parents=True, exist_ok=True)
    )
    with policy.device.megatron():
        state = _sharded(policy, is_loading=False)
        rng = {"host": policy.device.rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
        state["rng"] = _rng(policy, rng)
        writes.add(ShardedWrite(state, folder, policy.device, mesh, keeps_copy=writes.in_background))


def _without_unknown_extra_state(model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Drops the FP8 state that the checkpoint lacks from `model`.

    Transformer Engine's norms ask for such a state, which is always empty; a checkpoint of local layers has none of them.
    """
    stored = load_sharded_metadata(str(folder))
    return {name: entry for name, entry in model.items() if "_extra_state" not in name or entry.unique_key in stored}


def load_sharded(policy: Policy, folder: Path, *, same_world: bool) -> None:
    """Read back the state of `save_sharded`. Collective. `same_world`: the world size is unchanged; restore random states.

    Raises RankError on every rank when the checkpoint has anything but plain data, or is of another model.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    mesh = policy.mesh
    check = functools.partial(check_plain, folder, mesh.rank, mesh.world_size)
    on_every_rank(mesh, f"cannot read checkpoint {folder}", check)
    with policy.device.megatron():
        wanted = _sharded(policy, is_loading=True)
        if same_world:
            wanted["rng"] = _rng(policy, None)
        with plain_data_only():
            wanted["model"] = _without_unknown_extra_state(wanted["model"], folder)
            try:
                state = dist_checkpointing.load(wanted, str(folder))
            except (CheckpointException, CheckpointingException) as error:  # other shapes, on all ranks alike
                why = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
                text = f"checkpoint {folder} does not fit the model: {why}; put back the folder of model.path"
                raise RankError(f"{text}, or start a new run in another trainer.output_dir") from error
        missing, unexpected = unwrapped(policy.ddp).load_state_dict(state["model"], strict=False)
        missing = [name for name in missing if policy.lora is None or name in state["model"]]  # else it is the base's
        lost = [name for name in [*missing, *unexpected] if "_extra_state" not in name]
        assert not lost, f"checkpoint and model differ in {lost}"  # dist_checkpointing has compared the tensors already
        with optimizer_as_local_shards():
            load_optimizer(policy.optimizer, state["optimizer"])
        if same_world:
            policy.device.set_rng_state(state["rng"]["host"])
            get_cuda_rng_tracker().set_states(state["rng"]["megatron"])
