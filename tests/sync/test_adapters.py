"""The sync of adapters: only A and B travel, as few bytes as any plan needs, and every rank merges the policy's bits.

Many ranks in one process, over layouts. What a rank must have is `merge` of the complete weights. Wrong factors on one rank
(stale, of another layer, scaled, transposed) are named by the attestation: tensor, slice and rank.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_megatron.config import LoraConfig
from grpo_megatron.models.lora.merge import merge
from grpo_megatron.models.lora.sync import AdapterCodec, factor_sync, merges_of
from grpo_megatron.models.lora.table import lora_rows
from grpo_megatron.models.weights.stream import stages_of_parameters
from grpo_megatron.parallel.mesh import Grid, RankError
from tests.sync import simulation
from tests.sync.simulation import Given, Ranks, World, architecture, complaints, expected_of, same_bits

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
    "TP2 x PP2, roles, to TP2": (
        "qwen2",
        Grid(8, tp=2, pp=2, rollout_tp=2, ranks_per_node=2, num_rollout_ranks=4),
        [2, 2],
        LORA,
    ),
}


class AdaptedRanks(Ranks):
    """The ranks of a `World` with adapters. `wrong`: by rank, what it merges instead of its factors."""

    def __init__(self, layout: str) -> None:
        family, grid, sizes, self.lora = LAYOUTS[layout]
        base = simulation.world(architecture(family), grid, sizes)
        stages = stages_of_parameters(base.arch, sizes)
        self.rows_of_factors = lora_rows(base.arch, self.lora)
        self.merges = merges_of(self.rows_of_factors)
        parameters, spans = factor_sync(self.rows_of_factors, base.arch, grid, stages, base.engine.spans)
        self.floor = (2 * simulation.floor_of(parameters, spans, grid).ranks).tolist()  # bytes
        self.has_factors, self.wrong, self.factors = True, dict[int, dict[str, Tensor]](), dict[str, Tensor]()
        self.base_of: dict[int, dict[str, Tensor]] = {}
        super().__init__(base, functools.partial(AdapterCodec, arch=base.arch, lora=self.lora, stage_of=stages))
        for rank, codec in enumerate(self.codecs):
            codec._receive_factors = functools.partial(self._factors_of, rank, codec._receive_factors)  # type: ignore[attr-defined]
        self.train(0)

    def _factors_of(self, rank: int, receive: Any, parameters: Any) -> dict[str, Tensor]:
        return {**receive(parameters), **self.wrong.get(rank, {})}

    def train(self, step: int) -> None:
        """Other factors."""
        generator = torch.Generator().manual_seed(step)
        for row in self.rows_of_factors.values():
            for name, shape in zip(row.hf, row.hf_shapes(self.world.arch), strict=True):
                self.factors[name] = torch.randn(shape, generator=generator).bfloat16()

    def parameters(self, rank: int) -> dict[str, Tensor]:
        """The base weights, the same in every sync; those with adapters have `adapted`, as those of a real model."""
        if rank not in self.base_of:
            self.base_of[rank] = self.world.shard(rank)
        place = self.world.arch, rank % self.world.grid.tp, self.world.grid.tp
        for name, weight in self.base_of[rank].items():
            rows = [row for row in self.rows_of_factors.values() if row.base.megatron == name]
            if rows:
                factors = functools.partial(self._cut, sorted(rows, key=lambda row: row.megatron), place)
                weight.adapted = SimpleNamespace(factors=factors)  # type: ignore[attr-defined]
        return self.base_of[rank]

    def _cut(self, rows: list[Any], place: tuple[Any, int, int]) -> list[Tensor] | None:
        return [row.shard(self.factors.__getitem__, *place) for row in rows] if self.has_factors else None

    def merged(self) -> World:
        """The world whose weights every engine must have."""
        weights = dict(self.world.weights)
        for name, (a, b) in self.merges.items():
            weights[name] = merge(weights[name], self.factors[a], self.factors[b], self.lora.scale)
        return replace(self.world, weights=weights)

    def checked_sync(self, of: World | None = None, *, accept: bool = True) -> list[int]:
        """Sync, check what every engine is given, and return the bytes that each rank has received."""
        before = {rank: {n: t.clone() for n, t in base.items()} for rank, base in self.base_of.items()}
        assert_has(of or self.merged(), self.sync(accept=accept))
        for rank, base in before.items():
            assert all(same_bits(tensor, self.base_of[rank][name]) for name, tensor in base.items()), (
                "a base was written to"
            )
        return self.bytes_received()


def assert_has(world: World, given: Given) -> None:
    engines = slice(world.grid.first_rollout_rank, None)
    assert not any(complaints(world, expected_of(world), [g or world.weights for g in given])[engines])
    assert all(given[engines])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_factors_travel_and_the_engine_gets_the_merged_bits(layout: str) -> None:
    """The bytes are the floor: what a rank's engine reads of A and B and the rank does not have, each byte once."""
    ranks = AdaptedRanks(layout)
    ranks.world.weights["model.layers.0.self_attn.o_proj.weight"][:4] = -0.0
    size = ranks.world.grid.world_size
    full = [2 * ranks.world.rank_plan(rank).elements_received for rank in range(size)]
    for step in range(3):
        ranks.train(step)
        received = ranks.checked_sync()
        assert received == [a + b for a, b in zip(ranks.floor, full if step == 0 else [0] * size, strict=True)]
        assert [2 * transport.received.total() for transport in ranks.transports] == received
        for transport in ranks.transports:
            transport.received.clear()
    assert max(full) == 0 or max(ranks.floor) < 0.4 * max(full)
    ranks.has_factors = False  # the reference: the base itself, -0.0 included
    assert ranks.checked_sync(ranks.world) == [0] * size


