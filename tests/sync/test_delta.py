"""Delta syncs are exact over hundreds of Adam steps, fall back to full ones, and refuse every patch that is not the next.

Sizes: a part of n elements with c changes takes min(n / 8, 4 c) + b c bytes, where b is the size of an element. A message
has a stamp of 48 bytes, and 8 bytes per part are sent ahead.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_megatron.parallel.grid import Grid
from grpo_megatron.sync.delta import apply_patch, encode_patch, join_patches, patch_bytes, split_patches
from grpo_megatron.sync.plan import NETWORK, NODE
from tests.sync import simulation
from tests.sync.architectures import architecture
from tests.sync.delta_simulation import DeltaWorld

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

    def __init__(self, world: DeltaWorld, lr: float) -> None:
        self._world, self._generator = world.world, torch.Generator().manual_seed(1)
        self._main = {n: (0.02 * t.float()).requires_grad_() for n, t in self._world.whole.items()}
        self._drift = {n: torch.randn(t.shape, generator=self._generator) for n, t in self._main.items()}
        self.optimizer = torch.optim.AdamW(self._main.values(), lr=lr, weight_decay=0.01)
        self._copy()

    def step(self) -> None:
        for name, weight in self._main.items():
            weight.grad = self._drift[name] + 3 * torch.randn(weight.shape, generator=self._generator)
        self.optimizer.step()
        self._copy()

    def _copy(self) -> None:
        self._world.whole.update((n, t.detach().bfloat16()) for n, t in self._main.items())


def small_world(**settings: Any) -> DeltaWorld:
    """PP2 x TP2 to rollout TP2 on nodes of two ranks: parts cross the border and are passed on within the node."""
    grid = Grid(4, tp=2, pp=2, rollout_tp=2, ranks_per_node=2)
    return DeltaWorld(simulation.world(architecture("qwen2", **TINY), grid, [1, 1], budget=1 << 15), **settings)


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


@pytest.mark.parametrize("lr", LEARNING_RATES)
def test_300_steps_are_lossless_within_the_bound_of_bytes(lr: float, record_property: Any) -> None:
    world = small_world()
    training, densities = Training(world, lr), []
    assert_exact(world, world.sync(0))
    assert all(sync.is_full for sync in world.syncs)
    full_bytes = [sync.bytes_received for sync in world.syncs]
    for step in range(1, 301):
        before = dict(world.world.whole)
        training.step()
        assert_exact(world, world.sync(step))
        assert not any(sync.is_full for sync in world.syncs)
        densities.append(world.syncs[0].density)
        if step % 50 == 1:
            for rank, sync in enumerate(world.syncs):
                assert 0 < sync.bytes_received <= bytes_bound(world, rank, before)
                assert lr > 3e-7 or sync.bytes_received < 0.2 * full_bytes[rank]
    record_property("density", sum(densities) / len(densities))
    print(f"lr {lr:g}: density {sum(densities) / len(densities):.4f}, at most {max(densities):.4f}")
    assert lr > 3e-7 or 0 < max(densities) < 0.05
    assert lr < 1e-4 or min(densities) > 0.1
