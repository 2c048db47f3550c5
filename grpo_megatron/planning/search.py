"""The search: whether a layout fits a GPU, the nearest layouts that fit, and all of them, fastest first. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.problems import counted
from grpo_megatron.models.engine_cache import EngineCache, engine_cache
from grpo_megatron.planning.cost import StepSeconds, Workload, generation_seconds, step_seconds
from grpo_megatron.planning.gpus import GPUS, REFERENCE, Gpu, PlannedMachine
from grpo_megatron.planning.layout import Layout, micro_batches, shapes, variants
from grpo_megatron.planning.parameters import DTYPE_BYTES, RunModels
from grpo_megatron.planning.phases import GIB, Phase, memory_phases
from grpo_megatron.sync.weight_sync import crosses_directly

# -- Fit: every phase of a layout against the memory of a GPU, and the engine's cache ----------------------------------

SHARE_STEP = 0.05  # by which the engine's share of the GPU is lowered
PROPOSED = 0.95  # share of the usable memory that a proposed layout may need: estimates miss, and memory fragments


@dataclass(frozen=True)
class Fit:
    """Phases of a layout against a GPU of `device` bytes; `length`: tokens of the largest sequence."""

    layout: Layout
    phases: list[Phase]
    cache: EngineCache | None  # None: the run has no engine
    device: float
    length: int

    @property
    def full_phases(self) -> list[Phase]:
        """The phases that do not fit, estimates included."""
        return [phase for phase in self.phases if not phase.fits(self.device)]

    @property
    def has_cache(self) -> bool:
        """True if the cache has room for one sequence of the largest length, without which the engine does not start."""
        return self.cache is None or self.cache.sequences(self.length) > 0

    @property
    def fits(self) -> bool:
        return not self.full_phases and self.has_cache

    @property
    def has_margin(self) -> bool:
        """True if the layout may be proposed: it fits, and no phase needs more than PROPOSED of the memory."""
        return self.fits and self.fullest[1] <= PROPOSED * self.device

    @property
    def is_impossible(self) -> bool:
        """True if the exact parts alone are too large."""
        no_budget = self.cache is not None and self.cache.cache + self.cache.workspace <= 0
        return no_budget or any(phase.is_impossible(self.device) for phase in self.phases)

    @property
    def fullest(self) -> tuple[str, float]:
        """The largest phase, and its bytes."""
        sizes = {phase.name: phase.total + phase.utilization * self.device for phase in self.phases}
        name = max(sizes, key=sizes.__getitem__)
        return name, sizes[name]


def fit(config: Config, models: RunModels, world_size: int, device: float) -> Fit:
    """Compares the config, whose layout must be valid, with GPUs of `device` bytes."""
    phases = memory_phases(config, models.arch, world_size, *models.stages(config))
    cache, length = None, config.data.max_prompt_length + config.data.max_response_length
    if config.has_rollouts:
        cache = engine_cache(config.rollout, models.arch, DTYPE_BYTES[config.model.dtype], device, length)
    return Fit(Layout.of(config), phases, cache, device, length)


def proposed_fit(config: Config, models: RunModels, world_size: int, device: float) -> Fit:
    """Returns `fit`, with the engine's share lowered to a multiple of SHARE_STEP where only this makes every phase fit."""
    result = fit(config, models, world_size, device)
    if result.has_margin or not any(phase.utilization for phase in result.phases):
        return result
    free = min(PROPOSED - phase.total / device for phase in result.phases if phase.utilization)
    share = round(SHARE_STEP * math.floor(free / SHARE_STEP + 1e-9), 2)
    if not 0 < share < config.rollout.gpu_memory_utilization:
        return result
    return fit(config.with_values({"rollout.gpu_memory_utilization": share}), models, world_size, device)


# -- The layouts nearest to a config -----------------------------------------------------------------------------------

