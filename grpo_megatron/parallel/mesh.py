"""Mesh: the frozen grid of ranks, and the groups that the package's code communicates over.

The training layout is tp x cp x dp x pp in Megatron's default order: tensor-parallel ranks are contiguous, then context-parallel,
data-parallel and pipeline ranks. cp ranks share the tokens of each sequence and have the same weights. The rollout layout
has one engine replica for each `rollout_tp` contiguous ranks; a replica spans several pipeline stages only if rollout_tp
exceeds tp * cp * dp.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import itertools
import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from grpo_megatron.config import Config
from grpo_megatron.device import Device
from grpo_megatron.parallel.bridge import Bridge
from grpo_megatron.parallel.control import LostRank as LostRank
from grpo_megatron.parallel.control import (
    Parcel,
    gather_all,
    gather_first,
    join_default_group,
    over,
    relay,
    route,
    share_first,
)
from grpo_megatron.parallel.control import RankError as RankError
from grpo_megatron.storage import StorageError


@dataclass(frozen=True)
class Grid:
    """The layout of a world in plain numbers. Mesh is one rank's view of it, with process groups.

    Training layout tp x replicas x pp (replicas = cp * dp), engine replicas of `rollout_tp`, nodes of `ranks_per_node`:

        rank = tp_rank + tp * (replica + replicas * pp_rank)

    Experts are spread over `ep` neighbouring replicas. The last `num_rollout_ranks` ranks have the engines alone, and
    the others the training layout.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    rollout_tp: int = 1
    ranks_per_node: int = 8
    num_rollout_ranks: int = 0

    @classmethod
    def of(cls, config: Config, num_training: int) -> Grid:
        """Return the grid that the config's layout makes with `num_training` ranks that train."""
        megatron, rollout_ranks = config.actor.megatron, config.num_rollout_ranks
        return cls(
            num_training + rollout_ranks,
            megatron.tensor_model_parallel_size,
            megatron.pipeline_model_parallel_size,
            megatron.expert_model_parallel_size,
            config.rollout.tensor_model_parallel_size,
            min(config.trainer.n_gpus_per_node, num_training + rollout_ranks),
            rollout_ranks,
        )

    @property
    def num_training(self) -> int:
        return self.world_size - self.num_rollout_ranks

    @property
    def first_rollout_rank(self) -> int:
        """The first rank with an engine."""
        return self.num_training if self.num_rollout_ranks else 0

    @property
    def replicas(self) -> int:
        """The number of ranks with the same shard of everything but experts."""
        return self.num_training // (self.tp * self.pp)

    @property
    def num_nodes(self) -> int:
        return -(-self.num_training // self.ranks_per_node) - (-self.num_rollout_ranks // self.ranks_per_node)

    def nodes(self) -> list[range]:
        """Lists the ranks of each node. Ranks of two roles on one machine count as two nodes: they share nothing."""
        borders = (0, self.num_training, self.world_size)
        return [
            range(first, min(first + self.ranks_per_node, end))
            for start, end in itertools.pairwise(borders)
            for first in range(start, end, self.ranks_per_node)
        ]

    def node(self, rank: int) -> int:
        """Returns the index of the rank's node in `nodes`."""
        if rank < self.num_training:
            return rank // self.ranks_per_node
        return -(-self.num_training // self.ranks_per_node) + (rank - self.num_training) // self.ranks_per_node

    def stage(self, rank: int) -> int:
        """Returns the rank's pipeline stage."""
        return rank // (self.tp * self.replicas)

    def ranks(self, tp_rank: int, pp_rank: int, ep_rank: int | None) -> list[int]:
        """Lists the ranks with one shard of one stage, in order. `ep_rank` None: of a weight that is no expert's."""
        return [
            tp_rank + self.tp * (replica + self.replicas * pp_rank)
            for replica in range(self.replicas)
            if ep_rank is None or replica % self.ep == ep_rank
        ]

    def engine_rank(self, rank: int) -> int:
        """Returns the tensor-parallel rank within the rank's engine; -1 on a rank without one."""
        return (rank - self.first_rollout_rank) % self.rollout_tp if rank >= self.first_rollout_rank else -1


T = TypeVar("T")
N = TypeVar("N", int, float)


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def all_gather_values(value: T, group: Any) -> list[T]:
    """Gathers the values of all ranks of `group`, in the group's order. Collective. Small host-side values: they are pickled."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True)
class Mesh:
    """Sizes, the coordinates of this rank, and process groups.

        rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * pp_rank))

    Experts are spread over `ep` neighbouring ranks of the cp x dp grid (ep divides cp * dp). All other weights are the same
    on these ranks.

    `control` is a gloo group of the whole world for small host-side messages, on any device. In it a rank sends to its
    neighbours only (control.py).
    """

    world_size: int
    rank: int
    tp: int
    pp: int
    dp: int
    ep: int
    rollout_tp: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    control: Any
    tp_group: Any
    pp_group: Any
    ep_group: Any
    cp: int = 1
    cp_rank: int = 0
    ranks_per_node: int = 1
    seed: int = 42  # trainer.seed
    bridge: Bridge | None = None  # to the ranks of the other role; then this mesh has one role's ranks

    @property
    def run_rank(self) -> int:
        """This rank among all ranks of the run, of both roles."""
        return self.rank if self.bridge is None else self.bridge.rank

    @property
    def run_size(self) -> int:
        return self.world_size if self.bridge is None else self.bridge.size

    @property
    def role(self) -> str:
        """The prefix of a rank's number in messages: "training ", "rollout ", or "" where every rank does both."""
        return "" if self.bridge is None else "rollout " if self.bridge.samples_only else "training "

    def grid(self) -> Grid:
        """Returns the same layout without this rank's view."""
        return Grid(self.world_size, self.tp, self.pp, self.ep, self.rollout_tp, self.ranks_per_node)

    @property
    def ep_rank(self) -> int:
        return self.rank // self.tp % self.ep

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def is_replica_reporter(self) -> bool:
        """True on one rank per data-parallel replica: the rank that has the loss and reports the metrics."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def num_engine_replicas(self) -> int:
        return self.world_size // self.rollout_tp

    @property
    def engine_replica(self) -> int:
        return self.rank // self.rollout_tp

    @property
    def is_replica_leader(self) -> bool:
        """True on one rank per engine replica: the rank that grades and reports the replica's samples."""
        return self.rank % self.rollout_tp == 0

    def stage_rank(self, pp_rank: int) -> int:
        """Returns the global rank on pipeline stage `pp_rank` with this rank's tp, cp and dp coordinates."""
        return self.tp_rank + self.tp * (self.cp_rank + self.cp * (self.dp_rank + self.dp * pp_rank))

    def replica_of(self, rank: int) -> int:
        """Returns the data-parallel coordinate of a global rank."""
        return rank // (self.tp * self.cp) % self.dp

    def ranks_of_replica(self, dp_rank: int) -> list[int]:
        """Lists the global ranks with data-parallel coordinate `dp_rank`, in order."""
        width = self.tp * self.cp
        return [i + width * (dp_rank + self.dp * stage) for stage in range(self.pp) for i in range(width)]

    def agree(self, problem: str | None) -> None:
        """Raises RankError with the problems of all ranks on every rank, if any rank has one. Collective.

        If a rank has died, the others raise LostRank with their own problems.
        """
        try:
            problems = self.all_gather(problem)
        except RuntimeError as error:
            lost = f"lost the connection to another rank ({str(error).partition('. ')[0]})"
            raise LostRank(lost if problem is None else f"{problem}; {lost}") from error
        ranks_with: dict[str, list[str]] = {}
        for rank, text in enumerate(problems):
            if text is not None:
                ranks_with.setdefault(text, []).append(str(rank))
        if ranks_with:
            named = (f"{self.role}rank {', '.join(ranks)}: {text}" for text, ranks in ranks_with.items())
            raise RankError("; ".join(named))

    def total(self, values: Sequence[N]) -> list[N]:
        """Sums the values over all ranks, in rank order. Collective."""
        return [sum(column) for column in zip(*self.all_gather(values), strict=True)]  # type: ignore[misc]

    def all_gather(self, value: T) -> list[T]:
        """Gathers the values of all ranks, in rank order. Collective. Small host-side values: they are pickled."""
        return [
            pickle.loads(part) for part in over(gather_all(self.rank, self.world_size, _pickled(value)), self.control)
        ]

    def gather(self, value: T) -> list[T]:
        """Gathers the values of all ranks, in rank order, on rank 0; returns an empty list on the others. Collective."""
        parts = over(gather_first(self.rank, self.world_size, _pickled(value)), self.control)
        return [pickle.loads(part) for part in parts]

    def route(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        """Exchanges parcels: returns those of all ranks with this rank as a destination, by source. Collective."""
        return over(route(self.rank, self.world_size, parcels), self.control)

    def broadcast(self, value: T) -> T:
        """Returns the value of rank 0 on every rank. Collective."""
        return over(share_first(self.rank, self.world_size, value), self.control)

    def replica_broadcast(self, value: T) -> T:
        """Returns the leader's value on every rank of the engine replica. Collective over it. The value is pickled."""
        place = self.rank % self.rollout_tp
        return over(share_first(place, self.rollout_tp, value), self.control, first=self.rank - place)

    def relay(self, holder: int, make: Callable[[], bytes]) -> bytes | None:
        """Calls `make` on rank `holder` only, and returns its result on rank 0; None on the others.

        A gather would need the memory for all ranks' results on rank 0. Only the ranks between the two communicate.
        """
        return over(relay(self.rank, holder, make), self.control)

    def barrier(self) -> None:
        dist.barrier(group=self.control)


def build_mesh(
    device: Device,
    *,
    tp: int,
    pp: int,
    rollout_tp: int,
    ep: int = 1,
    cp: int = 1,
    seed: int = 42,
    timeout_s: float = 1800.0,
    num_rollout_ranks: int = 0,
) -> Mesh:
    """Joins the world of torchrun's environment (without torchrun, a world of one) and makes Megatron's groups. Collective.

    Sizes must have been validated: tp * cp * pp, tp * pp * ep and rollout_tp divide the world size. `num_rollout_ranks`: the last
    so many ranks generate, in replicas of `rollout_tp`, and the others train. The mesh is that of the rank's role.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    timeout, bridge = datetime.timedelta(seconds=timeout_s), None
    if (
        not dist.is_initialized()
        and (store := join_default_group(device.backend, timeout, num_rollout_ranks)) is not None
    ):
        bridge = Bridge(store, device.torch_device, timeout, num_rollout_ranks)
        if bridge.samples_only:
            tp = pp = ep = cp = 1
        else:
            rollout_tp = 1  # a rank that receives a sample treats it as its own engine's
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert world_size % (tp * cp * pp) == 0 and world_size % (tp * pp * ep) == 0 and world_size % rollout_tp == 0
    _pristine.update(_megatron_groups())
    with device.megatron():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            context_parallel_size=cp,
            distributed_timeout_minutes=max(1, int(timeout_s // 60)),
        )
        model_parallel_cuda_manual_seed(seed)  # Megatron's own generators, one per tensor-parallel rank
    return Mesh(
        world_size=world_size,
        rank=rank,
        tp=tp,
        pp=pp,
        dp=world_size // (tp * cp * pp),
        cp=cp,
        cp_rank=parallel_state.get_context_parallel_rank(),
        ep=ep,
        rollout_tp=rollout_tp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        control=dist.new_group(backend="gloo", timeout=timeout),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        ep_group=parallel_state.get_expert_model_parallel_group(),
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        seed=seed,
        bridge=bridge,
    )


# -- A second layout of the same ranks ---------------------------------------------------------------------------------
# Megatron-Core's groups are globals of its module parallel_state. A second set of them is made beside the first, and is
# there while the model that has the other layout is built, or computes.


class SecondLayout:
    """Other sizes for a model beside the policy: its mesh, with the groups of that layout. Collective. cp is 1."""

    def __init__(self, mesh: Mesh, device: Device, *, tp: int, pp: int, ep: int, timeout_s: float) -> None:
        from megatron.core import parallel_state

        first = _megatron_groups()
        _set_megatron_groups(_pristine)
        with device.megatron():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                expert_model_parallel_size=ep,
                distributed_timeout_minutes=max(1, int(timeout_s // 60)),
            )
        self.mesh = replace(
            mesh,
            tp=tp,
            pp=pp,
            ep=ep,
            dp=mesh.world_size // (tp * pp),
            cp=1,
            cp_rank=0,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            pp_group=parallel_state.get_pipeline_model_parallel_group(),
            ep_group=parallel_state.get_expert_model_parallel_group(),
        )
        self._groups = _megatron_groups()
        _set_megatron_groups(first)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Puts Megatron-Core's groups of this layout in place, for the block."""
        first = _megatron_groups()
        _set_megatron_groups(self._groups)
        try:
            yield
        finally:
            _set_megatron_groups(first)


_pristine: dict[str, Any] = {}  # the globals before any group was made


def _megatron_groups() -> dict[str, Any]:
    from megatron.core import parallel_state

    values = {name: value for name, value in vars(parallel_state).items() if re.fullmatch("_[A-Z][A-Z0-9_]*", name)}
    return {name: copy.copy(value) if isinstance(value, list | dict) else value for name, value in values.items()}


def _set_megatron_groups(values: dict[str, Any]) -> None:
    from megatron.core import parallel_state

    vars(parallel_state).update(values)


def destroy_mesh() -> None:
    """Leaves the world. This process may then call `build_mesh` again."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


# -- Disk work between collectives -------------------------------------------------------------------------------------
# A rank that fails alone skips the collectives that the other ranks enter, and they wait until the timeout. So every
# action on the disk ends with one `agree`, which all ranks reach. The actions themselves must not communicate.


def on_every_rank(mesh: Mesh, task: str, action: Callable[[], T]) -> T:
    """Runs `action` on every rank. Raises RankError on every rank, "`task`: why", when one rank fails. Collective."""
    problem = None
    try:
        result = action()
    except (OSError, StorageError) as error:
        problem = f"{task}: {error}"
    mesh.agree(problem)
    return result


def on_first_rank(mesh: Mesh, task: str, action: Callable[[], object]) -> None:
    """Runs `action` on rank 0, while the other ranks wait. Raises RankError on every rank when it fails. Collective."""
    on_every_rank(mesh, task, action if mesh.rank == 0 else lambda: None)
