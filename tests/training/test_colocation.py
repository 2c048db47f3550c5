"""Connections of the weight sync exist before free memory is judged."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_megatron.config import Config
from grpo_megatron.training import colocation


def test_connections_exist_before_free_memory_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's buffers of the weight sync are gigabytes: allocated later, they would come out of the engine's promise."""
    events: list[str | None] = []
    device = SimpleNamespace(empty_cache=lambda: None, memory=lambda: events.append("memory is judged"))
    offload, onload = (partial(events.append, word) for word in ("offload", "onload"))
    mesh = SimpleNamespace(rank=1, agree=lambda problem: None)
    policy: Any = SimpleNamespace(device=device, mesh=mesh, offload=offload, onload=onload)
    policy.arch, policy.stage_of = SimpleNamespace(vocab_size=8, vision=None), {}
    weight_sync = SimpleNamespace(connect=partial(events.append, "connections"))
    monkeypatch.setattr(colocation, "build_weight_sync", lambda *_: weight_sync)
    monkeypatch.setattr(colocation, "build_engine", lambda *_, **__: events.append("engine"))
    monkeypatch.setattr(colocation, "engine_tensors_of", lambda *_: None)
    monkeypatch.setattr(colocation, "Colocation", lambda *_, **__: None)
    checked: Any = SimpleNamespace(end_tokens=SimpleNamespace(ids=[1]), arch=None)
    colocation.build_colocation(Config.model_validate({"model": {"path": "x"}}), checked, policy)
    assert events == ["connections", "offload", "memory is judged", "engine", "onload"]