LARGEST_SEARCH = 20_000  # layouts that are tried


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that fits, with its estimated step. `rollout_ranks`: ranks that only generate, beside those of the layout."""

    fit: Fit
    seconds: StepSeconds
    rollout_ranks: int = 0

    @property
    def layout(self) -> Layout:
        return self.fit.layout


def estimated(
    fit: Fit, work: Workload, machine: PlannedMachine, *, rollout_ranks: int = 0, lag: int = 0
) -> PlannedLayout:
    """Estimates the step of a layout that fits. `rollout_ranks`: ranks that only generate, beside those of the machine."""
    tokens, layout = fit.cache.tokens if fit.cache is not None else 0, fit.layout
    if fit.cache is not None:
        work = replace(work, max_num_seqs=fit.cache.max_num_seqs)
    seconds = step_seconds(replace(work, generates=work.generates and not rollout_ranks), layout, machine, tokens)
    if rollout_ranks:
        generate = generation_seconds(work, layout, replace(machine, world_size=rollout_ranks), tokens)
        generate, copied = with_copies(generate, work, layout, machine, lag)
        seconds = replace(seconds, generate=generate, sync=copied, overlaps=lag > 0)
    return PlannedLayout(fit, seconds, rollout_ranks)


def with_copies(
    generate: float, work: Workload, layout: Layout, machine: PlannedMachine, lag: int
) -> tuple[float, float]:
    """Returns the seconds of generating and receiving weights, and of sending them; both from or to the host where staged."""
    size = work.num_sent * work.itemsize
    if crosses_directly(lag):
        crossing = size / machine.per_node / machine.link(machine.world_size + 1)  # into each node
        return generate + crossing, crossing
    return (
        generate + machine.host_seconds(size / layout.rollout_tp),
        machine.host_seconds(size / (layout.tp * layout.pp)),
    )


def nearest_layouts(
    config: Config, models: RunModels, work: Workload, machine: PlannedMachine, count: int = 3
) -> list[PlannedLayout]:
    """Returns at most `count` layouts that fit, the nearest first. None of them is the config's.

    A level of the distance is a factor of two in a size, a switch, or 0.1 of the engine's share of the GPU.
    """
    now = Layout.of(config)
    candidates = sorted(_candidates(config, models, machine), key=lambda layout: layout.distance(now))
    nearest: list[PlannedLayout] = []
    for layout in candidates[:LARGEST_SEARCH]:
        if len(nearest) >= count and layout.distance(now) > nearest[count - 1].layout.distance(now):
            break
        fit = proposed_fit(layout.applied(config), models, machine.world_size, machine.gpu.usable_bytes)
        if fit.has_margin and fit.layout != now:
            nearest.append(estimated(fit, work, machine))
            nearest.sort(key=lambda planned: (planned.layout.distance(now), planned.seconds.step))
    return nearest[:count]


def _candidates(config: Config, models: RunModels, machine: PlannedMachine) -> Iterator[Layout]:
    now = Layout.of(config)
    switches = (
        {now.recompute, True},
        {now.offload_optimizer, True} if config.has_rollouts else {now.offload_optimizer},
        {now.offload_reference, True},
        {now.distributed_optimizer, True},
    )
    names = ("tokens", "recompute", "offload_optimizer", "offload_reference", "distributed_optimizer")
    smaller = [tokens for tokens in micro_batches(config) if tokens <= now.tokens]  # that need no more memory
    for shape in shapes(config, models.arch, machine.world_size, machine.per_node):
        for values in itertools.product(smaller, *switches):
            changes: dict[str, Any] = dict(zip(names, values, strict=True))
            yield replace(shape, **changes)


# -- The layout for fewer ranks, after a loss (trainer.healing) --------------------------------------------------------


def rollout_size(config: Config, ranks: int) -> tuple[str, int]:
    """Returns the key that says how many ranks sample, and its value for so many."""
    if config.rollout.num_nodes is None:
        return "rollout.num_ranks", ranks
    return "rollout.num_nodes", ranks // config.trainer.n_gpus_per_node


def fallback_layout(
    config: Config, models: RunModels, gpu: Gpu, most: int, refuses: Callable[[Config, int], object], unit: int = 1
) -> tuple[int, PlannedLayout] | None:
    """Returns the layout for at most `most` ranks, with its number of ranks: the fastest by the estimate; None: none fits.

    Of each number of ranks, down to half of `most`, it is the layout nearest to the config's, which may be the same keys:
    the engine's memory, micro-batches and switches stay as they were. `refuses(config, ranks)`: further rules.
    `unit`: ranks of a node, which are used or left out together.
    """
    now, work, sampling = Layout.of(config), Workload.of(config, models), config.num_rollout_ranks
    if sampling:  # ranks that sample are given up first, down to one engine, then ranks that train
        least = math.lcm(config.rollout.tensor_model_parallel_size, unit)
        training = config.trainer.nnodes * config.trainer.n_gpus_per_node - sampling
        sampling = max(least, (most - training) // least * least)
        config, most = config.with_values(dict([rollout_size(config, sampling)])), most - sampling
    found = []
    for ranks in range(most, most // 2, -unit):
        machine = PlannedMachine(gpu, ranks, min(config.trainer.n_gpus_per_node, ranks))
        candidates = sorted(_candidates(config, models, machine), key=lambda layout: layout.distance(now))
        for layout in candidates[:LARGEST_SEARCH]:
            too_many = layout.replicas(ranks) > work.samples * work.epochs / work.updates
            if too_many or (work.generates and (sampling or ranks) // layout.rollout_tp > work.samples):
                continue
            fit = proposed_fit(layout.applied(config), models, ranks, gpu.usable_bytes)
            if fit.has_margin and not refuses(fit.layout.applied(config), ranks + sampling):
                planned = estimated(fit, work, machine, rollout_ranks=sampling, lag=config.rollout.lag)
                found.append((ranks + sampling, planned))
                break
    return min(found, key=lambda planned: planned[1].seconds.step, default=None)


# -- All layouts -------------------------------------------------------------------------------------------------------
# For each tp, pp, ep and rollout tp the search keeps the best micro-batch, with or without recomputation and offloading.


@dataclass(frozen=True)
class SearchResult:
    """Layouts that fit, one for each tp, pp, ep and rollout tp, fastest first."""

    layouts: list[PlannedLayout]
    num_tried: int
    num_fitting: int


def search(config: Config, models: RunModels, work: Workload, machine: PlannedMachine) -> SearchResult:
    """Tries every valid layout in which each data-parallel rank and each engine gets a sample."""
    best: list[PlannedLayout] = []
    num_tried = num_fitting = 0
    for shape in shapes(config, models.arch, machine.world_size, machine.per_node):
        replicas, engines = shape.replicas(machine.world_size), machine.world_size // shape.rollout_tp
        per_update = work.samples * work.epochs / work.updates
        if replicas > per_update or (work.generates and engines > work.samples):
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


# -- Two roles: the last ranks only generate (`rollout.placement: separate`) --------------------------------------------
# With a lag a step takes as long as the slower role: max(G', U') in place of G + U. Both have the transfer of the weights; with
# a lag of several steps U' has a copy of a rank's weights to the host, G' a load from there, and they travel in the background.

MOST_SPLITS = 8  # numbers of rollout ranks that are tried, by full nodes
ENGINE_SHARE = 0.9  # of a GPU that only generates


def search_splits(
    config: Config, models: RunModels, work: Workload, machine: PlannedMachine
) -> Iterator[tuple[Config, PlannedLayout]]:
    """Yields the fastest layout of both roles, with its config, for each number of ranks that only generate."""
    world, unit = machine.world_size, machine.per_node if machine.world_size > machine.per_node else 1
    counts = range(unit, world, unit)
    itemsize, length = DTYPE_BYTES[config.model.dtype], config.data.max_prompt_length + config.data.max_response_length
    engines = dict.fromkeys(layout.rollout_tp for layout in shapes(config, models.arch, world, machine.per_node))
    for rollout_ranks in counts[:: max(1, -(-len(counts) // MOST_SPLITS))]:  # none of one rank
        role: dict[str, Any] = {"placement": "separate", "lag": max(1, config.rollout.lag)}
        role |= {"num_nodes": rollout_ranks // unit} if unit > 1 else {"num_ranks": rollout_ranks}
        generate: dict[float, Config] = {}  # of each engine that fits
        for tp in (tp for tp in engines if rollout_ranks % tp == 0 and rollout_ranks // tp <= work.samples):
            experts = tp if config.rollout.has_whole_experts else 1
            size = {"tensor_model_parallel_size": tp, "expert_parallel_size": experts}
            values = {**role, **size, "gpu_memory_utilization": ENGINE_SHARE}
            split = config.with_values({f"rollout.{name}": value for name, value in values.items()})
            cache = engine_cache(split.rollout, models.arch, itemsize, machine.gpu.usable_bytes, length)
            if cache.sequences(length) > 0:
                limited = replace(work, max_num_seqs=cache.max_num_seqs)
                layout, engines_alone = Layout.of(split), replace(machine, world_size=rollout_ranks)
                seconds = generation_seconds(limited, layout, engines_alone, cache.tokens)
                generate.setdefault(with_copies(seconds, work, layout, machine, role["lag"])[0], split)
        if not generate:
            continue
        seconds, split = min(generate.items(), key=lambda item: item[0])
        training = replace(machine, world_size=world - rollout_ranks)
        if layouts := search(split, models, replace(work, generates=False), training).layouts:
            _, copied = with_copies(0.0, work, layouts[0].layout, machine, role["lag"])
            both_roles = replace(layouts[0].seconds, generate=seconds, sync=copied, overlaps=True)
            yield split, replace(layouts[0], seconds=both_roles, rollout_ranks=rollout_ranks)


# -- The page of `plan --search` ---------------------------------------------------------------------------------------

_TOP = 10
_HEADER = (
    *("sample", "tp", "pp", "dp", "ep", "engine", "tokens", "recompute", "offload", "share", "at once", "fullest, GiB"),
    *("gen s", "score", "update", "sync", "step s", "tok/s/GPU"),
)


def search_page(
    config: Config,
    models: RunModels,
    world_size: int | None,
    gpu: Gpu | None,
    *,
    top: int | None = None,
    mean_response: int | None = None,
) -> str:
    """Returns the page for a config. Its layout may be invalid. Raises ConfigError."""
    if config.trainer.device == "cpu":
        raise ConfigError("plan --search is for GPUs, and trainer.device=cpu; add trainer.device=auto")
    longest = config.data.max_response_length
    if mean_response is not None and mean_response > longest:
        raise ConfigError(f"--mean-response {mean_response} is more than data.max_response_length={longest}")
    if config.actor.megatron.context_parallel_size > 1:
        raise ConfigError(
            f"plan --search does not vary actor.megatron.context_parallel_size="
            f"{config.actor.megatron.context_parallel_size}; set it to 1"
        )
    world = world_size or config.trainer.nnodes * config.trainer.n_gpus_per_node
    machine = PlannedMachine(gpu or GPUS[REFERENCE], world, min(config.trainer.n_gpus_per_node, world))
    work = Workload.of(config, models, mean_response)
    result = search(config, models, work, machine)
    lines = [*_head(config, work, machine, result), "", *_table(config, work, machine, result.layouts[: top or _TOP])]
    if work.generates and config.algorithm.source == "policy":
        lines += ["", *_splits(config, models, work, machine, result)]
    return "\n".join(lines)


def _head(config: Config, work: Workload, machine: PlannedMachine, result: SearchResult) -> Iterator[str]:
    gpu = machine.gpu
    yield (
        f"{work.arch.family} of {work.arch.num_parameters():,} parameters on {machine.world_size} x {gpu.name}"
        f" ({gpu.usable_gib:g} GiB), nodes of {machine.per_node}"
    )
    if gpu.remark:
        yield gpu.remark
    experts = f" and {counted(work.expert_rows, 'row')} of an expert" if work.expert_rows else ""
    yield (
        f"a step: {work.samples:,} samples{experts}, prompts of {work.prompt_tokens:g} and responses of {work.response_tokens:g}"
        f" tokens on average, the longest {work.longest_response:,}"
    )
    yield (
        f"peaks: {gpu.tflops:g} TFLOP/s, memory {gpu.memory_bytes_per_s / 1e12:g} TB/s, NVLink"
        f" {gpu.nvlink_bytes_per_s / 1e9:g} GB/s, network {gpu.network_bytes_per_s / 1e9:g} GB/s per GPU"
    )
    listed = "; the fastest of each tp, pp, ep and engine size:" if result.layouts else ""
    yield f"{result.num_tried:,} layouts tried, {result.num_fitting:,} need at most {PROPOSED:.0%} of the memory{listed}"


def _table(config: Config, work: Workload, machine: PlannedMachine, layouts: list[PlannedLayout]) -> Iterator[str]:
    if not layouts:
        yield "no layout fits: use more GPUs, GPUs with more memory, or shorter sequences"
        return
    yield from _rows(layouts, work, machine)
    yield ""
    yield "Seconds are estimates: docs/layouts.md says by how much they miss published ones."
    changes = list(layouts[0].layout.overrides(config))
    if not changes:
        yield "The first is the config's own layout."
        return
    yield "The first, as arguments:"
    yield from _arguments(changes)


def _splits(
    config: Config, models: RunModels, work: Workload, machine: PlannedMachine, colocated: SearchResult
) -> Iterator[str]:
    """Yields the lines about ranks of two roles, compared with the fastest colocated layout."""
    splits = sorted(search_splits(config, models, work, machine), key=lambda split: split[1].seconds.step)
    if not splits:
        yield "Two roles (rollout.placement=separate): no split fits."
        return
    yield "Two roles: the ranks of `sample` only generate, the others train. With a lag a step takes as long as the slower role."
    yield "`fullest` is of a rank that trains; an engine has `share` of a GPU of its own:"
    yield from _rows([planned for _, planned in splits], work, machine)
    split, best = splits[0]
    if colocated.layouts and (seconds := colocated.layouts[0].seconds.step) <= best.seconds.step:
        yield f"Colocated is better: {seconds:.1f} s per step, and the best split needs {best.seconds.step:.1f} s."
        return
    role = "num_nodes" if split.rollout.num_nodes else "num_ranks"
    keys = ("placement", role, "lag")
    yield "Estimated to be faster than colocated, with samples of earlier weights. The first, as arguments:"
    yield from _arguments([f"rollout.{key}={getattr(split.rollout, key)}" for key in keys])
    yield from _arguments(best.layout.overrides(config))


def _rows(layouts: list[PlannedLayout], work: Workload, machine: PlannedMachine) -> Iterator[str]:
    rows = [_HEADER, *(_cells(planned, work, machine) for planned in layouts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield " ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))


def _arguments(changes: Iterable[str]) -> Iterator[str]:
    yield from (f"  {change}" if " " not in change else f"  '{change}'" for change in changes)


def _cells(planned: PlannedLayout, work: Workload, machine: PlannedMachine) -> list[str]:
    layout, seconds, cache = planned.layout, planned.seconds, planned.fit.cache
    name, size = planned.fit.fullest
    sizes = (layout.tp, layout.pp, layout.replicas(machine.world_size - planned.rollout_ranks), layout.ep)
    tokens_per_s = work.tokens / seconds.step / machine.world_size
    return [
        str(planned.rollout_ranks or "-"),
        *(str(number) for number in sizes),
        f"tp {layout.rollout_tp}" if cache is not None else "-",
        f"{layout.tokens:,}",
        "full" if layout.recompute else "-",
        "yes" if layout.offload_optimizer else "-",
        f"{layout.utilization:g}" if cache is not None else "-",
        f"{cache.sequences(planned.fit.length):,}" if cache is not None else "-",
        f"{name} {size / GIB:.1f}",
        *(f"{value:.1f}" for value in (seconds.generate, seconds.score, seconds.update, seconds.sync, seconds.step)),
        f"{tokens_per_s:,.0f}",
    ]
