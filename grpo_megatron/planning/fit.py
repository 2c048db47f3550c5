"""Whether a layout fits a GPU, what its step takes, and the nearest layouts that fit. Pure arithmetic.

`plan --search` (grpo_megatron/planning/search.py) compares all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from grpo_megatron.config import Config
from grpo_megatron.models.engine_cache import EngineCache, engine_cache
from grpo_megatron.planning.cost import PlannedMachine, StepSeconds, Workload, generation_seconds, step_seconds
from grpo_megatron.planning.layout import Layout, micro_batches, shapes
from grpo_megatron.planning.parameters import DTYPE_BYTES, RunModels
from grpo_megatron.planning.phases import Phase, memory_phases

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
    cache, length = None, config.data.max_prompt_length + config.data.max_response_length
    if config.draws:
        cache = engine_cache(config.rollout, models.arch, DTYPE_BYTES[config.model.dtype], device, length)
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
    lowered = config.with_values({"rollout.gpu_memory_utilization": share})
    assert found.cache is not None
    return replace(
        found,
        layout=Layout.of(lowered),
        phases=[replace(phase, utilization=share if phase.utilization else 0.0) for phase in found.phases],
        cache=engine_cache(lowered.rollout, models.arch, DTYPE_BYTES[config.model.dtype], device, found.length),
    )


# -- The layouts nearest to a config -----------------------------------------------------------------------------------
# A level is a factor of two in a size, a switch, or 0.1 of the engine's share of the GPU.

LARGEST_SEARCH = 20_000  # layouts that are tried


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that fits, with its estimated step. `drawing`: ranks that only draw, beside those of the layout."""

    fit: Fit
    seconds: StepSeconds
    drawing: int = 0

    @property
    def layout(self) -> Layout:
        return self.fit.layout


def estimated(found: Fit, work: Workload, machine: PlannedMachine, *, drawing: int = 0, lag: int = 0) -> PlannedLayout:
    """A layout that fits, with its estimated step. `drawing`: ranks that only draw, beside those of the machine."""
    tokens, layout = found.cache.tokens if found.cache is not None else 0, found.layout
    if found.cache is not None:
        work = replace(work, max_num_seqs=found.cache.max_num_seqs)
    seconds = step_seconds(replace(work, draws=work.draws and not drawing), layout, machine, tokens)
    if drawing:
        generate = generation_seconds(work, layout, replace(machine, world_size=drawing), tokens)
        generate, copied = with_copies(generate, work, layout, machine)
        seconds = replace(seconds, generate=generate, sync=copied, overlaps=lag > 0)
    return PlannedLayout(found, seconds, drawing)


def with_copies(generate: float, work: Workload, layout: Layout, machine: PlannedMachine) -> tuple[float, float]:
    """Seconds of drawing and of loading the weights from the host, and of copying them there."""
    size = work.num_sent * work.itemsize
    return (
        generate + machine.host_seconds(size / layout.rollout_tp),
        machine.host_seconds(size / (layout.tp * layout.pp)),
    )


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
