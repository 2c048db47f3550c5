"""The verdict that ends a plan: whether the run fits a GPU, what to change if not, and the nearest layouts that do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from grpo_megatron.checks.phases import GIB, shortage
from grpo_megatron.config import Config
from grpo_megatron.planning.fit import Fit, fit
from grpo_megatron.planning.gpus import GPUS, Gpu
from grpo_megatron.planning.machine import PlannedMachine
from grpo_megatron.planning.models import PlannedModels
from grpo_megatron.planning.nearest import PlannedLayout, nearest_layouts
from grpo_megatron.planning.workload import Workload

PAGE_WIDTH = 120  # characters per line of a plan, where the width of the terminal is not known


def verdict_lines(
    config: Config, models: PlannedModels, work: Workload, machine: PlannedMachine, found: Fit, width: int = PAGE_WIDTH
) -> Iterator[str]:
    """For a named GPU. The last line is the verdict itself."""
    if machine.gpu.remark:
        yield machine.gpu.remark
    problems = [shortage(config, phase, found.device) for phase in found.full_phases]
    if not found.has_cache:
        problems.append(f"the engine's cache does not hold one sequence of {found.length:,} tokens (see the warnings)")
    if not found.fits:
        yield (
            "too large even without the estimated parts:"
            if found.is_impossible
            else "too large by the estimated parts (~):"
        )
    for problem in problems:
        yield from wrapped_item(problem, width)
    if not found.fits:
        near = nearest_layouts(config, models, work, machine)
        yield "nearest layouts that fit, with their estimated step:" if near else "no layout that was tried fits"
        for planned in near:
            yield from _described(planned, config)
    yield _verdict(machine.gpu, found)


def _verdict(gpu: Gpu, found: Fit) -> str:
    name, size = found.fullest
    room = f"{gpu.name}, {round(gpu.usable_gib, 2):g} GiB usable" if "GiB" not in gpu.name else gpu.name
    fullest = f"fullest phase: {name}, {size / GIB:.2f} GiB"
    return f"{'FITS' if found.fits else 'DOES NOT FIT'} {room} ({fullest})"


def wrapped_item(text: str, width: int) -> list[str]:
    """Lines of an item of a list."""
    return textwrap.wrap(
        text, width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def misfit(found: Fit) -> str | None:
    """What is wrong, for the end of a dry run; None unless the exact parts alone are too large."""
    if not found.is_impossible:
        return None
    names = ", ".join(phase.name for phase in found.full_phases) or "rollout"
    return (
        f"the run does not fit a GPU of {found.device / GIB:.2f} GiB, even without the estimated parts (phase {names});"
        " the plan's verdict says what to change"
    )


def _described(planned: PlannedLayout, config: Config) -> Iterator[str]:
    changes = list(planned.layout.overrides(config))
    name, size = planned.fit.fullest
    yield f"  {planned.seconds.step:.0f} s, fullest phase {name} {size / GIB:.2f} GiB:"
    yield from (f"      {change}" for change in changes)


def verdict_without_gpu(config: Config, models: PlannedModels, world_size: int) -> Iterator[str]:
    """Which of the known GPUs fit."""
    if config.trainer.device == "cpu":
        yield "NO VERDICT for trainer.device=cpu: only the memory of GPUs is counted"
        return
    fits = {name: fit(config, models, world_size, gpu.usable_bytes).fits for name, gpu in GPUS.items()}
    yield "--gpu NAME or --gpu GIB says what to change, and which layouts fit."
    good, bad = ([name for name in GPUS if fits[name] == value] for value in (True, False))
    yield f"FITS {', '.join(good) or 'none of the known GPUs'}" + (f"; DOES NOT FIT {', '.join(bad)}" if bad else "")
