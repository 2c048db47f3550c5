"""The page of a plan: checks/dry_run.py's description of the run, node borders, estimated step, warnings, verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from grpo_megatron.checks.dry_run import describe_run
from grpo_megatron.checks.machine import is_for_this_machine
from grpo_megatron.checks.phases import GIB
from grpo_megatron.config import Config
from grpo_megatron.device import device_bytes
from grpo_megatron.planning.cost import step_seconds
from grpo_megatron.planning.fit import Fit, fit
from grpo_megatron.planning.gpus import GPUS, REFERENCE, Gpu
from grpo_megatron.planning.machine import PlannedMachine
from grpo_megatron.planning.models import PlannedModels
from grpo_megatron.planning.plan_warnings import core_warning, plan_warnings
from grpo_megatron.planning.traffic import border_traffic
from grpo_megatron.planning.verdict import PAGE_WIDTH, misfit, verdict_lines, verdict_without_gpu, wrapped_item
from grpo_megatron.planning.workload import Workload

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked


@dataclass(frozen=True)
class PlanPage:
    """`problem`: why the run cannot fit, if this is certain. As a string, the page ends with the verdict."""

    sections: tuple[str, ...]
    verdict: str
    problem: str | None

    def __str__(self) -> str:
        return "\n\n".join([*self.sections, self.verdict])

    def with_section(self, title: str, lines: Sequence[str]) -> PlanPage:
        """With one more section before the verdict."""
        return replace(self, sections=(*self.sections, _section(title, lines)))


def plan_page(
    config: Config,
    checked: Checked,
    world_size: int,
    gpu: Gpu | None,
    *,
    elsewhere: bool = False,
    width: int = PAGE_WIDTH,
) -> PlanPage:
    """The page of a valid config, in lines of at most `width` characters where that is possible.

    `gpu`: the one to fit; None: that of this machine, if it has one. `elsewhere`: the plan is for other machines.
    """
    gpu = gpu if gpu is not None or elsewhere else _own_gpu(config)
    models = PlannedModels.of(config, checked)
    work = Workload.of(config, models)
    machine = PlannedMachine(gpu or GPUS[REFERENCE], world_size, min(config.trainer.n_gpus_per_node, world_size))
    fits_gpu = gpu is not None and config.trainer.device != "cpu"
    found = fit(config, models, world_size, machine.gpu.usable_bytes) if fits_gpu else None
    warnings = list(plan_warnings(config, models, work, machine, found, checked))
    if not elsewhere and is_for_this_machine(config):
        warnings += core_warning(config, world_size)
    sections = {
        "Bytes over the borders of nodes in a step, at the largest lengths (~: estimated)": list(
            _border_lines(config, models, work, world_size)
        ),
        "KV cache of an engine, per GPU": list(_cache_lines(config, found)) if found is not None else [],
        f"Seconds of a step (estimated, at half of the largest lengths; {machine.gpu.name})": list(
            _step_lines(work, machine, found)
        ),
        "Warnings": [line for warning in warnings for line in wrapped_item(warning, width - 2)],
    }
    verdict = list(
        verdict_without_gpu(config, models, world_size)
        if found is None
        else verdict_lines(config, models, work, machine, found, width - 2)
    )
    text = describe_run(config, checked, world_size, gpu.usable_gib if gpu is not None else None, width=width)
    parts = [_section(title, lines) for title, lines in sections.items() if lines]
    problem = misfit(found) if found is not None else None
    return PlanPage((text, *parts), _section("Verdict", verdict), problem)


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _own_gpu(config: Config) -> Gpu | None:
    """With the peaks of REFERENCE. Not run on a GPU yet."""
    size = device_bytes(config.trainer.device)
    return None if size is None else replace(GPUS[REFERENCE], name="this machine's GPU", usable_gib=size / GIB)


def _border_lines(config: Config, models: PlannedModels, work: Workload, world_size: int) -> Iterator[str]:
    traffic = border_traffic(config, models, work, world_size)
    for item in traffic:
        yield f"{item.name if item.is_exact else f'~ {item.name}':<18}{item.size / 1e9:>12,.1f} GB"
    if traffic:
        yield f"{'together':<18}{sum(item.size for item in traffic) / 1e9:>12,.1f} GB"


def _cache_lines(config: Config, found: Fit) -> Iterator[str]:
    cache = found.cache
    if cache is None:
        return
    size = max(0.0, cache.cache) / GIB
    yield f"~ {size:.2f} GiB = {cache.tokens:,} tokens of {cache.token_bytes / 1024:g} KiB"
    yield (
        f"{cache.sequences(found.length):,} sequences of {found.length:,} tokens at once"
        f" (rollout.max_num_seqs={config.rollout.max_num_seqs})"
    )


def _step_lines(work: Workload, machine: PlannedMachine, found: Fit | None) -> Iterator[str]:
    if found is None:
        return
    seconds = step_seconds(work, found.layout, machine, found.cache.tokens if found.cache is not None else 0)
    parts = {"generate": seconds.generate, "score": seconds.score, "update": seconds.update, "sync": seconds.sync}
    terms = " + ".join(f"{name} {value:.1f}" for name, value in parts.items() if value)
    yield f"{seconds.step:.1f} = {terms}"
    yield f"{work.tokens / seconds.step / machine.world_size:,.0f} tokens/s per GPU"
