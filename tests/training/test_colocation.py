"""Device memory beside an engine: connections exist before it is judged, and what stays after a sleep does not grow unseen."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_megatron.config import Config
from grpo_megatron.device import DeviceMemory
from grpo_megatron.planning.phases import GIB, Phase
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.training import colocation
from grpo_megatron.training.device_memory import DeviceWatch


def test_connections_exist_before_free_memory_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's buffers of the weight sync are gigabytes: allocated later, they would come out of the engine's promise."""
    events: list[str | None] = []
    device = SimpleNamespace(empty_cache=lambda: None, memory=lambda: events.append("memory is judged"), is_cuda=False)
    offload, onload = (partial(events.append, word) for word in ("offload", "onload"))
    mesh = SimpleNamespace(rank=1, world_size=1, agree=lambda problem: None)
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


class Gpu:
    """80 GiB: torch's reserved memory, its tensors, and the rest of what is taken."""

    def __init__(self) -> None:
        self.reserved, self.allocated, self.rest = 20.0, 18.0, 3.0
        self.problems: list[str] = []

    def read(self) -> DeviceMemory:
        free = 80 - self.reserved - self.rest
        return DeviceMemory(*(int(size * GIB) for size in (free, 80, self.reserved, self.allocated)))

    def agree(self, problem: str | None) -> None:
        if problem is not None:
            raise MemoryError(problem)

    def rollout(self, watch: DeviceWatch, *, engine: float = 40.0, leaks: float = 0.0, cached: float = 0.0) -> Any:
        """The engine takes and frees `engine` GiB outside torch's numbers, torch `cached`, and `leaks` GiB stay."""
        metrics = Metrics()
        watch.require_rollout()
        self.rest, self.reserved = self.rest + engine, self.reserved + cached
        with watch.sleeping(metrics):
            self.rest, self.reserved = self.rest + leaks - engine, self.reserved - cached
        return metrics.reduce()["perf/device_memory_asleep_gb"]


PHASES = [
    Phase("start", 0, {"weights": 16 * GIB}, 0.5),
    Phase("rollout", 0, {"weights": 16 * GIB, "CUDA context": GIB / 2}, 0.5),
    Phase("scoring", 0, {"weights": 16 * GIB, "gradients": 8 * GIB, "layer or logits": 50 * GIB}),
    Phase(
        "update", 0, {"weights": 16 * GIB, "gradients": 8 * GIB, "optimizer": 40 * GIB, "activations kept": 30 * GIB}
    ),
]


def test_what_stays_after_a_sleep_is_compared_with_the_first(caplog: pytest.LogCaptureFixture) -> None:
    """A warning per further GiB, then an error before the phase. 57 GiB are free at first, and the update takes 48 more."""
    gpu = Gpu()
    mesh: Any = SimpleNamespace(rank=3, agree=gpu.agree)
    watch = DeviceWatch(mesh, gpu.read, PHASES)
    assert [gpu.rollout(watch, leaks=leaks) for leaks in (4.0, 0.9)] == pytest.approx(
        [27.0, 27.9]
    )  # the first sleep is the measure
    assert not caplog.records
    gpu.reserved, gpu.allocated = 20.5, 18.25
    assert [gpu.rollout(watch, leaks=leaks) for leaks in (0.1, 0.2)] == pytest.approx([28.5, 28.7])
    [record] = caplog.records
    assert "rank 3, engine asleep: +1.50 GiB more than at the first sleep" in record.getMessage()
    assert "caching allocator has +0.50 (its tensors +0.25) of them" in record.getMessage()
    assert "other processes +1.00; start the run again" in record.getMessage()
    with pytest.raises(MemoryError) as error:
        gpu.rollout(watch, leaks=5.0)
    assert len(caplog.records) == 2
    words = "phase update does not fit: 46.30 of 80.00 GiB are free, and it needs 48.00 GiB more (gradients 8.00 + optimizer"
    assert words + " 40.00, as planned); +6.70 GiB more than" in str(error.value)


def test_a_rollout_needs_what_the_last_sleep_has_freed() -> None:
    gpu = Gpu()
    mesh: Any = SimpleNamespace(rank=0, agree=gpu.agree)
    watch = DeviceWatch(mesh, gpu.read)
    gpu.rollout(watch, cached=15.0)  # torch frees them, too, but a rollout does not need them
    gpu.rest += 17.5  # 39.5 are free
    with pytest.raises(
        MemoryError, match=r"phase rollout does not fit: 39.50 of 80.00 .* needs 40.00 GiB, which the last"
    ):
        gpu.rollout(watch)
    idle = DeviceWatch(mesh, lambda: None, PHASES)  # on the CPU, or an engine that never sleeps
    with idle.sleeping(metrics := Metrics()):
        idle.require_rollout()
    assert metrics.reduce() == {}
