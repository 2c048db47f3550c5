"""The weight sync of a model with adapters: A and B travel, and each rank merges what its engine reads.

The first sync sends the base weights, once, and each rank keeps the parts that it receives (sync/host_copies.py). From then on a
sync sends the factors only, by a plan of their own: of a weight that the engine cuts along its output, a rank needs A and
its rows of B; of one that is cut along its input, its columns of A and B. The rank then merges its part of every adapted
weight by the `merge` of the policy's forward pass, so that the engine gets the policy's bits (merge.py). Weights without
adapters are handed to the engine from the copies. It loads all weights in every sync, so it may forget, pack or quantise them.

The base is sent again after a sync that was not attested, and if it is not the one that was kept: another model, or
weights that were written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from grpo_megatron.config import LoraConfig
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.lora.merge import merge
from grpo_megatron.models.lora.table import LORA_A, LORA_B, Factor, lora_rows
from grpo_megatron.models.weights.stream import (
    BridgeResharding,
    Resharding,
    dequantized,
    holds_nothing,
    sync_parameters,
)
from grpo_megatron.parallel.mesh import Grid, Mesh, RankError
from grpo_megatron.sync.exchange import (
    Envelope,
    Exchange,
    Pool,
    Post,
    RankPlan,
    ReadParameter,
    Shard,
    point_to_point,
    snapshot,
)
from grpo_megatron.sync.host_copies import KeptParts
from grpo_megatron.sync.plan import EngineSpans, EngineTensors, SyncParameter
from grpo_megatron.sync.stacks import empty_stack
from grpo_megatron.types import WeightBucket

Merges = dict[str, tuple[str, str]]  # Hugging Face name of a weight -> names of its A and B


def factor_sync(
    rows: Mapping[str, Factor], arch: Architecture, grid: Grid, stage_of: Mapping[str, int], spans: EngineSpans
) -> tuple[list[SyncParameter], EngineSpans]:
    """The factors as parameters of a sync, and the part of each that merges what an engine rank reads of the weight.

    `stage_of` and `spans` are those of the weights.
    """
    stages, out = {name: stage_of[row.base.megatron] for name, row in rows.items()}, {}
    for row in rows.values():
        for name, index, shape in zip(row.hf, row.targets, row.hf_shapes(arch), strict=True):
            read, is_cut = spans[row.base.hf[index]], row.split_dim is not None
            out[name] = read if is_cut else tuple((0, shape[0] if start < stop else 0) for start, stop in read)
    return sync_parameters(arch, grid, stages, rows.values()), out


def merges_of(rows: Mapping[str, Factor]) -> Merges:
    """Which factors belong to which weight."""
    out: Merges = {}
    for name, row in rows.items():
        if name.endswith(LORA_A):
            pairs = zip(row.targets, row.hf, rows[name.removesuffix(LORA_A) + LORA_B].hf, strict=True)
            out |= {row.base.hf[index]: (a, b) for index, a, b in pairs}
    return out


class FactorSync:
    """The state of one rank over all syncs. Every rank makes the same calls. `bytes_received`: in the last sync."""

    def __init__(
        self, base: RankPlan, factors: RankPlan, merges: Merges, scale: float, post: Post, mesh: Mesh, pool: Pool
    ) -> None:
        """Allocates the copies on the host."""
        self._base, self._factors, self._merges, self._scale = base, factors, merges, scale
        self._post, self._mesh, self._pool = post, mesh, pool
        self._kept, self._source = KeptParts(base, pool), object()
        self._numbers = {tensor.name: number for number, tensor in enumerate(base.plan.tensors)}
        self._is_complete = self._is_attested = False
        self.bytes_received = 0

    def attested(self) -> None:
        """The engine holds the last stream's weights: the base that was kept is right."""
        self._is_attested = self._is_complete

    def stream(
        self, read_base: ReadParameter, read_factor: ReadParameter, source: object, *, has_factors: bool
    ) -> Iterator[WeightBucket]:
        """The merged weights as `Exchange.stream` gives them. Collective. Raises what `Mesh.agree` raises.

        `source` is equal for the same base weights. `has_factors`: whether this rank has any; without any on all ranks,
        the base is streamed as it is.
        """
        is_kept = self._is_attested and source == self._source
        self._is_attested = self._is_complete = False
        is_full, is_adapted = self._mesh.total([int(not is_kept), int(has_factors)])
        problem, exchange, merging = None, None, None
        try:
            merging = Exchange(self._factors, read_factor, self._post, self._pool) if is_adapted else None
            exchange = Exchange(self._base, read_base, self._post, self._pool) if is_full else None
        except (ValueError, RuntimeError) as error:  # RuntimeError: out of memory
            problem = f"cannot send weights: {error}"
        self._mesh.agree(problem)
        yield from self.merged(exchange, merging, read_base)
        self._source, self._is_complete = source, True

    def merged(
        self, exchange: Exchange | None, merging: Exchange | None, read_base: ReadParameter
    ) -> Iterator[WeightBucket]:
        """The base of `exchange`, or that which was kept, with the factors of `merging`, if there are any."""
        plans = ((self._base, exchange), (self._factors, merging))
        elements = sum(plan.elements_received for plan, sent in plans if sent is not None)
        self.bytes_received = elements * self._pool.dtype.itemsize
        factors = {} if merging is None else self._received(merging)
        if exchange is not None:
            buckets = self._kept.recorded(exchange.stream())
        else:
            buckets = self._kept.stream(Shard(self._base, read_base, self._pool))
        yield from self._merged(buckets, factors)

    def _received(self, exchange: Exchange) -> dict[str, Tensor]:
        problem, factors = None, {}
        try:
            factors = {name: tensor for bucket in exchange.stream() for name, tensor in bucket}
        except RankError:
            raise
        except Exception as error:  # of this rank alone: the others wait in the next stream
            problem = f"cannot send adapters: {type(error).__name__}: {error}"
        self._mesh.agree(problem)
        return factors

    def _merged(self, buckets: Iterable[WeightBucket], factors: dict[str, Tensor]) -> Iterator[WeightBucket]:
        """As `Exchange.stream`, a failure is raised when all messages are through."""
        problem: Exception | None = None
        for bucket in buckets:
            if problem is None:
                try:
                    merged = [(name, self._with_factors(name, tensor, factors)) for name, tensor in bucket]
                except RuntimeError as error:  # out of memory
                    problem = error
                else:
                    yield merged
        if problem is not None:
            raise problem

    def _with_factors(self, name: str, base: Tensor, factors: dict[str, Tensor]) -> Tensor:
        """The full-shaped tensor with this rank's part merged. `base` may be a window on a parameter: it stays as it is."""
        whole = self._base.tensor(self._numbers[name])
        start, stop = self._base.plan.spans[name][self._base.engine_rank]
        if not factors or name not in self._merges or start == stop:
            return base
        a, b = (factors[factor] for factor in self._merges[name])
        part = whole.axis, start, stop - start
        out = empty_stack(1, whole, (start, stop), self._pool.empty)[0]
        a, b = (a, b.narrow(*part)) if whole.axis == 0 else (a.narrow(*part), b)
        merge(base.narrow(*part), a, b, self._scale, out=out.narrow(*part))
        return out


