"""The search: every layout of a world of GPUs, those that fit, fastest first by the cost model. Pure arithmetic.

For each tp, pp, ep and rollout tp it keeps the best micro-batch, with or without recomputation and offloading.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_megatron.config import Config
from grpo_megatron.planning.candidates import shapes, variants
from grpo_megatron.planning.fit import proposed_fit
from grpo_megatron.planning.machine import PlannedMachine
from grpo_megatron.planning.models import PlannedModels
from grpo_megatron.planning.nearest import PlannedLayout, estimated
from grpo_megatron.planning.workload import Workload


@dataclass(frozen=True)
class SearchResult:
    """`found`: one layout for each tp, pp, ep and rollout tp of which at least one variant fits, fastest first."""

    found: list[PlannedLayout]
    num_tried: int
    num_fitting: int


def search(config: Config, models: PlannedModels, work: Workload, machine: PlannedMachine) -> SearchResult:
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
