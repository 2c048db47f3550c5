"""Every generator of a rank is seeded from trainer.seed: torch's alike on all ranks, Python's and numpy's by rank."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_megatron import trainer
from grpo_megatron.config import Config
from grpo_megatron.device import Device


def draws(seed: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One number of each generator after rank `rank` has joined the world."""
    monkeypatch.setattr(trainer, "build_mesh", lambda *args, **kwargs: SimpleNamespace(rank=rank))
    config = Config.model_validate({"model": {"path": "m"}, "trainer": {"seed": seed}})
    device = Device("cpu")
    with device.preserve_rng():
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        assert trainer.join_world(config, device).rank == rank
        return [torch.rand(()).item(), random.random(), np.random.random()]


def test_generators_depend_on_seed_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {(seed, rank): draws(seed, rank, monkeypatch) for seed in (1, 2, 2**63 - 1) for rank in (0, 1)}
    assert draws(2, 1, monkeypatch) == table[2, 1]
    of_torch, of_python, of_numpy = (set(column) for column in zip(*table.values(), strict=True))
    assert (len(of_torch), len(of_python), len(of_numpy)) == (3, 6, 6)
