"""Fit: every phase of a layout against the memory of a GPU, and the engine's cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from grpo_megatron.checks.engine_cache import EngineCache, engine_cache
from grpo_megatron.checks.memory import DTYPE_BYTES
from grpo_megatron.checks.phases import Phase, memory_phases
from grpo_megatron.config import Config
from grpo_megatron.planning.layout import Layout
from grpo_megatron.planning.models import PlannedModels

SHARE_STEP = 0.05  # by which the engine's share of the GPU is lowered
PROPOSED = 0.95  # share of the usable memory that a proposed layout may need: estimates miss, and memory fragments


@dataclass(frozen=True)
class Fit:
    """`cache` None: the run has no engine. `device`: bytes of one GPU. `length`: tokens of the largest sequence."""

    layout: Layout
    phases: list[Phase]
    cache: EngineCache | None
    device: float
    length: int

    @property
    def full_phases(self) -> list[Phase]:
        """Those that do not fit, estimates included."""
        return [phase for phase in self.phases if not phase.fits(self.device)]

    @property
    def has_cache(self) -> bool:
        """Whether the engine can hold one sequence of the largest length, without which it does not start."""
        return self.cache is None or self.cache.sequences(self.length) > 0

    @property
    def fits(self) -> bool:
        return not self.full_phases and self.has_cache

    @property
    def has_margin(self) -> bool:
        """Whether it may be proposed: it fits, and no phase needs more than PROPOSED of the memory."""
        return self.fits and self.fullest[1] <= PROPOSED * self.device

    @property
    def is_impossible(self) -> bool:
        """Whether the exact parts alone are too large."""
        no_budget = self.cache is not None and self.cache.cache + self.cache.workspace <= 0
        return no_budget or any(phase.is_impossible(self.device) for phase in self.phases)

    @property
    def fullest(self) -> tuple[str, float]:
        """The phase that needs most, and its bytes."""
        sizes = {phase.name: phase.total + phase.utilization * self.device for phase in self.phases}
        name = max(sizes, key=sizes.__getitem__)
        return name, sizes[name]


def fit(config: Config, models: PlannedModels, world_size: int, device: float) -> Fit:
    """The config as it is on GPUs of `device` bytes. Its layout must be valid."""
    phases = memory_phases(config, models.arch, world_size, *models.stages(config))
    cache = None
    if config.draws:
        cache = engine_cache(config, models.arch, DTYPE_BYTES[config.model.dtype], device)
    length = config.data.max_prompt_length + config.data.max_response_length
    return Fit(Layout.of(config), phases, cache, device, length)


def proposed_fit(config: Config, models: PlannedModels, world_size: int, device: float) -> Fit:
    """`fit`, with the engine's share lowered to a multiple of SHARE_STEP where only this makes every phase fit."""
    found = fit(config, models, world_size, device)
    if found.has_margin or not any(phase.utilization for phase in found.phases):
        return found
    free = min(PROPOSED - phase.total / device for phase in found.phases if phase.utilization)
    share = round(SHARE_STEP * math.floor(free / SHARE_STEP + 1e-9), 2)
    if not 0 < share < config.rollout.gpu_memory_utilization:
        return found
    rollout = config.rollout.model_copy(update={"gpu_memory_utilization": share})
    lowered = config.model_copy(update={"rollout": rollout})
    assert found.cache is not None
    return replace(
        found,
        layout=Layout.of(lowered),
        phases=[replace(phase, utilization=share if phase.utilization else 0.0) for phase in found.phases],
        cache=engine_cache(lowered, models.arch, DTYPE_BYTES[config.model.dtype], device),
    )
