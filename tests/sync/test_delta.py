"""Delta syncs are exact over hundreds of Adam steps, fall back to full ones, and refuse every patch that is not the next.

Sizes: a part of n elements with c changes takes min(n / 8, 4 c) + b c bytes, where b is the size of an element. A message
has a stamp of 48 bytes, and 8 bytes per part are sent ahead.
"""

from __future__ import annotations

import functools
import math
import queue
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_megatron.config import RolloutConfig
from grpo_megatron.parallel.mesh import Grid, RankError
from grpo_megatron.rollout.build import engine_problems
from grpo_megatron.sync.delta import (
    DeltaLimits,
    DeltaSync,
    Stamp,
    apply_patch,
    encode_patch,
    join_patches,
    patch_bytes,
    split_patches,
    stamp_problem,
    stamped,
)
from grpo_megatron.sync.exchange import Envelope, Pool
from grpo_megatron.sync.plan import NETWORK, NODE
from tests.sync import simulation
from tests.sync.simulation import World, architecture

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LEARNING_RATES = (1e-7, 3e-7, 1e-6, 1e-5, 1e-4)


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


# -- one patch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_patch_restores_the_bits_in_the_fewest_bytes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts, patches = [], []
    for numel in (1, 7, 8, 9, 1000):
        for share in (0.0, 0.01, 0.03, 0.04, 0.5, 1.0):
            old = torch.randn(numel, generator=generator).to(dtype)
            new = old.clone()
            changed = torch.randperm(numel, generator=generator)[: math.ceil(share * numel)]
            new[changed] = torch.randn(len(changed), generator=generator).to(dtype)
            new[changed[:1]], new[changed[1:2]] = math.nan, -old[changed[1:2]]
            patch = encode_patch(new, old)
            size = min(-(-numel // 8), 4 * patch.count) + dtype.itemsize * patch.count
            assert len(join_patches([patch])) == patch_bytes(numel, patch.count, dtype.itemsize) == size
            parts.append((old, new))
            patches.append(patch)
    sizes = [(len(new), patch.count) for (_, new), patch in zip(parts, patches, strict=True)]
    for patch, (old, new) in zip(split_patches(join_patches(patches), sizes, dtype), parts, strict=True):
        apply_patch(patch, old)
        assert same_bits(old, new)


def test_the_sign_of_zero_and_the_bits_of_nan_are_changes() -> None:
    old = torch.tensor([0.0, math.nan, 1.0]).bfloat16()
    new = torch.tensor([-0.0, math.nan, 1.0]).bfloat16()
    assert encode_patch(new, old).count == 1
    new.view(torch.int16)[1] += 1  # another NaN
    assert encode_patch(new, old).count == 2


# -- many syncs --------------------------------------------------------------------------------------------------------


class Training:
    """Adam on float32 weights of the size of a trained model's; the ranks hold their bfloat16 copies."""

    def __init__(self, world: DeltaWorld) -> None:
        self._world, self._generator = world.world, torch.Generator().manual_seed(1)
        self._main = {n: (0.02 * t.float()).requires_grad_() for n, t in self._world.whole.items()}
        self._drift = {n: torch.randn(t.shape, generator=self._generator) for n, t in self._main.items()}
        self.optimizer = torch.optim.AdamW(self._main.values(), weight_decay=0.01)
        self._copy()

    def step(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        for name, weight in self._main.items():
            weight.grad = self._drift[name] + 3 * torch.randn(weight.shape, generator=self._generator)
        self.optimizer.step()
        self._copy()

    def _copy(self) -> None:
        self._world.whole.update((n, t.detach().bfloat16()) for n, t in self._main.items())


def small_world(budget: int = 1 << 17, **settings: Any) -> DeltaWorld:
    """PP2 x TP2 to rollout TP2 on nodes of two ranks: parts cross the border and are passed on within the node."""
    grid = Grid(4, tp=2, pp=2, rollout_tp=2, ranks_per_node=2)
    return DeltaWorld(simulation.world(architecture("qwen2", **TINY), grid, [1, 1], budget=budget), **settings)


def assert_exact(world: DeltaWorld, handed: list[dict[str, Tensor]]) -> None:
    for rank, tensors in enumerate(handed):
        assert tensors.keys() == world.world.whole.keys()
        expected = dict(world.read_parts(rank, world.world.whole))
        for name, part in world.read_parts(rank, tensors):
            assert same_bits(part, expected[name]), (rank, name)


def bytes_bound(world: DeltaWorld, rank: int, before: dict[str, Tensor]) -> int:
    """Of what a rank may receive, counted in the whole tensors."""
    plan, total, peers = world.plans[rank], 0, set()
    for current in plan.rounds:
        for phase in (NETWORK, NODE):
            for peer, message in current.receives[phase].items():
                total += 48 * (1 + ((phase, peer) not in peers))  # its own stamp, and once that of the counts
                peers.add((phase, peer))
                for number in message.parts:
                    part = plan.plan.parts[number]
                    tensor = plan.tensor(part.tensor)
                    new, old = (
                        t[tensor.name].narrow(tensor.axis, part.start, part.stop - part.start).reshape(-1)
                        for t in (world.world.whole, before)
                    )
                    changes = int((new.view(torch.int16) != old.view(torch.int16)).sum())
                    total += min(math.ceil(len(new) / 8), 4 * changes) + 2 * changes + 8
    return total


@pytest.mark.slow
def test_300_steps_are_lossless_within_the_bound_of_bytes(record_property: Any) -> None:
    """One sync after each step, 60 at each learning rate. Measured densities: 0.002, 0.006, 0.016, 0.1, 0.5."""
    world = small_world()
    training = Training(world)
    assert_exact(world, world.sync(0))
    assert all(sync.is_full for sync in world.syncs)
    full_bytes = [sync.bytes_received for sync in world.syncs]
    densities: dict[float, list[float]] = {}
    for step, lr in enumerate((lr for lr in LEARNING_RATES for _ in range(60)), 1):
        before = dict(world.world.whole)
        training.step(lr)
        assert_exact(world, world.sync(step))
        assert not any(sync.is_full for sync in world.syncs)
        densities.setdefault(lr, []).append(world.syncs[0].density or 0.0)
        if step % 25 == 1:
            for rank, sync in enumerate(world.syncs):
                assert 0 < sync.bytes_received <= bytes_bound(world, rank, before)
                assert lr > 3e-7 or sync.bytes_received < 0.2 * full_bytes[rank]
    means = {lr: sum(values) / len(values) for lr, values in densities.items()}
    record_property("mean densities", means)
    assert 0.0005 < means[1e-7] < means[3e-7] < means[1e-6] < 0.05
    assert 0.05 < means[1e-5] < means[1e-4]


LAYOUTS = [  # family, layout, layers of each stage, rollout ep
    ("llama-tied", Grid(8, tp=2, pp=2, rollout_tp=4, ranks_per_node=4), [3, 1], 1),
    ("qwen3", Grid(8, tp=8, rollout_tp=2, ranks_per_node=2), [4], 1),
    ("qwen3-moe", Grid(8, tp=1, pp=4, ep=2, rollout_tp=4, ranks_per_node=8), [2, 1, 0, 1], 1),
    ("qwen3-moe", Grid(4, tp=2, pp=2, rollout_tp=4, ranks_per_node=2), [2, 2], 4),
    ("mixtral", Grid(8, tp=2, pp=2, ep=2, rollout_tp=8, ranks_per_node=4), [2, 2], 1),
    ("llama", Grid(4, tp=2, rollout_tp=2, ranks_per_node=4), [4], 1),  # nothing moves
]


@pytest.mark.parametrize(("family", "grid", "sizes", "rollout_ep"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_layouts_are_lossless(
    family: str, grid: Grid, sizes: list[int], rollout_ep: int, dtype: torch.dtype
) -> None:
    simulated = simulation.world(architecture(family), grid, sizes, budget=1 << 16, dtype=dtype, rollout_ep=rollout_ep)
    world = DeltaWorld(simulated)
    for version, share in enumerate((0.0, 0.01, 0.5, 0.0, 0.04)):
        change(world, share)
        assert_exact(world, world.sync(version))
        assert [sync.is_full for sync in world.syncs] == [version == 0] * grid.world_size


def change(world: DeltaWorld, share: float) -> None:
    """Other bits in about this share of the elements."""
    generator = torch.Generator().manual_seed(world.number + 2)
    for name, tensor in world.world.whole.items():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        world.world.whole[name] = torch.where(chosen, -1.5 * tensor, tensor)


# -- full syncs --------------------------------------------------------------------------------------------------------


def test_a_sync_is_full_above_the_density_and_every_so_many() -> None:
    world = small_world(max_density=0.1, full_every=4)
    modes = []
    for version, share in enumerate((0, 0.05, 0.2, 0.05, 0.05, 0.05, 0.05, 0.05)):
        change(world, share)
        assert_exact(world, world.sync(version))
        modes.append({sync.is_full for sync in world.syncs})
    # first; sparse; dense, so it counts as the first; three sparse ones; the fourth since then
    assert modes == [{True}, {False}, {True}, {False}, {False}, {False}, {True}, {False}]


def test_a_sync_after_one_that_was_not_accepted_is_full() -> None:
    world = small_world()
    world.sync(0)
    world.sync(1, accepted=False)
    assert not world.syncs[0].is_full
    change(world, 0.01)
    assert_exact(world, world.sync(2))
    assert {sync.is_full for sync in world.syncs} == {True}
    world.syncs[3]._is_accepted = False  # one rank is enough
    assert_exact(world, world.sync(3))
    assert {sync.is_full for sync in world.syncs} == {True}
    world.sync(4)
    assert {sync.is_full for sync in world.syncs} == {False}


# -- patches that must be refused --------------------------------------------------------------------------------------


def reordered(target: tuple[int, ...], history: dict[tuple[int, ...], Tensor]) -> Fault:
    kept: list[Tensor] = []

    def fault(key: tuple[int, ...], message: Tensor) -> list[Tensor]:
        if key == target:
            kept.append(message)
            return []
        return [message, kept.pop()] if kept and key[1:3] == target[1:3] else [message]

    return fault


def flipped(bit: int, message: Tensor) -> list[Tensor]:
    message[bit // 8 % len(message)] ^= 1 << bit % 8
    return [message]


def at(target: tuple[int, ...], change: Callable[[Tensor], list[Tensor]]) -> Fault:
    """What is sent in the place of one message."""
    return lambda key, message: change(message) if key == target else [message]


# stamp: base, version, sequence, place, source, checksum; then the body, from both ends
FAULTS: dict[str, Callable[[tuple[int, ...], dict[tuple[int, ...], Tensor]], Fault]] = {
    "lost": lambda target, history: at(target, lambda message: []),
    "repeated": lambda target, history: at(target, lambda message: [message, message]),
    "repeated later": lambda target, history: at(target, lambda message: [history[(target[0] - 1, *target[1:])]]),
    "reordered": reordered,
    **{
        f"bit {bit}": lambda target, history, bit=bit: at(target, functools.partial(flipped, bit))  # type: ignore[misc]
        for bit in (0, 65, 130, 200, 260, 321, 8 * 48, -1)
    },
}


@pytest.mark.parametrize("place", [0, 1], ids=["counts", "patches"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_patch_is_refused_and_the_next_sync_is_full(name: str, place: int) -> None:
    """From rank 0 to rank 2, over the border of the nodes: the counts, or the patches of the first round."""
    world = small_world(budget=1 << 14)
    assert world.world.rounds.count > 2
    history: dict[tuple[int, ...], Tensor] = {}

    def record(key: tuple[int, ...], message: Tensor) -> list[Tensor]:
        history[key] = message.clone()
        return [message]

    world.fault = record
    for version in range(2):
        change(world, 0.02)
        world.sync(version)
    messages = [history[key] for key in sorted(history) if key[:3] == (1, 0, 2)]
    assert len(messages) >= 3 and len(messages[1]) > 48 + 8, "the route from rank 0 to rank 2 is in use"
    change(world, 0.02)
    world.patience_s = 0.5  # of messages that never come
    seen, fault = [], FAULTS[name]((2, 0, 2, place), history)

    def watched(key: tuple[int, ...], message: Tensor) -> list[Tensor]:
        seen.append(key)
        return fault(key, message)

    world.fault = watched
    handed, errors = world.attempt(2)
    assert len(errors) == 4 and all(isinstance(error, RankError) for error in errors), errors
    assert "rank 2: a patch from rank 0 was refused and not applied" in str(errors[0])
    assert handed == [{}, {}, {}, {}], "nothing reaches an engine"
    if place == 0 and name != "repeated":  # the counts are wrong, so sizes are unknown: no patch is sent
        assert (2, 0, 2, 1) not in seen
    world.patience_s, world.fault = HANG_S, lambda _, message: [message]
    assert_exact(world, world.sync(3))
    assert {sync.is_full for sync in world.syncs} == {True}
    change(world, 0.02)
    assert_exact(world, world.sync(4))
    assert {sync.is_full for sync in world.syncs} == {False}


@pytest.mark.parametrize("field", ["base", "version", "sequence", "place", "source"])
def test_every_field_of_the_stamp_counts(field: str) -> None:
    """Messages of equal bytes differ in nothing else."""
    stamp, body = Stamp(-5, 7, 3, -1, 2), torch.arange(10, dtype=torch.uint8)
    assert stamp_problem(stamped(body, stamp), stamp) is None
    problem = stamp_problem(stamped(body, stamp), stamp._replace(**{field: 11}))
    assert problem is not None and problem.count("expected") == 1 and "checksum" not in problem


def test_a_patch_of_another_history_names_ranks_and_numbers() -> None:
    """Rank 2 has missed a sync: what it holds is not what the patches build on."""
    world = small_world()
    world.sync(0)
    old = world.syncs[2]._digest
    world.sync(1)
    world.syncs[2]._digest, world.syncs[2]._sequence = old, 1
    with pytest.raises(RankError) as caught:
        world.sync(2)
    text = str(caught.value)
    assert re.search(r"rank 2: a patch from rank \d was refused and not applied: base -?0x[0-9a-f]+, expected", text)
    assert "sequence 3, expected 2" in text
    assert re.search(r"rank [013].*: a patch from rank 2 was refused", text)
    assert_exact(world, world.sync(3))


# -- the config --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "rollout.sync=delta with rollout.engine_options.sleep_level=2 (the default): level 2 drops the weights"),
        ({"engine_options": {"sleep_level": 1}, "quantization": "mxfp8"}, "rollout.sync=delta with rollout.quant"),
        (
            {"engine": "tests.rollout.toy_engine:ToyEngine", "engine_options": {"journal": "x"}},
            "rollout.sync=delta with rollout.engine='tests.rollout.toy_engine:ToyEngine'",
        ),
    ],
)
def test_a_delta_without_a_base_is_refused(settings: dict[str, Any], expected: str) -> None:
    assert list(engine_problems(RolloutConfig(**settings))) == []
    [problem] = engine_problems(RolloutConfig(sync="delta", **settings))
    assert problem.startswith(expected) and "set rollout." in problem and "rollout.sync=full" in problem


def test_a_delta_is_allowed_where_the_engine_keeps_its_weights() -> None:
    for settings in ({"engine_options": {"sleep_level": 1}}, {"free_cache_engine": False}):
        assert list(engine_problems(RolloutConfig(sync="delta", **settings))) == []


# -- many ranks with delta syncs in one process ------------------------------------------------------------------------


HANG_S = 120.0
# (sync, source, target, number of the message between them) and the message -> what is sent in its place
Fault = Callable[[tuple[int, int, int, int], Tensor], list[Tensor]]


class Crossing:
    """Where all ranks meet: the collectives of a Mesh."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=HANG_S)
        self._values: list[Any] = [None] * size

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self.barrier.wait()
        values = list(self._values)
        self.barrier.wait()
        return values


class SimulatedRanks:
    def __init__(self, crossing: Crossing, rank: int) -> None:
        self._crossing, self._rank = crossing, rank

    def agree(self, problem: str | None) -> None:
        problems = self._crossing.all_gather(self._rank, problem)
        if any(problems):
            raise RankError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text))

    def total(self, values: list[int]) -> list[int]:
        return [sum(column) for column in zip(*self._crossing.all_gather(self._rank, values), strict=True)]


class FaultyQueues:
    """The transport of one rank. A receiver takes as many bytes as it expects, of whatever comes."""

    def __init__(self, world: DeltaWorld, rank: int) -> None:
        self._world, self._rank = world, rank
        self._number: dict[int, int] = {}

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Callable[[], None]:
        for peer, buffer in sends:
            number = self._number[peer] = self._number.get(peer, -1) + 1
            for message in self._world.fault((self._world.number, self._rank, peer, number), buffer.clone()):
                self._world.queues[self._rank, peer].put(message)

        def wait() -> None:
            for peer, buffer in receives:
                try:
                    message = self._world.queues[peer, self._rank].get(timeout=self._world.patience_s)
                except queue.Empty:  # the connection's time-out; what was lost leaves zeros
                    message = torch.zeros(0, dtype=buffer.dtype)
                size = min(len(buffer), len(message))
                buffer[:size], buffer[size:] = message[:size], 0

        return wait

    def begin(self) -> None:
        self._number.clear()


class DeltaWorld:
    """The ranks of a `World` over many syncs. `fault` sees every message, `number` is that of the current sync."""

    def __init__(self, world: World, *, max_density: float = 1.0, full_every: int = 1 << 30) -> None:
        size = world.grid.world_size
        self.world, self.number, self.patience_s = world, -1, HANG_S
        self.fault: Fault = lambda _, message: [message]
        self.queues: dict[tuple[int, int], queue.Queue[Tensor]] = {
            (a, b): queue.Queue() for a in range(size) for b in range(size)
        }
        self.plans = [world.rank_plan(rank) for rank in range(size)]
        self._transports = [FaultyQueues(self, rank) for rank in range(size)]
        self._crossing = Crossing(size)
        self.dtype = next(iter(world.whole.values())).dtype
        self.syncs = [
            DeltaSync(
                self.plans[rank],
                self._transports[rank].post,
                SimulatedRanks(self._crossing, rank),
                pool=Pool(self.dtype, torch.device("cpu")),
                limits=DeltaLimits(full_every, max_density),
            )
            for rank in range(size)
        ]

    def sync(self, version: int, *, accepted: bool = True) -> list[dict[str, Tensor]]:
        """What every rank's engine is handed. Raises the error of the first rank."""
        handed, errors = self.attempt(version)
        if errors:
            raise errors[0]
        if accepted:
            for sync in self.syncs:
                sync.accept(f"digest of {version}")
        return handed

    def attempt(self, version: int) -> tuple[list[dict[str, Tensor]], list[BaseException]]:
        """The same, and the ranks' errors."""
        self.number += 1
        size = self.world.grid.world_size
        handed: list[dict[str, Tensor]] = [{} for _ in range(size)]

        def rank_main(rank: int) -> None:
            try:
                self._transports[rank].begin()
                for bucket in self.syncs[rank].stream(self.world.shard(rank).__getitem__, version):
                    handed[rank].update((name, tensor.clone()) for name, tensor in bucket)
            except RankError:
                raise
            except BaseException:
                self._crossing.barrier.abort()
                raise

        errors = simulation.on_threads(size, rank_main)
        errors.sort(key=lambda error: isinstance(error, RankError))
        for waiting in self.queues.values():  # of a sync that failed
            waiting.queue.clear()
        return handed, errors

    def read_parts(self, rank: int, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, the part that the rank's engine reads) of full-shaped tensors."""
        for tensor in self.world.plan.tensors:
            start, stop = self.world.plan.spans[tensor.name][self.world.grid.engine_rank(rank)]
            yield tensor.name, tensors[tensor.name].narrow(tensor.axis, start, stop - start)
