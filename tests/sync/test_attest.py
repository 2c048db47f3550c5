"""What engine ranks must hold, from the shards of many simulated ranks; and what the comparison says of wrong contents.

Engines are stand-ins here: what a rank is handed is what it holds (tests/rollout/test_memory.py has the same faults inside
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
from grpo_megatron.sync.exchange import Envelope
from tests.sync import simulation
from tests.sync.simulation import FAMILIES, World, architecture, complaints, engine_of, expected_of, held_by

Handed = list[dict[str, Tensor]]
# world, tp, pp, ep, rollout tp
GRIDS = [(1, 1, 1, 1, 1), (4, 2, 2, 1, 4), (8, 4, 1, 1, 2), (8, 2, 2, 2, 8), (16, 8, 2, 1, 4), (4, 1, 1, 4, 1)]


def world_of(family: str, grid: tuple[int, ...]) -> World:
    return simulation.world(architecture(family), Grid(*grid), [4] if grid[2] == 1 else [1, 3])


def with_changes(world: World, **changed: Tensor) -> World:
    return replace(world, whole={**world.whole, **changed})


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_every_rank_must_hold(family: str, grid: tuple[int, ...]) -> None:
    world = world_of(family, grid)
    expected = expected_of(world)
    assert complaints(world, expected, [world.whole] * grid[-1]) == [None] * grid[-1]
    assert expected.weights_digest == expected_of(world_of(family, GRIDS[0])).weights_digest
    assert expected.non_finite == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), torch.finfo(torch.bfloat16).max])
def test_values_that_are_not_finite_are_named(value: float) -> None:
    """Large finite values are finite, although their sum is not."""
    world, name = world_of("qwen2", (4, 2, 2, 1, 2)), "model.layers.2.self_attn.k_proj.bias"
    is_finite = abs(value) < float("inf")
    whole = world.whole[name].clone()
    whole[0 if is_finite else -1 :] = value
    assert not whole.sum().isfinite()
    assert expected_of(with_changes(world, **{name: whole})).non_finite == ([] if is_finite else [name])


def test_one_bit_of_any_tensor_changes_the_digest_of_the_weights() -> None:
    world = world_of("qwen3-moe", GRIDS[0])
    seen = {expected_of(world).weights_digest}
    for name in list(world.whole)[::7]:
        changed = world.whole[name].clone()
        changed.view(torch.int16).view(-1)[-1] ^= 1
        seen.add(expected_of(with_changes(world, **{name: changed})).weights_digest)
    one, other = "model.norm.weight", "model.layers.0.input_layernorm.weight"
    seen.add(expected_of(with_changes(world, **{one: world.whole[other], other: world.whole[one]})).weights_digest)
    assert len(seen) == 2 + len(list(world.whole)[::7])


def test_the_message_names_tensor_slice_rank_and_origin() -> None:
    world = world_of("llama-groups", (2, 2, 1, 1, 2))
    expected, engine, held = expected_of(world), engine_of(world), held_by(world, 1, world.whole)
    k, v, o = (f"model.layers.3.self_attn.{kind}_proj.weight" for kind in "kvo")
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
    world, reduced = world_of("llama", GRIDS[0]), []
    with pytest.raises(KeyError, match="embedding"):
        shares = world.rank_plan(0).shares()
        expected_digests(shares, {}.__getitem__, engine_of(world), reduced.append, torch.device("cpu"))
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


def _flip(world: World, handed: Handed, rank: int, name: str) -> Tensor:
    tensor = next(t for t in world.plan.tensors if t.name == name)
    start, stop = world.plan.spans[name][world.grid.engine_rank(rank)]
    out = handed[rank][name].clone()
    part = out.narrow(tensor.axis, start, stop - start)
    part[(-1,) * part.dim()] = (part[(-1,) * part.dim()].view(torch.int16) ^ 1).view(out.dtype)
    return out


def _stale(world: World, handed: Handed, rank: int, name: str) -> Tensor:
    return handed[rank][name] * 1.03125


def _shifted(world: World, handed: Handed, rank: int, name: str) -> Tensor:
    """Another slice of the same tensor."""
    axis = next(t.axis for t in world.plan.tensors if t.name == name)
    return world.whole[name].roll(world.whole[name].shape[axis] // 2, dims=axis)


def _nan(world: World, handed: Handed, rank: int, name: str) -> Tensor:
    return torch.full_like(handed[rank][name], torch.nan)


def _neighbour(world: World, handed: Handed, rank: int, name: str) -> Tensor | None:
    """Another tensor of the same shape: gate for up, key for value, another layer's or expert's."""
    shape = world.whole[name].shape
    others = [other for other in world.whole if other != name and world.whole[other].shape == shape]
    return world.whole[others[0]] if others else None


FAULTS: dict[str, Callable[[World, Handed, int, str], Tensor | None]] = {
    "one bit flipped": _flip,
    "stale": _stale,
    "wrong slice": _shifted,
    "NaN": _nan,
    "of one shape swapped": _neighbour,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_every_fault_of_every_tensor_is_named(name: str) -> None:
    world = make(name)
    expected, (handed, _) = expected_of(world), simulation.run(world)
    assert complaints(world, expected, handed) == [None] * world.grid.world_size
    rank, tried = world.grid.world_size - 1, 0
    for fault, damage in FAULTS.items():
        for tensor in world.plan.tensors:
            start, stop = world.plan.spans[tensor.name][world.grid.engine_rank(rank)]
            wrong = damage(world, handed, rank, tensor.name)
            if wrong is None or start == stop:
                continue
            tried += 1
            said = complaints(world, expected, [*handed[:-1], {**handed[-1], tensor.name: wrong}])
            assert said[:-1] == [None] * rank
            axis = ("rows", "columns")[tensor.axis]
            assert f"{tensor.name} {axis} {start} to {stop} on rank {rank}" in str(said[-1]), (fault, said[-1])
    assert tried >= 4 * len(world.plan.tensors)


class OneBitFlipped(simulation.Queues):
    """Flips the first bit of the message with a given number, counted over all ranks."""

    countdown = 0

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Callable[[], None]:
        sent = []
        for peer, buffer in sends:
            OneBitFlipped.countdown -= 1
            if OneBitFlipped.countdown == 0:
                buffer = buffer.clone()
                buffer[:1] = (buffer[:1].view(torch.int16) ^ 1).view(buffer.dtype)
            sent.append((peer, buffer))
        return super().post(sent, receives)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_a_bit_that_flips_on_the_way_is_found_in_every_message(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make(name)
    expected = expected_of(world)
    _, counts = simulation.run(world)
    num_messages = sum(count.operations for count in counts) // 2
    monkeypatch.setattr(simulation, "Queues", OneBitFlipped)
    for number in range(1, num_messages + 1):
        OneBitFlipped.countdown = number
        handed, _ = simulation.run(world)
        assert any(complaints(world, expected, handed)), number
    OneBitFlipped.countdown = 0
    assert not any(complaints(world, expected, simulation.run(world)[0]))
