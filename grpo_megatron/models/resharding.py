"""Resharding: the weights of a training layout as the stream that an engine of any rollout layout loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.precision import dequantized
from grpo_megatron.models.sync_parameters import sync_parameters
from grpo_megatron.models.weights import global_parameters, model_rows
from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.sync.attest import Expected, expected_digests
from grpo_megatron.sync.exchange import Exchange
from grpo_megatron.sync.rank_plan import RankPlan
from grpo_megatron.sync.rounds import plan_rounds
from grpo_megatron.sync.tensors import EngineTensors
from grpo_megatron.sync.transport import PointToPoint
from grpo_megatron.types import WeightBucket


class Resharding:
    """Planned once, for every model of the layout. Collective: built on every rank at the same point. Raises RankError."""

    def __init__(
        self,
        arch: Architecture,
        mesh: Mesh,
        stage_of: Mapping[str, int],
        tensors: EngineTensors,
        *,
        dtype: torch.dtype,
        device: torch.device,
        bucket_megabytes: int,
    ) -> None:
        """`tensors`: what each rank of an engine reads. `bucket_megabytes`: MiB of all buffers of a rank together."""
        self.mesh, self.tensors, self.dtype, self.device = mesh, tensors, dtype, device
        grid, budget = mesh.grid(), (bucket_megabytes << 20) // dtype.itemsize
        parameters = sync_parameters(arch, grid, stage_of)
        plan, rounds, self.traffic = plan_rounds(parameters, tensors.spans, grid, budget)
        self.plan = RankPlan(plan, rounds, mesh.rank)
        self._shares = self.plan.shares()
        rows = model_rows(arch)
        self._shapes = {p.name: rows[p.name].local_shape(arch, grid.tp) for p in self.plan.parameters()}
        if len(set(mesh.all_gather(plan.digest))) > 1:
            raise RankError("the ranks have planned different weight syncs: their configs or their versions differ")

    def stream(self, model: torch.nn.Module) -> Iterator[WeightBucket]:
        """Full-shaped tensors, of which this rank's part is filled (see `Exchange`). Collective. Raises RankError.

        The parameters must not change before the stream has ended: some of them are handed over as they are.
        """
        parameters = global_parameters(model)
        problem, exchange = None, None
        try:
            self._check(parameters)
            exchange = Exchange(self.plan, _reader(parameters), PointToPoint(), self.dtype, self.device)
        except (ValueError, RuntimeError) as error:  # RuntimeError: out of memory
            problem = f"cannot send weights: {error}"
        self.mesh.agree(problem)
        assert exchange is not None
        yield from exchange.stream()

    def expected_digests(self, model: torch.nn.Module) -> Expected:
        """The digests of the model's current weights, for each rank of the engine. Collective. Raises RankError."""
        problem, expected = None, None
        try:
            read = _reader(global_parameters(model))
            expected = expected_digests(self._shares, read, self.tensors, dist.all_reduce, self.device)
        except (KeyError, ValueError, RuntimeError) as error:
            problem = f"cannot read weights: {error}"
        self.mesh.agree(problem)
        assert expected is not None
        return expected

    def _check(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        for name, shape in self._shapes.items():
            if name not in parameters:
                raise ValueError(f"{name} is missing")
            if tuple(parameters[name].shape) != shape:
                raise ValueError(f"{name} has shape {tuple(parameters[name].shape)}, expected {shape}")


def _reader(parameters: Mapping[str, torch.nn.Parameter]) -> Callable[[str], torch.Tensor]:
    return lambda name: dequantized(parameters[name].detach())
