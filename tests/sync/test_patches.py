"""Patches are exact over hundreds of Adam steps, fall back to full syncs, and are refused if they are not the next.

Sizes: a slice of n elements with c changes takes min(n / 8, 4 c) + b c bytes, where b is the size of an element. A message
has a header of 48 bytes, and 8 bytes per slice are sent ahead.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_megatron.config import RolloutConfig
from grpo_megatron.parallel.mesh import Grid, RankError
from grpo_megatron.rollout.build import engine_problems
from grpo_megatron.sync.patches import (
    Header,
    apply_patch,
    encode_patch,
    header_problem,
    join_patches,
    patch_bytes,
    split_patches,
    with_header,
)
from grpo_megatron.sync.plan import NETWORK, NODE
from grpo_megatron.sync.weight_sync import DeltaLimits, PatchCodec
from tests.sync import simulation
from tests.sync.simulation import HANG_S, Fault, Given, Ranks, architecture, same_bits

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LEARNING_RATES = (1e-7, 3e-7, 1e-6, 1e-5, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_patch_restores_the_bits_in_the_fewest_bytes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    slices, patches = [], []
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
            slices.append((old, new))
            patches.append(patch)
    sizes = [(len(new), patch.count) for (_, new), patch in zip(slices, patches, strict=True)]
    for patch, (old, new) in zip(split_patches(join_patches(patches), sizes, dtype), slices, strict=True):
        apply_patch(patch, old)
        assert same_bits(old, new)


def test_the_sign_of_zero_and_the_bits_of_nan_are_changes() -> None:
    old = torch.tensor([0.0, math.nan, 1.0]).bfloat16()
    new = torch.tensor([-0.0, math.nan, 1.0]).bfloat16()
    assert encode_patch(new, old).count == 1
    new.view(torch.int16)[1] += 1  # another NaN
    assert encode_patch(new, old).count == 2


# -- many syncs --------------------------------------------------------------------------------------------------------


def patching(
    of: simulation.World, max_density: float = 1.0, full_every: int = 1 << 30, *, is_staged: bool = False
) -> Ranks:
    return Ranks(of, functools.partial(PatchCodec, limits=DeltaLimits(full_every, max_density)), is_staged=is_staged)


def small_ranks(budget: int = 1 << 17, **limits: Any) -> Ranks:
    """PP2 x TP2 to rollout TP2 on nodes of two ranks: slices cross the border and are passed on within the node."""
    grid = Grid(4, tp=2, pp=2, rollout_tp=2, ranks_per_node=2)
    return patching(simulation.world(architecture("qwen2", **TINY), grid, [1, 1], budget=budget), **limits)


def change(ranks: Ranks, share: float) -> None:
    """Other bits in about this share of the elements."""
    generator = torch.Generator().manual_seed(ranks.number + 2)
    for name, tensor in ranks.world.weights.items():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        ranks.world.weights[name] = torch.where(chosen, -1.5 * tensor, tensor)


def assert_exact(ranks: Ranks, given: Given) -> None:
    world = ranks.world
    for rank in range(world.grid.first_rollout_rank, world.grid.world_size):
        assert given[rank].keys() == world.weights.keys()
        for name, complete in world.weights.items():
            span = world.span(name, rank)
            assert same_bits(given[rank][name].narrow(*span), complete.narrow(*span)), (rank, name)


def bytes_bound(ranks: Ranks, rank: int, before: dict[str, Tensor]) -> int:
    """What a rank may receive, counted in the complete tensors."""
    plan, total, peers = ranks.world.rank_plan(rank), 0, set()
    for current in plan.rounds:
        for phase in (NETWORK, NODE):
            for message in current.receives[phase]:
                total += 48 * (1 + ((phase, message.peer) not in peers))  # its header, and once that of the counts
                peers.add((phase, message.peer))
                for index, start, stop, *_ in (plan.plan.slices[number] for number in message.numbers):
                    tensor = plan.tensor(index)
                    sides = (weights[tensor.name] for weights in (ranks.world.weights, before))
                    new, old = (t.narrow(tensor.axis, start, stop - start).reshape(-1) for t in sides)
                    changes = int((new.view(torch.int16) != old.view(torch.int16)).sum())
                    total += min(math.ceil(len(new) / 8), 4 * changes) + 2 * changes + 8
    return total


@pytest.mark.slow
def test_100_steps_are_lossless_within_the_bound_of_bytes(record_property: Any) -> None:
    """One sync after each step, 20 at each learning rate. Measured densities: 0.002, 0.006, 0.016, 0.1, 0.5."""
    ranks, generator = small_ranks(), torch.Generator().manual_seed(1)
    main = {n: (0.02 * t.float()).requires_grad_() for n, t in ranks.world.weights.items()}  # the size of trained ones
    drift = {n: torch.randn(t.shape, generator=generator) for n, t in main.items()}
    optimizer = torch.optim.AdamW(main.values(), weight_decay=0.01)

    def train(lr: float) -> None:
        optimizer.param_groups[0]["lr"] = lr
        for name, weight in main.items():
            weight.grad = drift[name] + 3 * torch.randn(weight.shape, generator=generator)
        optimizer.step()
        ranks.world.weights.update((n, t.detach().bfloat16()) for n, t in main.items())

    train(0.0)
    assert_exact(ranks, ranks.sync(0))
    assert ranks.headers[-1].is_full
    full_bytes = ranks.bytes_received()
    densities: dict[float, list[float]] = {}
    for step, lr in enumerate((lr for lr in LEARNING_RATES for _ in range(20)), 1):
        before = dict(ranks.world.weights)
        train(lr)
        assert_exact(ranks, ranks.sync(step))
        assert not ranks.headers[-1].is_full
        densities.setdefault(lr, []).append(ranks.headers[-1].density or 0.0)
        for rank, received in enumerate(ranks.bytes_received() if step % 25 == 1 else ()):
            assert 0 < received <= bytes_bound(ranks, rank, before)
            assert lr > 3e-7 or received < 0.2 * full_bytes[rank]
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
    ("qwen2", Grid(8, tp=2, pp=2, rollout_tp=2, ranks_per_node=2, num_rollout_ranks=4), [2, 2], 1),  # two roles, relays
    ("qwen3-moe", Grid(4, tp=2, rollout_tp=1, ranks_per_node=4, num_rollout_ranks=2), [4], 1),
]


@pytest.mark.parametrize(
    ("family", "grid", "sizes", "rollout_ep", "dtype"),
    [(*layout, (torch.bfloat16, torch.float32)[number % 2]) for number, layout in enumerate(LAYOUTS)],
)
def test_other_layouts_are_lossless(
    family: str, grid: Grid, sizes: list[int], rollout_ep: int, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"budget": 1 << 16, "dtype": dtype, "rollout_ep": rollout_ep}
    ranks = patching(simulation.world(architecture(family), grid, sizes, **options), is_staged=dtype == torch.float32)
    for version, share in enumerate((0.0, 0.01, 0.5, 0.0, 0.04)):
        change(ranks, share)
        assert_exact(ranks, ranks.sync(version))
        assert ranks.headers[-1].is_full == (version == 0)


def test_a_sync_is_full_above_the_density_and_every_so_many() -> None:
    ranks = small_ranks(max_density=0.1, full_every=4)
    for version, share in enumerate((0, 0.05, 0.2, 0.05, 0.05, 0.05, 0.05, 0.05)):
        change(ranks, share)
        assert_exact(ranks, ranks.sync(version))
    # first; sparse; dense, so it counts as the first; three sparse ones; the fourth since then
    assert [h.is_full for h in ranks.headers] == [True, False, True, False, False, False, True, False]
    assert [h.density is None for h in ranks.headers] == [True, False, False, False, False, False, True, False]


def test_a_sync_after_one_that_was_not_accepted_is_full() -> None:
    ranks = small_ranks()
    ranks.sync(0)
    ranks.sync(1, accept=False)
    change(ranks, 0.01)
    assert_exact(ranks, ranks.sync(2))
    ranks.accepted = [True, True, True, False]  # one rank is enough
    assert_exact(ranks, ranks.sync(3))
    ranks.sync(4)
    assert [header.is_full for header in ranks.headers] == [True, False, True, True, False]


# -- patches that must be refused --------------------------------------------------------------------------------------

Key = tuple[int, ...]


def reordered(target: Key, history: dict[Key, Tensor]) -> Fault:
    late: list[Tensor] = []

    def fault(key: Key, message: Tensor) -> list[Tensor]:
        if key == target:
            late.append(message)
            return []
        return [message, late.pop()] if late and key[1:3] == target[1:3] else [message]

    return fault


def flipped(bit: int, message: Tensor) -> list[Tensor]:
    message[bit // 8 % len(message)] ^= 1 << bit % 8
    return [message]


def at(target: Key, change: Callable[[Tensor], list[Tensor]]) -> Fault:
    """What is sent in the place of one message."""
    return lambda key, message: change(message) if key == target else [message]


# header: base, version, sequence, place, source, checksum; then the body, from both ends
FAULTS: dict[str, Callable[[Key, dict[Key, Tensor]], Fault]] = {
    "lost": lambda target, history: at(target, lambda message: []),
    "repeated": lambda target, history: at(target, lambda message: [message, message]),
    "repeated later": lambda target, history: at(target, lambda message: [history[(target[0] - 1, *target[1:])]]),
    "reordered": reordered,
    **{
        f"bit {bit}": lambda target, history, bit=bit: at(target, functools.partial(flipped, bit))  # type: ignore[misc]
        for bit in (0, 65, 130, 200, 260, 321, 8 * 48, -1)
    },
}


@pytest.mark.parametrize(("name", "place"), [(name, number % 2) for number, name in enumerate(FAULTS)])
def test_a_wrong_patch_is_refused_and_the_next_sync_is_full(name: str, place: int) -> None:
    """From rank 0 to rank 2, over the border of the nodes: the counts, or the patches of the first round."""
    ranks = small_ranks(budget=1 << 14)
    assert ranks.world.rounds.count > 2
    history: dict[Key, Tensor] = {}
    seen: list[Key] = []

    def record(key: Key, message: Tensor) -> list[Tensor]:
        history[key] = message.clone()
        return [message]

    ranks.fault = record
    for version in range(2):
        change(ranks, 0.02)
        ranks.sync(version)
    messages = [history[key] for key in sorted(history) if key[:3] == (1, 0, 2)]
    assert len(messages) >= 3 and len(messages[1]) > 48 + 8, "the route from rank 0 to rank 2 is in use"
    change(ranks, 0.02)
    ranks.patience_s = 0.5  # of messages that never come
    fault = FAULTS[name]((2, 0, 2, place), history)

    def watched(key: tuple[int, int, int, int], message: Tensor) -> list[Tensor]:
        seen.append(key)
        return fault(key, message)

    ranks.fault = watched
    given, errors = ranks.attempt(2)
    assert len(errors) == 4 and all(isinstance(error, RankError) for error in errors), errors
    assert "rank 2: a patch from rank 0 was refused and not applied" in str(errors[0])
    assert given == [{}, {}, {}, {}], "nothing reaches an engine"
    if place == 0 and name != "repeated":  # the counts are wrong, so sizes are unknown: no patch is sent
        assert (2, 0, 2, 1) not in seen
    ranks.patience_s, ranks.fault = HANG_S, None
    assert_exact(ranks, ranks.sync(3))
    change(ranks, 0.02)
    assert_exact(ranks, ranks.sync(4))
    assert [header.is_full for header in ranks.headers] == [True, False, False, True, False]


@pytest.mark.parametrize("field", Header._fields)
def test_every_field_of_the_header_counts(field: str) -> None:
    """Messages of equal bytes differ in nothing else."""
    header, body = Header(-5, 7, 3, -1, 2), torch.arange(10, dtype=torch.uint8)
    assert header_problem(with_header(body, header), header) is None
    problem = header_problem(with_header(body, header), header._replace(**{field: 11}))
    assert problem is not None and problem.count("expected") == 1 and "checksum" not in problem


@pytest.mark.parametrize("has_roles", [False, True])
def test_a_patch_of_another_history_names_ranks_and_numbers(has_roles: bool) -> None:
    """Rank 2 has missed a sync: what it has is not what the patches build on."""
    ranks = small_ranks()
    if has_roles:
        grid = Grid(3, tp=2, rollout_tp=1, ranks_per_node=2, num_rollout_ranks=1)
        ranks = patching(simulation.world(architecture("qwen2", **TINY), grid, [2]), is_staged=True)  # senders go on
    codec: Any = ranks.codecs[2]
    ranks.sync(0)
    old = codec._history
    ranks.sync(1)
    codec._history, codec._sequence = old, 1
    with pytest.raises(RankError) as caught:
        ranks.sync(2)
    text = str(caught.value)
    assert re.search(r"a patch from rank \d was refused and not applied: base -?0x[0-9a-f]+, expected", text)
    assert "sequence 3, expected 2" in text
    if not has_roles:
        assert re.search(r"rank [013].*: a patch from rank 2 was refused", text)
        assert_exact(ranks, ranks.sync(3))


# -- the config --------------------------------------------------------------------------------------------------------

TOY = {"engine": "tests.rollout.toy_engine:ToyEngine", "engine_options": {"journal": "x"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "rollout.sync=delta with rollout.engine_options.sleep_level=2 (the default): level 2 drops the weights"),
    ({"engine_options": {"sleep_level": 1}, "quantization": "mxfp8"}, "rollout.sync=delta with rollout.quant"),
    (TOY, "rollout.sync=delta with rollout.engine='tests.rollout.toy_engine:ToyEngine'"),
]


def test_a_delta_is_refused_where_the_engine_does_not_keep_its_weights() -> None:
    for settings, expected in REFUSED:
        assert list(engine_problems(RolloutConfig(**settings))) == []
        [problem] = engine_problems(RolloutConfig(sync="delta", **settings))
        assert problem.startswith(expected) and "set rollout." in problem and "rollout.sync=full" in problem
    allowed: list[dict[str, Any]] = [{"engine_options": {"sleep_level": 1}}, {"free_cache_engine": False}]
    for settings in allowed:
        assert list(engine_problems(RolloutConfig(sync="delta", **settings))) == []
