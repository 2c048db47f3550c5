"""A layout for a model on so many devices: the smallest that fits by the plan's arithmetic (checks/phases.py).

Less model parallelism is faster as long as it fits, so the order is: ranks per copy of the model (tp x pp), then pipeline
stages, then what saves memory for time: nothing, offloading, offloading and recomputation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from grpo_megatron.checks.experts import expert_problems
from grpo_megatron.checks.layout import divisors, layout_problems
from grpo_megatron.checks.memory import DTYPE_BYTES, parameters_from_table
from grpo_megatron.checks.phases import GIB, Phase, memory_phases
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.tensor_parallel import engine_split_problems

ENGINE_SHARE = 0.5  # of the engine's memory, at most, is weights; the rest is its cache


@dataclass(frozen=True)
class Choice:
    """The keys that the suggestion sets."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    rollout_tp: int = 1
    offload: bool = False
    recompute: bool = False


@dataclass(frozen=True)
class Suggestion:
    """`fullest`: the phase that leaves least memory free, and what it needs, in GiB; None on the CPU."""

    choice: Choice
    fullest: Phase | None = None
    gib: float = 0.0


@dataclass(frozen=True)
class Machine:
    """`device_gib` None: CPU ranks, which share the memory of their machine."""

    nodes: int
    per_node: int
    device_gib: float | None

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


def suggest(config_of: Callable[[Choice], Config], arch: Architecture, machine: Machine) -> Suggestion:
    """The first choice that fits in every phase, estimates included. Raises ConfigError if none does."""
    if machine.device_gib is None:
        return Suggestion(Choice())
    device = machine.device_gib * GIB
    best: Suggestion | None = None
    for choice in _choices(config_of(Choice()), arch, machine):
        config = config_of(choice)
        if any(_problems(config, arch, machine)):
            continue
        parameters = parameters_from_table(arch, config.actor.megatron)
        phases = memory_phases(config, arch, machine.ranks, parameters, [], None)
        fullest = max(phases, key=lambda phase: phase.total + phase.utilization * device)
        needed = (fullest.total + fullest.utilization * device) / GIB
        if all(phase.fits(device) for phase in phases):
            return Suggestion(choice, fullest, needed)
        if best is None or needed < best.gib:
            best = Suggestion(choice, fullest, needed)
    raise ConfigError(_none_fits(best, arch, machine))


def _choices(config: Config, arch: Architecture, machine: Machine) -> Iterator[Choice]:
    tps = [tp for tp in divisors(machine.ranks) if tp <= machine.per_node]  # tensor parallelism stays within a node
    layouts = sorted(itertools.product(tps, divisors(machine.ranks)), key=lambda pair: (pair[0] * pair[1], pair[1]))
    experts = divisors(arch.num_experts) if arch.num_experts else [1]
    for (tp, pp), ep in itertools.product(layouts, experts):
        if machine.ranks % (tp * pp * ep):
            continue
        rollout_tp = _engine_size(config, arch, machine)
        for offload, recompute in ((False, False), (True, False), (True, True)):
            yield Choice(tp, pp, ep, rollout_tp, offload, recompute)


def _engine_size(config: Config, arch: Architecture, machine: Machine) -> int:
    """The fewest ranks of an engine whose weights leave half of its memory for the cache."""
    assert machine.device_gib is not None
    weights = arch.num_parameters() * DTYPE_BYTES[config.model.dtype]
    budget = config.rollout.gpu_memory_utilization * machine.device_gib * GIB
    sizes = [n for n in divisors(machine.per_node) if not engine_split_problems(arch, n)]
    return next((n for n in sizes if weights / n <= ENGINE_SHARE * budget), sizes[-1])


def _problems(config: Config, arch: Architecture, machine: Machine) -> Iterator[str]:
    yield from layout_problems(config, machine.ranks, arch)
    yield from expert_problems(config.actor.megatron, machine.ranks, arch, on_cpu=False)


def _none_fits(best: Suggestion | None, arch: Architecture, machine: Machine) -> str:
    what = f"{arch.num_parameters() / 1e9:.2f}e9 parameters on {machine.ranks} GPUs of {machine.device_gib:g} GiB"
    if best is None or best.fullest is None:
        return f"{what}: no tp x pp divides both the model and the GPUs; give another --gpus, such as 8"
    choice = best.choice
    return (
        f"{what}: no layout fits. The nearest, tp {choice.tp} x pp {choice.pp}, needs {best.gib:.1f} GiB in phase"
        f" {best.fullest.name}; give more --gpus, or a larger --gpu-memory"
    )