def test_the_base_is_sent_again_if_the_sync_does_not_build_on_the_last() -> None:
    """After one that was not accepted. One rank is enough."""
    ranks = AdaptedRanks("TP2 to TP1")
    ranks.checked_sync()
    factors = max(ranks.floor)
    assert max(ranks.checked_sync(accept=False)) == factors
    assert min(ranks.checked_sync()) > factors
    ranks.accepted[1] = False
    assert min(ranks.checked_sync()) > factors
    assert max(ranks.checked_sync()) == factors


def test_the_source_is_equal_until_a_base_weight_is_written_to() -> None:
    ranks = AdaptedRanks("TP2 to TP1")
    codec, parameters = ranks.codecs[0], ranks.parameters(0)
    source = codec.source(parameters)
    ranks.train(1)
    assert codec.source(ranks.parameters(0)) == source
    next(iter(parameters.values())).mul_(1)
    assert codec.source(parameters) != source


def test_a_rank_that_cannot_read_its_adapters_stops_all_ranks() -> None:
    ranks = AdaptedRanks("TP2 to TP1")
    ranks.factors.pop(next(name for name in ranks.factors if "layers.2.mlp.down_proj.lora_A" in name))
    with pytest.raises(RankError, match=r"rank [01]: cannot send adapters: '.*layers.2.mlp.down_proj.lora_A"):
        ranks.sync()


LAYER = "base_model.model.model.layers.{}.mlp.down_proj.lora_{}.weight"


def wrong_factors(fault: str, new: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Tensor]:
    one, other = ([LAYER.format(layer, kind) for kind in "AB"] for layer in (1, 3))
    swapped = zip((*one, *other), (*other, *one), strict=True)
    return {
        "stale": {name: old[name] for name in one},
        "swapped": {name: new[origin] for name, origin in swapped},
        "scaled": {one[1]: new[one[1]] * 1.0078125},  # the smallest step of bfloat16
        "transposed": {one[0]: new[one[0]].T.reshape(new[one[0]].shape)},
    }[fault]


@pytest.mark.parametrize("fault", ["stale", "swapped", "scaled", "transposed"])
@pytest.mark.parametrize("layout", ["TP2 to TP1", "TP2 to TP2"])
def test_wrong_adapters_are_named(layout: str, fault: str) -> None:
    """On the last rank only: tensor, slice and rank, and no other tensor."""
    ranks = AdaptedRanks(layout)
    ranks.sync()
    old = dict(ranks.factors)
    ranks.train(1)
    ranks.wrong = {1: wrong_factors(fault, ranks.factors, old)}
    good, problem = complaints(ranks.merged(), expected_of(ranks.merged()), ranks.sync(accept=False))
    columns = "columns 48 to 96" if layout == "TP2 to TP2" else "columns 0 to 96"
    named = [f"model.layers.{layer}.mlp.down_proj.weight {columns} on rank 1" for layer in (1, 3)]
    assert good is None and problem is not None
    assert problem.split(", ")[1:] == named[: 1 + (fault == "swapped")]
    ranks.wrong = {}
    ranks.checked_sync()
