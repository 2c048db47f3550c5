"""What engine ranks must hold, from the shards of many simulated ranks; and what the comparison says of wrong contents."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from grpo_megatron.models.families import table_of
from grpo_megatron.models.weights.sync_parameters import engine_tensors, sync_parameters
from grpo_megatron.models.weights.table import expand_table, is_layered
from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.sync.digest import Expected, compare, expected_digests, part_digest
from grpo_megatron.sync.plan import SyncPlan
from grpo_megatron.sync.rounds import RankPlan, choose_rounds
from grpo_megatron.sync.tensors import EngineTensors
from tests.sync.architectures import FAMILIES, architecture, planned_shapes

Weights = dict[str, torch.Tensor]
# (world, tp, pp, ep, rollout tp)
LAYOUTS = [(1, 1, 1, 1, 1), (4, 2, 2, 1, 4), (8, 4, 1, 1, 2), (8, 2, 2, 2, 8), (16, 8, 2, 1, 4), (4, 1, 1, 4, 1)]


@cache
def weights_of(family: str) -> Weights:
    generator = torch.Generator().manual_seed(1)
    shapes = planned_shapes(architecture(family))
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def expected_of(family: str, layout: tuple[int, ...], whole: Weights) -> tuple[Expected, EngineTensors]:
    """All ranks in turn: the first pass adds up the tables, the second hands the sum to one rank."""
    world, tp, pp, ep, rollout_tp = layout
    arch, grid = architecture(family), Grid(world, tp, pp, ep, rollout_tp)
    rows = {row.megatron: row for row in expand_table(table_of(arch), arch)}
    stages = {name: i * pp // len(rows) if is_layered(row) else 0 for i, (name, row) in enumerate(rows.items())}
    parameters = sync_parameters(arch, grid, stages)
    complete, names = engine_tensors(arch, rollout_tp, reads_shards=True), planned_shapes(arch)
    engine = EngineTensors(*({name: part[name] for name in names} for part in (complete.tensors, complete.spans)))
    plan = SyncPlan(parameters, engine.spans, grid)
    rounds, _ = choose_rounds(plan, 1 << 20)
    total: Any = 0
    for rank in range(world):
        tables: list[torch.Tensor] = []
        read = lambda name, tp_rank=rank % tp: rows[name].shard(whole.__getitem__, arch, tp_rank, tp)  # noqa: E731
        shares = RankPlan(plan, rounds, rank).shares()
        expected_digests(shares, read, engine, lambda table: tables.append(table.clone()), torch.device("cpu"))  # noqa: B023
        total = total + tables[0]
    return expected_digests([], str, engine, lambda table: table.copy_(total), torch.device("cpu")), engine  # type: ignore[arg-type]


def held_by(engine: EngineTensors, engine_rank: int, whole: Weights) -> dict[str, int]:
    held = {}
    for name, tensor in engine.tensors.items():
        start, stop = engine.spans[name][engine_rank]
        held[name] = int(part_digest(whole[name].narrow(tensor.axis, start, stop - start), tensor, start))
    return held


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_every_rank_must_hold(family: str, layout: tuple[int, ...]) -> None:
    whole = weights_of(family)
    expected, engine = expected_of(family, layout, whole)
    for engine_rank in range(layout[-1]):
        assert compare(expected, held_by(engine, engine_rank, whole), engine, engine_rank, engine_rank) is None
    assert expected.weights_digest == expected_of(family, LAYOUTS[0], whole)[0].weights_digest
    assert expected.non_finite == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_named(value: float) -> None:
    whole = {name: tensor.clone() for name, tensor in weights_of("qwen2").items()}
    name = "model.layers.2.self_attn.k_proj.bias"
    whole[name][-1] = value
    assert expected_of("qwen2", (4, 2, 2, 1, 2), whole)[0].non_finite == [name]


def test_large_finite_values_are_finite_although_their_sum_is_not() -> None:
    whole = {name: tensor.clone() for name, tensor in weights_of("qwen2").items()}
    whole["model.norm.weight"][:] = torch.finfo(torch.bfloat16).max
    assert not whole["model.norm.weight"].sum().isfinite()
    assert expected_of("qwen2", (4, 2, 2, 1, 2), whole)[0].non_finite == []


def test_one_bit_of_any_tensor_changes_the_digest_of_the_weights() -> None:
    whole = dict(weights_of("qwen3-moe"))
    seen = {expected_of("qwen3-moe", LAYOUTS[0], whole)[0].weights_digest}
    for name in list(whole)[::7]:
        changed = whole[name].clone()
        changed.view(torch.int16).view(-1)[-1] ^= 1
        seen.add(expected_of("qwen3-moe", LAYOUTS[0], {**whole, name: changed})[0].weights_digest)
    swapped = {**whole, "model.norm.weight": whole["model.layers.0.input_layernorm.weight"]}
    swapped["model.layers.0.input_layernorm.weight"] = whole["model.norm.weight"]
    seen.add(expected_of("qwen3-moe", LAYOUTS[0], swapped)[0].weights_digest)
    assert len(seen) == 2 + len(list(whole)[::7])


def test_the_message_names_tensor_slice_rank_and_origin() -> None:
    expected, engine = expected_of("llama-groups", (2, 2, 1, 1, 2), whole := weights_of("llama-groups"))
    k, v, o = (f"model.layers.3.self_attn.{kind}_proj.weight" for kind in "kvo")
    held = {**held_by(engine, 1, whole)}
    held[k], held[v] = held[v], held[k]
    held[o] ^= 1 << 62
    held["model.norm.weight"] ^= 1
    del held["model.embed_tokens.weight"]
    assert compare(expected, held, engine, 1, 5) == (
        "the engine does not hold the weights that were sent, "
        "model.embed_tokens.weight rows 64 to 101 on rank 5 (not loaded), "
        f"{k} rows 32 to 64 on rank 5 (it holds {v}), "
        f"{v} rows 32 to 64 on rank 5 (it holds {k}), "
        f"{o} columns 32 to 64 on rank 5, "
        "model.norm.weight rows 0 to 64 on rank 5"
    )
    assert str(compare(expected, {}, engine, 1, 5)).endswith(f"and {len(engine.tensors) - 10} more")


def test_an_error_of_one_rank_is_raised_after_the_others_have_its_table() -> None:
    arch, reduced = architecture("llama"), []
    engine = engine_tensors(arch, 1, reads_shards=True)
    rows = [row.megatron for row in expand_table(table_of(arch), arch)]
    plan = SyncPlan(sync_parameters(arch, Grid(1), dict.fromkeys(rows, 0)), engine.spans, Grid(1))
    shares = RankPlan(plan, choose_rounds(plan, 1 << 20)[0], 0).shares()
    with pytest.raises(KeyError, match="embedding"):
        expected_digests(shares, {}.__getitem__, engine, reduced.append, torch.device("cpu"))
    assert len(reduced) == 1
