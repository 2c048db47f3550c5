"""AdapterCodec: the weight sync of a model with adapters. A and B travel, and each rank merges what its engine reads.

The first sync sends the base weights, and each rank keeps those that it receives (sync/patches.py). Later ones send the
factors only, by a plan of their own. Each rank merges its slice of every adapted weight by the `merge` of the policy's
forward pass, so that the engine gets the policy's bits. It loads all weights in every sync, so it may pack or quantise them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from grpo_megatron.config import LoraConfig
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.lora.merge import merge
from grpo_megatron.models.lora.table import LORA_A, LORA_B, Factor, lora_rows
from grpo_megatron.models.weights.stream import dequantized, sync_parameters
from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.sync.digest import empty_group
from grpo_megatron.sync.exchange import RankPlan
from grpo_megatron.sync.patches import ReceivedSlices
from grpo_megatron.sync.plan import EngineSpans, SyncParameter
from grpo_megatron.sync.weight_sync import FullCodec, Parameters, ReadValues, SyncHeader, SyncRank, reader
from grpo_megatron.types import WeightBucket

Merges = dict[str, tuple[str, str]]  # Hugging Face name of a weight -> names of its A and B


def factor_sync(
    rows: Mapping[str, Factor], arch: Architecture, grid: Grid, stage_of: Mapping[str, int], spans: EngineSpans
) -> tuple[list[SyncParameter], EngineSpans]:
    """Return the factors as parameters of a sync, and the span of each that merges what an engine rank reads of the weight.

    Of a weight that the engine cuts along its output, a rank needs A and its rows of B; of one that is cut along its input,
    its columns of A and B. `stage_of` and `spans` are those of the weights.
    """
    stages, out = {name: stage_of[row.base.megatron] for name, row in rows.items()}, {}
    for row in rows.values():
        for name, index, shape in zip(row.hf, row.targets, row.hf_shapes(arch), strict=True):
            read, is_cut = spans[row.base.hf[index]], row.split_dim is not None
            out[name] = read if is_cut else tuple((0, shape[0] if start < stop else 0) for start, stop in read)
    return sync_parameters(arch, grid, stages, rows.values()), out


def merges_of(rows: Mapping[str, Factor]) -> Merges:
    """Return which factors belong to which weight."""
    out: Merges = {}
    for name, row in rows.items():
        if name.endswith(LORA_A):
            pairs = zip(row.targets, row.hf, rows[name.removesuffix(LORA_A) + LORA_B].hf, strict=True)
            out |= {row.base.hf[index]: (a, b) for index, a, b in pairs}
    return out


class AdapterCodec(FullCodec):
    """The base weights once, and then the factors. Also for other models of the layout, whose weights travel whole.

    The base is sent again if the sync does not build on the last one: that failed, or was of another model, or base weights
    were written to.
    """

    def __init__(
        self,
        rank: SyncRank,
        plan: RankPlan,
        read: ReadValues,
        *,
        arch: Architecture,
        lora: LoraConfig,
        stage_of: Mapping[str, int],
    ) -> None:
        super().__init__(rank, plan, dequantized)
        self._rows, self._scale = lora_rows(arch, lora), lora.scale
        self._merges = merges_of(self._rows)
        parameters, spans = factor_sync(self._rows, arch, rank.grid, stage_of, plan.plan.spans)
        self._factor_plan, _ = rank.plan(parameters, spans, None)
        self.plans.append(self._factor_plan)
        remedy = "; give each node more memory, or train and sample in the same layout"
        with rank.agreed("no memory on the host for what actor.lora keeps there", remedy):
            self._received = ReceivedSlices(plan, rank.pool)

    def source(self, parameters: Parameters) -> object:
        """See FullCodec. Equal for the same base weights, unless they were written to."""
        weights = (parameters[parameter.name] for parameter in self._plan.parameters())
        return [(id(weight), weight._version) for weight in weights]

    def begin(self, parameters: Parameters, version: int, *, builds_on_last: bool) -> SyncHeader:
        """See FullCodec. Without adapters on all ranks, the base is streamed as it is."""
        weights: list[Any] = [parameters[parameter.name] for parameter in self._plan.parameters()]
        has_factors = any(hasattr(weight, "adapted") and weight.adapted.factors() is not None for weight in weights)
        is_full, has_adapters = self._rank.mesh.total([int(not builds_on_last), int(has_factors)])
        return SyncHeader(version, bool(is_full), bool(has_adapters))

    def stream(self, header: SyncHeader, parameters: Parameters) -> Iterator[WeightBucket]:
        """See FullCodec."""
        factors = self._receive_factors(parameters) if header.has_adapters else {}
        plans = ((self._plan, header.is_full), (self._factor_plan, header.has_adapters))
        elements = sum(plan.elements_received for plan, is_sent in plans if is_sent)
        self.bytes_received = elements * self._rank.pool.dtype.itemsize
        if header.is_full:
            buckets = self._received.recorded(super().stream(header, parameters))
        else:
            buckets = self._received.stream(reader(parameters, self._read))
        yield from self._merged(buckets, factors)

    def expect(self) -> None:
        """See FullCodec. Factors are small, and only the header says whether there are any."""

    def _receive_factors(self, parameters: Parameters) -> dict[str, Tensor]:
        def read(name: str) -> Tensor:
            weight: Any = parameters[self._rows[name].base.megatron]
            return weight.adapted.factors()[name.endswith(LORA_B)].detach()  # type: ignore[no-any-return]

        with self._rank.agreed("cannot send adapters"):
            exchange = self._rank.exchange(self._factor_plan, read)
        with self._rank.agreed("cannot send adapters"):  # an error of one rank: the others wait in the next stream
            return {name: tensor for bucket in exchange.stream() for name, tensor in bucket}

    def _merged(self, buckets: Iterable[WeightBucket], factors: dict[str, Tensor]) -> Iterator[WeightBucket]:
        """Merge. As in `Exchange.stream`, a failure is raised when all messages are through."""
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
        """The full-shaped tensor with this rank's span merged. `base` may be a window on a parameter: it stays as it is."""
        tensor = self._plan.tensor(self._plan.number_of[name])
        start, stop = self._plan.plan.spans[name][self._plan.engine_rank]
        if not factors or name not in self._merges or start == stop:
            return base
        a, b = (factors[factor] for factor in self._merges[name])
        span = tensor.axis, start, stop - start
        out = empty_group(1, tensor, (start, stop), self._rank.pool.empty)[0]
        a, b = (a, b.narrow(*span)) if tensor.axis == 0 else (a.narrow(*span), b)
        merge(base.narrow(*span), a, b, self._scale, out=out.narrow(*span))
        return out
