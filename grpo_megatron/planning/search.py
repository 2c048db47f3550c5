"""The search: every layout of a world of GPUs, those that fit, fastest first by the cost model. Pure arithmetic.

For each tp, pp, ep and rollout tp it keeps the best micro-batch, with or without recomputation and offloading.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from grpo_megatron.config import Config
from grpo_megatron.memory.engine import EngineCache, engine_cache
from grpo_megatron.memory.parameters import DTYPE_BYTES, RunModels
from grpo_megatron.memory.phases import Phase, memory_phases
from grpo_megatron.planning.cost import PlannedMachine, StepSeconds, Workload, step_seconds
from grpo_megatron.planning.layout import Layout, micro_batches, shapes, variants

# -- Fit: every phase of a layout against the memory of a GPU, and the engine's cache ----------------------------------

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


def fit(config: Config, models: RunModels, world_size: int, device: float) -> Fit:
    """The config as it is on GPUs of `device` bytes. Its layout must be valid."""
    phases = memory_phases(config, models.arch, world_size, *models.stages(config))
    cache = None
    if config.draws:
        cache = engine_cache(config, models.arch, DTYPE_BYTES[config.model.dtype], device)
    length = config.data.max_prompt_length + config.data.max_response_length
    return Fit(Layout.of(config), phases, cache, device, length)


def proposed_fit(config: Config, models: RunModels, world_size: int, device: float) -> Fit:
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


# -- The layouts nearest to a config -----------------------------------------------------------------------------------
# A level is a factor of two in a size, a switch, or 0.1 of the engine's share of the GPU.

LARGEST_SEARCH = 20_000  # layouts that are tried


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that fits, with its estimated step."""

    fit: Fit
    seconds: StepSeconds

    @property
    def layout(self) -> Layout:
        return self.fit.layout


def estimated(found: Fit, work: Workload, machine: PlannedMachine) -> PlannedLayout:
    """A layout that fits, with its estimated step."""
    tokens = found.cache.tokens if found.cache is not None else 0
    return PlannedLayout(found, step_seconds(work, found.layout, machine, tokens))


def nearest_layouts(
    config: Config, models: RunModels, work: Workload, machine: PlannedMachine, count: int = 3
) -> list[PlannedLayout]:
    """At most `count` layouts that fit, the nearest first. None of them is the config's own."""
    now = Layout.of(config)
    candidates = sorted(_candidates(config, models, machine), key=lambda layout: layout.distance(now))
    found: list[PlannedLayout] = []
    for layout in candidates[:LARGEST_SEARCH]:
        if len(found) >= count and layout.distance(now) > found[count - 1].layout.distance(now):
            break
        fit = proposed_fit(layout.applied(config), models, machine.world_size, machine.gpu.usable_bytes)
        if fit.has_margin and fit.layout != now:
            found.append(estimated(fit, work, machine))
            found.sort(key=lambda planned: (planned.layout.distance(now), planned.seconds.step))
    return found[:count]


def _candidates(config: Config, models: RunModels, machine: PlannedMachine) -> Iterator[Layout]:
    now = Layout.of(config)
    switches = (
        {now.recompute, True},
        {now.offload_optimizer, True} if config.draws else {now.offload_optimizer},
        {now.offload_reference, True},
        {now.distributed_optimizer, True},
    )
    for shape in shapes(config, models.arch, machine.world_size, machine.per_node):
        for tokens, *values in itertools.product(_smaller(config), *switches):
            recompute, optimizer, reference, distributed = values
            yield replace(
                shape,
                tokens=tokens,
                recompute=recompute,
                offload_optimizer=optimizer,
                offload_reference=reference,
                distributed_optimizer=distributed,
            )


def _smaller(config: Config) -> list[int]:
    """Micro-batches that need no more memory than the config's."""
    return [tokens for tokens in micro_batches(config) if tokens <= config.actor.ppo_max_token_len_per_gpu]


@dataclass(frozen=True)
class SearchResult:
    """`found`: one layout for each tp, pp, ep and rollout tp of which at least one variant fits, fastest first."""

    found: list[PlannedLayout]
    num_tried: int
    num_fitting: int


def search(config: Config, models: RunModels, work: Workload, machine: PlannedMachine) -> SearchResult:
    """Every valid layout. A layout in which a data-parallel rank or an engine would get no sample is left out."""
    best: list[PlannedLayout] = []
    num_tried = num_fitting = 0
    for shape in shapes(config, models.arch, machine.world_size, machine.per_node):
        replicas, engines = shape.replicas(machine.world_size), machine.world_size // shape.rollout_tp
        per_update = work.samples * work.epochs / work.updates
        if replicas > per_update or (work.draws and engines > work.samples):
            continue
        fitting = []
        for layout in variants(shape, config):
            num_tried += 1
            fit = proposed_fit(layout.applied(config), models, machine.world_size, machine.gpu.usable_bytes)
            if fit.has_margin:
                fitting.append(estimated(fit, work, machine))
        num_fitting += len(fitting)
        if fitting:
            best.append(min(fitting, key=lambda planned: planned.seconds.step))
    return SearchResult(sorted(best, key=lambda planned: planned.seconds.step), num_tried, num_fitting)
