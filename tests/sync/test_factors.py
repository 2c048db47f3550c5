"""The sync of adapters: only A and B travel, as few bytes as any plan needs, and every rank merges the policy's bits.

Many ranks in one process, over layouts. What a rank must hold is `merge` of the whole weights. Wrong factors on one rank
(stale, of another layer, scaled, transposed) are named by the attestation: tensor, slice and rank.
"""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_megatron.config import LoraConfig
from grpo_megatron.models.lora.merge import merge
from grpo_megatron.models.lora.sync import FactorSync, factor_sync, merges_of
from grpo_megatron.models.lora.table import lora_rows
from grpo_megatron.models.weights.stream import stages_of_parameters
from grpo_megatron.parallel.mesh import Grid, RankError
from grpo_megatron.sync.exchange import Pool, RankPlan
from grpo_megatron.sync.plan import plan_rounds
from tests.sync import simulation
from tests.sync.simulation import Counts, Queues, World, architecture, complaints, expected_of
from tests.sync.test_delta import Crossing, SimulatedRanks, same_bits

LORA = LoraConfig(rank=4, alpha=6.0)
SOME = LoraConfig(rank=4, alpha=6.0, target_modules=["q_proj", "down_proj", "gate_proj"], exclude_modules="layers.1.")
LAYOUTS = {  # family, layout, layers of each stage, adapters
    "TP2 to TP1": ("qwen2", Grid(2, tp=2, rollout_tp=1, ranks_per_node=2), [4], LORA),
    "TP2 to TP2": ("qwen2", Grid(2, tp=2, rollout_tp=2, ranks_per_node=2), [4], LORA),
    "DP4 to TP4, shared heads": ("qwen3", Grid(4, rollout_tp=4, ranks_per_node=4), [4], LORA),
    "PP2 to TP2, layers without": ("llama-tied", Grid(2, pp=2, rollout_tp=2, ranks_per_node=1), [3, 1], SOME),
    "TP2 x PP2 to TP1, nodes": ("qwen2", Grid(8, tp=2, pp=2, rollout_tp=1, ranks_per_node=2), [2, 2], LORA),
    "TP2 x PP2 to TP4, experts": ("deepseek-v3", Grid(4, tp=2, pp=2, rollout_tp=4, ranks_per_node=2), [2, 2], LORA),
    "TP4 to TP2": ("qwen3-moe", Grid(4, tp=4, rollout_tp=2, ranks_per_node=2), [4], LORA),
}


class AdaptedWorld:
    """The ranks of a `World` with adapters over many syncs. `wrong`: by rank, what it merges instead of its factors."""

    def __init__(self, family: str, grid: Grid, sizes: list[int], lora: LoraConfig) -> None:
        self.base = simulation.world(architecture(family), grid, sizes)
        arch, size = self.base.arch, grid.world_size
        self.rows = lora_rows(arch, lora)
        self.lora, self.merges = lora, merges_of(self.rows)
        stages = stages_of_parameters(arch, sizes)
        parameters, spans = factor_sync(self.rows, arch, grid, stages, self.base.engine.spans)
        plan, rounds, _ = plan_rounds(parameters, spans, grid, 1 << 14)
        self.floor = simulation.floor_of(parameters, spans, grid)
        self.plans = [RankPlan(plan, rounds, rank) for rank in range(size)]
        self.queues: dict[tuple[int, int], queue.SimpleQueue[Any]] = {
            (a, b): queue.SimpleQueue() for a in range(size) for b in range(size)
        }
        self.crossing, self.counts = Crossing(size), [Counts() for _ in range(size)]
        self.pool = Pool(torch.bfloat16, torch.device("cpu"))
        self.syncs = [
            FactorSync(
                self.base.rank_plan(rank),
                self.plans[rank],
                self.merges,
                lora.scale,
                self._post(rank),
                SimulatedRanks(self.crossing, rank),  # type: ignore[arg-type]
                Pool(torch.bfloat16, torch.device("cpu")),
            )
            for rank in range(size)
        ]
        self.source, self.has_factors, self.wrong = 0, True, {}
        self.factors: dict[str, Tensor] = {}
        self.train(0)

    def _post(self, rank: int) -> Any:
        return lambda *envelopes: Queues(rank, self.queues, self.counts[rank]).post(*envelopes)

    def train(self, step: int) -> None:
        """Other factors."""
        generator = torch.Generator().manual_seed(step)
        for row in self.rows.values():
            for name, shape in zip(row.hf, row.hf_shapes(self.base.arch), strict=True):
                self.factors[name] = torch.randn(shape, generator=generator).bfloat16()

    def merged(self) -> World:
        """The world whose weights every engine must hold."""
        whole = dict(self.base.whole)
        for name, (a, b) in self.merges.items():
            whole[name] = merge(whole[name], self.factors[a], self.factors[b], self.lora.scale)
        base = self.base
        return World(base.arch, base.grid, base.plan, base.rounds, base.traffic, whole, base.engine)

    def sync(self, *, attested: bool = True) -> list[dict[str, Tensor]]:
        """What every rank's engine is handed."""
        size = self.base.grid.world_size
        handed: list[dict[str, Tensor]] = [{} for _ in range(size)]

        def rank_main(rank: int) -> None:
            sync, arch, tp = self.syncs[rank], self.base.arch, self.base.grid.tp

            def read_factor(name: str) -> Tensor:
                return self.rows[name].shard(self.factors.__getitem__, arch, rank % tp, tp)

            received, wrong = sync._received, self.wrong.get(rank, {})
            sync._received = lambda exchange: {**received(exchange), **wrong}  # type: ignore[method-assign]
            shard = self.base.shard(rank)
            before = {name: tensor.clone() for name, tensor in shard.items()}
            for bucket in sync.stream(shard.__getitem__, read_factor, self.source, has_factors=self.has_factors):
                handed[rank].update((name, tensor.clone()) for name, tensor in bucket)
            sync._received = received  # type: ignore[method-assign]
            assert all(same_bits(tensor, before[name]) for name, tensor in shard.items()), "a parameter was written to"

        for error in simulation.on_threads(size, rank_main):
            raise error
        for sync in self.syncs if attested else []:
            sync.attested()
        return handed

    def received(self) -> list[int]:
        return [sync.bytes_received for sync in self.syncs]