class AdapterResharding(Resharding):
    """The `Resharding` of a model with adapters. Also for other models of the layout, whose weights travel whole."""

    def __init__(
        self,
        arch: Architecture,
        mesh: Mesh,
        stage_of: Mapping[str, int],
        tensors: EngineTensors,
        lora: LoraConfig,
        **options: Any,
    ) -> None:
        """As `Resharding`, with the `lora` of the model."""
        super().__init__(arch, mesh, stage_of, tensors, **options)
        self._rows = lora_rows(arch, lora)
        parameters, spans = factor_sync(self._rows, arch, self._grid, stage_of, tensors.spans)
        self.factors, _ = self._planned(parameters, spans, None)
        self._plans.append(self.factors)
        with self._kept_on_host("actor.lora", "give each node more memory, or train and draw in the same layout"):
            merges, plans = merges_of(self._rows), (self.plan, self.factors)
            self._sync = FactorSync(*plans, merges, lora.scale, point_to_point, mesh, self._pool)

    @property
    def bytes_received(self) -> int:
        """See Resharding."""
        return self._sync.bytes_received

    def attested(self) -> None:
        """See Resharding."""
        self._sync.attested()

    def _buckets(self, parameters: Mapping[str, Tensor], version: int) -> Iterator[WeightBucket]:
        weights: list[Any] = [parameters[name] for name in self._shapes]
        has_factors = any(hasattr(weight, "adapted") and weight.adapted.factors() is not None for weight in weights)
        source = [(id(weight), weight._version) for weight in weights]  # the version counts what is written to a tensor
        return self._sync.stream(*self._readers(parameters), source, has_factors=has_factors)

    def _readers(self, parameters: Mapping[str, Tensor]) -> tuple[ReadParameter, ReadParameter]:
        """Of base weights, and of factors."""

        def read_factor(name: str) -> Tensor:
            weight: Any = parameters[self._rows[name].base.megatron]
            return weight.adapted.factors()[name.endswith(LORA_B)].detach()  # type: ignore[no-any-return]

        return lambda name: dequantized(parameters[name]), read_factor


class AdapterBridge(AdapterResharding, BridgeResharding):
    """From the ranks that train to those that draw: the base once, and the factors of each version."""

    _has_base = False  # on the rank that receives it; or it is on its way
    _buckets = BridgeResharding._buckets

    def _snapshot(self, parameters: Mapping[str, Tensor]) -> list[Envelope]:
        read_base, read_factor = self._readers(parameters)
        base = [] if self._has_base else snapshot(self.plan, read_base, self._host)
        self._has_base = True
        return [*base, *snapshot(self.factors, read_factor, self._host)]

    def expect(self) -> None:
        """See BridgeResharding."""
        self._base_arriving = None if self._has_base else self._staged(self.plan)
        self._has_base, self._arriving = True, self._staged(self.factors)

    def _arrived(self) -> Iterator[WeightBucket]:
        return self._sync.merged(self._base_arriving, self._arriving, holds_nothing)
