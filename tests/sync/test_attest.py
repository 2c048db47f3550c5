"""What engine ranks must hold, from the shards of many simulated ranks; and what the comparison says of wrong contents.

Engines are stand-ins here: what a rank is given is what it holds (tests/rollout/test_memory.py has the same faults inside
vLLM). Weights are swapped, stale or cut wrongly after the exchange; bits flip on the way. The attestation names each fault,
for every tensor and every message of small worlds, and never a good sync.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.sync.digest import compare, expected_digests
from tests.sync import simulation
from tests.sync.simulation import FAMILIES, Given, Ranks, World, architecture, complaints, digests_of, expected_of

# world, tp, pp, ep, rollout tp
GRIDS = [(1, 1, 1, 1, 1), (4, 2, 2, 1, 4), (8, 4, 1, 1, 2), (8, 2, 2, 2, 8), (16, 8, 2, 1, 4), (4, 1, 1, 4, 1)]


def world_of(family: str, grid: tuple[int, ...]) -> World:
    return simulation.world(architecture(family), Grid(*grid), [4] if grid[2] == 1 else [1, 3])


def with_changes(world: World, **changed: Tensor) -> World:
    return replace(world, weights={**world.weights, **changed})


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_every_rank_must_hold(family: str, grid: tuple[int, ...]) -> None:
    world = world_of(family, grid)
    expected = expected_of(world)
    assert complaints(world, expected, [world.weights] * grid[-1]) == [None] * grid[-1]
    assert expected.weights_digest == expected_of(world_of(family, GRIDS[0])).weights_digest
    assert expected.non_finite == expected.unequal == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), torch.finfo(torch.bfloat16).max])
def test_values_that_are_not_finite_are_named(value: float) -> None:
    """Large finite values are finite, although their sum is not."""
    world, name = world_of("qwen2", (4, 2, 2, 1, 2)), "model.layers.2.self_attn.k_proj.bias"
    is_finite = abs(value) < float("inf")
    complete = world.weights[name].clone()
    complete[0 if is_finite else -1 :] = value
    assert not complete.sum().isfinite()
    assert expected_of(with_changes(world, **{name: complete})).non_finite == ([] if is_finite else [name])


@pytest.mark.parametrize("grid", [(4, 2, 2, 1, 4), (8, 2, 2, 2, 2)], ids=str)
def test_a_copy_that_drifts_from_the_others_is_named(grid: tuple[int, ...]) -> None:
    """One bit of a tensor on any rank that is not its only holder: another tensor-, data- or expert-parallel rank, or stage."""
    world = world_of("qwen3-moe" if grid[3] > 1 else "llama-tied", grid)
    for rank in range(0, grid[0], 3):
        copied = {s.tensor.name: s for s in world.rank_plan(rank).digest_slices() if s.num_copies > 1}
        for name in (*list(copied)[:: max(1, len(copied) // 3)], list(copied)[-1]):
            expected = expected_of(world, drifts={rank: copied[name]})
            assert expected.unequal == [name]
            if copied[name].copy:  # the engine must have the first holder's copy
                assert expected.digests == expected_of(world).digests


def test_one_bit_of_any_tensor_changes_the_digest_of_the_weights() -> None:
    world = world_of("qwen3-moe", GRIDS[0])
    seen = {expected_of(world).weights_digest}
    for name in list(world.weights)[::7]:
        changed = world.weights[name].clone()
        changed.view(torch.int16).view(-1)[-1] ^= 1
        seen.add(expected_of(with_changes(world, **{name: changed})).weights_digest)
    one, other = "model.norm.weight", "model.layers.0.input_layernorm.weight"
    seen.add(expected_of(with_changes(world, **{one: world.weights[other], other: world.weights[one]})).weights_digest)
    assert len(seen) == 2 + len(list(world.weights)[::7])


def test_the_message_names_tensor_slice_rank_and_origin() -> None:
    world = world_of("llama-groups", (2, 2, 1, 1, 2))
    expected, engine, digests = expected_of(world), world.engine, digests_of(world, 1, world.weights)
    k, v, o = (f"model.layers.3.self_attn.{kind}_proj.weight" for kind in "kvo")
    digests[k], digests[v] = digests[v], digests[k]
    digests[o] ^= 1 << 62
    digests["model.norm.weight"] ^= 1
    del digests["model.embed_tokens.weight"]
    assert compare(expected, digests, engine, 1, 5) == (
        "the engine does not hold the weights that were sent, "
        "model.embed_tokens.weight rows 64 to 101 on rank 5 (not loaded), "
        f"{k} rows 32 to 64 on rank 5 (it holds {v}), "
        f"{v} rows 32 to 64 on rank 5 (it holds {k}), "
        f"{o} columns 32 to 64 on rank 5, "
        "model.norm.weight rows 0 to 64 on rank 5"
    )
    assert str(compare(expected, {}, engine, 1, 5)).endswith(f"and {len(engine.tensors) - 10} more")


def test_an_error_of_one_rank_is_raised_after_the_others_have_its_table() -> None:
    world, reduced = world_of("llama", GRIDS[0]), []
    with pytest.raises(KeyError, match="embedding"):
        slices = world.rank_plan(0).digest_slices()
        expected_digests(slices, {}.__getitem__, world.engine, reduced.append, torch.device("cpu"))
    assert len(reduced) == 1


# -- faults of a sync --------------------------------------------------------------------------------------------------

WORLDS = {
    "TP2 to TP1, biases": ("qwen2", Grid(2, 2, 1, 1, 1, 2), [2]),
    "PP2 to TP2, experts": ("qwen3-moe", Grid(4, 1, 2, 2, 2, 2), [1, 1]),
    "TP4 to TP2, tied": ("llama-tied", Grid(4, 4, 1, 1, 2, 2), [2]),
}


def make(name: str) -> World:
    family, grid, sizes = WORLDS[name]
    return simulation.world(architecture(family, num_hidden_layers=2), grid, sizes, budget=1 << 16)


def _flip(world: World, given: Given, rank: int, name: str) -> Tensor:
    out = given[rank][name].clone()
    values = out.narrow(*world.span(name, rank))
    last = (-1,) * values.dim()
    values[last] = (values[last].view(torch.int16) ^ 1).view(out.dtype)
    return out


def _stale(world: World, given: Given, rank: int, name: str) -> Tensor:
    return given[rank][name] * 1.03125


def _shifted(world: World, given: Given, rank: int, name: str) -> Tensor:
    """Another slice of the same tensor."""
    tensor = world.engine.tensors[name]
    return world.weights[name].roll(tensor.length // 2, dims=tensor.axis)


def _nan(world: World, given: Given, rank: int, name: str) -> Tensor:
    return torch.full_like(given[rank][name], torch.nan)


def _neighbour(world: World, given: Given, rank: int, name: str) -> Tensor | None:
    """Another tensor of the same shape: gate for up, key for value, another layer's or expert's."""
    shape = world.weights[name].shape
    others = [other for other in world.weights if other != name and world.weights[other].shape == shape]
    return world.weights[others[0]] if others else None


FAULTS: dict[str, Callable[[World, Given, int, str], Tensor | None]] = {
    "one bit flipped": _flip,
    "stale": _stale,
    "wrong slice": _shifted,
    "NaN": _nan,
    "of one shape swapped": _neighbour,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.soak] * ("experts" in n)) for n in WORLDS])
def test_every_fault_of_every_tensor_is_named(name: str) -> None:
    world = make(name)
    expected, given = expected_of(world), Ranks(world).sync()
    assert complaints(world, expected, given) == [None] * world.grid.world_size
    rank, tried = world.grid.world_size - 1, 0
    for fault, damage in FAULTS.items():
        for tensor in world.plan.tensors:
            axis, start, length = world.span(tensor.name, rank)
            wrong = damage(world, given, rank, tensor.name)
            if wrong is None or not length:
                continue
            tried += 1
            said = complaints(world, expected, [*given[:-1], {**given[-1], tensor.name: wrong}])
            assert said[:-1] == [None] * rank
            place = f"{('rows', 'columns')[axis]} {start} to {start + length}"
            assert f"{tensor.name} {place} on rank {rank}" in str(said[-1]), (fault, said[-1])
    assert tried >= 4 * len(world.plan.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.soak] * ("experts" in n)) for n in WORLDS])
def test_a_bit_that_flips_on_the_way_is_found_in_every_message(name: str) -> None:
    world = make(name)
    expected, ranks = expected_of(world), Ranks(world)
    keys: set[tuple[int, ...]] = set()
    target: tuple[int, ...] = ()

    def fault(key: tuple[int, ...], message: Tensor) -> list[Tensor]:
        keys.add(key[1:])
        if key[1:] == target:
            message[:1] = (message[:1].view(torch.int16) ^ 1).view(message.dtype)
        return [message]

    ranks.fault = fault
    assert not any(complaints(world, expected, ranks.sync()))
    for target in sorted(keys):
        assert any(complaints(world, expected, ranks.sync())), target
    target = ()
    assert keys and not any(complaints(world, expected, ranks.sync()))
