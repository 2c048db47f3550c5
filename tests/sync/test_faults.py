"""Faults of a sync, for every tensor and every message of small worlds: the attestation names each, and never a good sync.

Engines are stand-ins here: what a rank is handed is what it holds (tests/rollout/test_memory.py has the same faults inside
vLLM). Weights are swapped, stale or cut wrongly after the exchange; bits flip on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_megatron.models.weights.sync_parameters import engine_tensors
from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.sync.digest import Expected, compare, expected_digests, part_digest
from grpo_megatron.sync.exchange import Envelope
from grpo_megatron.sync.rounds import RankPlan
from tests.sync import simulation
from tests.sync.architectures import architecture
from tests.sync.simulation import World

Handed = list[dict[str, Tensor]]
WORLDS = {
    "TP2 to TP1, biases": ("qwen2", Grid(2, 2, 1, 1, 1, 2), [2]),
    "PP2 to TP2, experts": ("qwen3-moe", Grid(4, 1, 2, 2, 2, 2), [1, 1]),
    "TP4 to TP2, tied": ("llama-tied", Grid(4, 4, 1, 1, 2, 2), [2]),
}


def make(name: str) -> World:
    family, grid, sizes = WORLDS[name]
    return simulation.world(architecture(family, num_hidden_layers=2), grid, sizes, budget=1 << 16)


def expected_of(world: World) -> Expected:
    """All ranks in turn: their tables are added up."""
    engine = engine_tensors(world.arch, world.grid.rollout_tp, reads_shards=True)
    total: Any = 0
    for rank in range(world.grid.world_size):
        tables: list[Tensor] = []
        shares = RankPlan(world.plan, world.rounds, rank).shares()
        shard = world.shard(rank)
        expected_digests(shares, shard.__getitem__, engine, lambda t: tables.append(t.clone()), torch.device("cpu"))  # noqa: B023
        total = total + tables[0]
    return expected_digests([], str, engine, lambda table: table.copy_(total), torch.device("cpu"))


def complaints(world: World, expected: Expected, handed: Handed) -> list[str | None]:
    """What the attestation says on every rank."""
    engine = engine_tensors(world.arch, world.grid.rollout_tp, reads_shards=True)
    out = []
    for rank, tensors in enumerate(handed):
        engine_rank, held = world.grid.engine_rank(rank), {}
        for name, tensor in engine.tensors.items():
            start, stop = engine.spans[name][engine_rank]
            held[name] = int(part_digest(tensors[name].narrow(tensor.axis, start, stop - start), tensor, start))
        out.append(compare(expected, held, engine, engine_rank, rank))
    return out


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


@pytest.mark.slow
def test_a_thousand_good_syncs_raise_no_alarm() -> None:
    """Between syncs a random hundredth of all weights changes."""
    world = simulation.world(architecture("qwen2", num_hidden_layers=1), Grid(2, 2, 1, 1, 1, 2), [1], budget=1 << 20)
    generator = torch.Generator().manual_seed(3)
    digests = set()
    for _ in range(1000):
        expected = expected_of(world)
        digests.add(expected.weights_digest)
        assert complaints(world, expected, simulation.run(world)[0]) == [None, None]
        for tensor in world.whole.values():
            changes = torch.rand(tensor.shape, generator=generator) < 0.01
            tensor[changes] = torch.randn(int(changes.sum()), generator=generator).to(tensor.dtype)
    assert len(digests) == 1000
