"""The layouts nearest to a config that fit a GPU: fewest changed keys, then fewest levels, then fastest.

A level is a factor of two in a size, a switch, or 0.1 of the engine's share of the GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from grpo_megatron.config import Config
from grpo_megatron.planning.candidates import micro_batches, shapes
from grpo_megatron.planning.cost import StepSeconds, step_seconds
from grpo_megatron.planning.fit import Fit, proposed_fit
from grpo_megatron.planning.layout import Layout
from grpo_megatron.planning.machine import PlannedMachine
from grpo_megatron.planning.models import PlannedModels
from grpo_megatron.planning.workload import Workload

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
    tokens = found.cache.tokens if found.cache is not None else 0
    return PlannedLayout(found, step_seconds(work, found.layout, machine, tokens))


def nearest_layouts(
    config: Config, models: PlannedModels, work: Workload, machine: PlannedMachine, count: int = 3
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


def _candidates(config: Config, models: PlannedModels, machine: PlannedMachine) -> Iterator[Layout]:
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