def assert_holds(world: World, handed: list[dict[str, Tensor]]) -> None:
    assert complaints(world, expected_of(world), handed) == [None] * world.grid.world_size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_factors_travel_and_the_engine_gets_the_merged_bits(layout: str) -> None:
    """The bytes are the floor: what a rank's engine reads of A and B and the rank does not hold, each byte once."""
    world = AdaptedWorld(*LAYOUTS[layout])
    world.base.whole["model.layers.0.self_attn.o_proj.weight"][:4] = -0.0
    floor = (2 * world.floor.ranks).tolist()
    whole = [2 * plan.elements_received for plan in (world.base.rank_plan(r) for r in range(len(floor)))]
    for step in range(3):
        world.train(step)
        assert_holds(world.merged(), world.sync())
        full = whole if step == 0 else [0] * len(floor)
        assert world.received() == [a + b for a, b in zip(floor, full, strict=True)]
        assert [2 * sum(counts.received.values()) for counts in world.counts] == world.received()
        for counts in world.counts:
            counts.received.clear()
    assert max(whole) == 0 or max(floor) < 0.4 * max(whole)
    world.has_factors = False  # the reference: the base itself, -0.0 included
    assert_holds(world.base, world.sync())
    assert world.received() == [0] * len(floor)


def test_the_base_is_sent_again_if_it_may_be_another() -> None:
    """After a sync that was not attested, and of other weights. One rank is enough."""
    world = AdaptedWorld(*LAYOUTS["TP2 to TP1"])
    world.sync()
    factors = 2 * int(world.floor.ranks.max())
    world.sync(attested=False)
    assert max(world.received()) == factors
    assert_holds(world.merged(), world.sync())
    assert min(world.received()) > factors
    world.base.whole = {name: -tensor for name, tensor in world.base.whole.items()}
    world.source = 1
    assert_holds(world.merged(), world.sync())
    assert min(world.received()) > factors
    world.syncs[1]._is_attested = False
    world.sync()
    assert min(world.received()) > factors
    world.sync()
    assert max(world.received()) == factors


def test_a_rank_that_cannot_read_its_adapters_stops_all_ranks() -> None:
    world = AdaptedWorld(*LAYOUTS["TP2 to TP1"])
    world.factors.pop(next(name for name in world.factors if "layers.2.mlp.down_proj.lora_A" in name))
    with pytest.raises(RankError, match=r"rank [01]: cannot send adapters: KeyError: '.*layers.2.mlp.down_proj.lora_A"):
        world.sync()


LAYER = "base_model.model.model.layers.{}.mlp.down_proj.lora_{}.weight"


def wrong_factors(fault: str, world: AdaptedWorld, old: dict[str, Tensor]) -> dict[str, Tensor]:
    one, other = ([LAYER.format(layer, kind) for kind in "AB"] for layer in (1, 3))
    new = world.factors
    if fault == "stale":
        return {name: old[name] for name in one}
    if fault == "swapped":
        return {
            **dict(zip(one, (new[n] for n in other), strict=True)),
            **dict(zip(other, (new[n] for n in one), strict=True)),
        }
    if fault == "scaled":
        return {one[1]: new[one[1]] * 1.0078125}  # the smallest step of bfloat16
    return {one[0]: new[one[0]].T.reshape(new[one[0]].shape)}


@pytest.mark.parametrize("fault", ["stale", "swapped", "scaled", "transposed"])
@pytest.mark.parametrize("layout", ["TP2 to TP1", "TP2 to TP2"])
def test_wrong_adapters_are_named(layout: str, fault: str) -> None:
    """On the last rank only: tensor, slice and rank, and no other tensor."""
    world = AdaptedWorld(*LAYOUTS[layout])
    world.sync()
    old = dict(world.factors)
    world.train(1)
    last = world.base.grid.world_size - 1
    world.wrong = {last: wrong_factors(fault, world, old)}
    *good, problem = complaints(world.merged(), expected_of(world.merged()), world.sync(attested=False))
    columns = "columns 48 to 96" if layout == "TP2 to TP2" else "columns 0 to 96"
    named = [f"model.layers.{layer}.mlp.down_proj.weight {columns} on rank {last}" for layer in (1, 3)]
    assert good == [None] * last and problem is not None
    assert problem.split(", ")[1:] == named[: 1 + (fault == "swapped")]
    world.wrong = {}
    assert_holds(world.merged(), world.sync())
