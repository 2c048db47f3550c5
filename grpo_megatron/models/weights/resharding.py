"""Resharding: the weights of a training layout as the stream that an engine of any rollout layout loads.

The float32 buffers of a model (`Constants`) travel beside its parameters. DeepSeek-V3 chooses experts by score + bias. A
bias that is rounded to bfloat16 chooses others wherever two sums are closer than the rounding. The plan of a weight sync has
one dtype, so the biases travel apart. They are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.layers.precision import dequantized
from grpo_megatron.models.weights.load import global_parameters, model_rows
from grpo_megatron.models.weights.sync_parameters import sync_parameters
from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.sync.delta import DeltaLimits, DeltaSync
from grpo_megatron.sync.digest import Expected, Share, expected_digests
from grpo_megatron.sync.exchange import Exchange, Pool, RankPlan, point_to_point
from grpo_megatron.sync.plan import EngineTensors, SyncTensor, plan_rounds
from grpo_megatron.types import WeightBucket


class Constants:
    """The float32 buffers of the model. Every rank of a pipeline stage has those of its layers, whole."""

    def __init__(self, arch: Architecture, mesh: Mesh, stage_of: Mapping[str, int]) -> None:
        self._mesh = mesh
        self._of_stage: dict[int, list[tuple[str, SyncTensor]]] = {}  # (Megatron name, tensor)
        for row in model_rows(arch).values():
            if row.is_constant:
                tensor = SyncTensor(row.hf[0], row.hf_shapes(arch)[0], 0)
                self._of_stage.setdefault(stage_of[row.megatron], []).append((row.megatron, tensor))

    def shares(self) -> list[Share]:
        """The constants that this rank digests for the attestation: those of its stage, if it is the stage's first rank."""
        if (self._mesh.tp_rank, self._mesh.cp_rank, self._mesh.dp_rank) != (0, 0, 0):
            return []
        readers = tuple(range(self._mesh.rollout_tp))
        held = self._of_stage.get(self._mesh.pp_rank, [])
        return [Share(name, tensor, 0, tensor.length, 0, readers) for name, tensor in held]

    def stream(self, parameters: Mapping[str, Tensor], device: torch.device) -> Iterator[WeightBucket]:
        """Every constant on every rank, one bucket per stage. Collective over the pipeline's ranks."""
        for stage, held in sorted(self._of_stage.items()):
            flat = torch.empty(sum(tensor.numel for _, tensor in held), dtype=torch.float32, device=device)
            if self._mesh.pp_rank == stage:
                flat.copy_(torch.cat([parameters[name].detach() for name, _ in held]))
            if self._mesh.pp > 1:
                dist.broadcast(flat, self._mesh.stage_rank(stage), group=self._mesh.pp_group)
            parts = flat.split([tensor.numel for _, tensor in held])
            yield [(tensor.name, part) for (_, tensor), part in zip(held, parts, strict=True)]


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
        delta: DeltaLimits | None = None,
    ) -> None:
        """`tensors`: what each rank of an engine reads. `bucket_megabytes`: MiB of all buffers of a rank together.

        `delta`: changes are sent where possible (see `DeltaSync`); None: every sync is full.
        """
        self.mesh, self.tensors, self.dtype, self.device = mesh, tensors, dtype, device
        self._pool = Pool(dtype, device)
        grid, budget = mesh.grid(), (bucket_megabytes << 20) // dtype.itemsize
        parameters = sync_parameters(arch, grid, stage_of)
        plan, rounds, self.traffic = plan_rounds(parameters, tensors.spans, grid, budget)
        self.plan = RankPlan(plan, rounds, mesh.rank)
        self._constants = Constants(arch, mesh, stage_of)
        self._shares = [*self.plan.shares(), *self._constants.shares()]
        rows = model_rows(arch)
        self._shapes = {p.name: rows[p.name].local_shape(arch, grid.tp) for p in self.plan.parameters()}
        if len(set(mesh.all_gather(plan.digest))) > 1:
            raise RankError("the ranks have planned different weight syncs: their configs or their versions differ")
        self._delta = None if delta is None else self._build_delta(delta)

    def _build_delta(self, limits: DeltaLimits) -> DeltaSync:
        problem, delta = None, None
        try:
            delta = DeltaSync(self.plan, point_to_point, self.mesh, pool=self._pool, limits=limits)
        except RuntimeError as error:  # out of memory
            problem = f"no memory on the host for what rollout.sync=delta keeps there: {error}; set rollout.sync=full"
        self.mesh.agree(problem)
        assert delta is not None
        return delta

    @property
    def bytes_received(self) -> int:
        """The bytes that this rank received in the last sync."""
        if self._delta is not None:
            return self._delta.bytes_received
        plan = self.plan.plan
        return sum(plan.numel(plan.parts[part]) for part in self.plan.received) * self.dtype.itemsize

    @property
    def density(self) -> float | None:
        """The share of elements that had changed at the last sync. None: they were not compared."""
        return None if self._delta is None else self._delta.density

    def accept(self, weights_digest: str) -> None:
        """The engine holds what was streamed last, as attested. Only after this may the next sync send changes."""
        if self._delta is not None:
            self._delta.accept(weights_digest)

    def stream(self, model: torch.nn.Module, version: int) -> Iterator[WeightBucket]:
        """Full-shaped tensors, of which this rank's part is filled (see `Exchange`). Collective. Raises RankError.

        The parameters must not change before the stream has ended: some of them are handed over as they are.
        """
        parameters = global_parameters(model)
        read, problem, exchange = _reader(parameters), None, None
        try:
            self._check(parameters)
            if self._delta is None:
                exchange = Exchange(self.plan, read, point_to_point, self._pool)
        except (ValueError, RuntimeError) as error:  # RuntimeError: out of memory
            problem = f"cannot send weights: {error}"
        self.mesh.agree(problem)
        if self._delta is not None:
            yield from self._delta.stream(read, version)
        else:
            assert exchange is not None
            yield from exchange.stream()
        yield from self._constants.stream(parameters, self.device)

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

    def _check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        for name, shape in self._shapes.items():
            if name not in parameters:
                raise ValueError(f"{name} is missing")
            if tuple(parameters[name].shape) != shape:
                raise ValueError(f"{name} has shape {tuple(parameters[name].shape)}, expected {shape}")


def _reader(parameters: Mapping[str, torch.Tensor]) -> Callable[[str], torch.Tensor]:
    return lambda name: dequantized(parameters[name].detach())
