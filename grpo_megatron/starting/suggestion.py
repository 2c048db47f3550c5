"""The layout of a new config: the fastest that fits, by the plan's memory arithmetic and cost model (planning/)."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.planning.cost import PlannedMachine, Workload
from grpo_megatron.planning.gpus import Gpu
from grpo_megatron.planning.models import PlannedModels
from grpo_megatron.planning.search import PlannedLayout, search


@dataclass(frozen=True)
class Machine:
    """`gpu` None: CPU ranks, which share the memory of their machine."""

    nodes: int
    per_node: int
    gpu: Gpu | None

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


def suggest(config: Config, arch: Architecture, machine: Machine) -> PlannedLayout:
    """For GPUs. Raises ConfigError if no layout fits."""
    assert machine.gpu is not None
    models = PlannedModels(arch)
    planned = PlannedMachine(machine.gpu, machine.ranks, machine.per_node)
    found = search(config, models, Workload.of(config, models), planned).found
    if not found:
        raise ConfigError(
            f"{arch.num_parameters() / 1e9:.2f}e9 parameters on {machine.ranks} GPUs of {machine.gpu.usable_gib:g} GiB: no layout"
            " fits; give more --gpus, or another --gpu"
        )
    return found[0]
