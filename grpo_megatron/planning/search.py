"""The search: every layout of a world of GPUs, those that fit, fastest first by the cost model. Pure arithmetic.

For each tp, pp, ep and rollout tp it keeps the best micro-batch, with or without recomputation and offloading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.models.engine_cache import engine_cache
from grpo_megatron.planning.cost import PlannedMachine, Workload, generation_seconds
from grpo_megatron.planning.fit import PROPOSED, PlannedLayout, estimated, proposed_fit, with_copies
from grpo_megatron.planning.gpus import GPUS, REFERENCE, Gpu
from grpo_megatron.planning.layout import Layout, shapes, variants
from grpo_megatron.planning.parameters import DTYPE_BYTES, RunModels
from grpo_megatron.planning.phases import GIB


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


# -- Two roles: the last ranks only draw (`rollout.placement: separate`) ------------------------------------------------------
# With a lag a step takes as long as the slower role: max(G', U') in place of G + U. U' has a copy of a rank's weights to the
# host, G' a load from there; between the hosts they travel in the background.

MOST_SPLITS = 8  # numbers of drawing ranks that are tried, by whole nodes
ENGINE_SHARE = 0.9  # of a GPU that only draws


def search_splits(
    config: Config, models: RunModels, work: Workload, machine: PlannedMachine
) -> Iterator[tuple[Config, PlannedLayout]]:
    """The fastest layout of both roles, with its config, for each number of ranks that only draw."""
    world, unit = machine.world_size, machine.per_node if machine.world_size > machine.per_node else 1
    counts = range(unit, world, unit)
    itemsize, length = DTYPE_BYTES[config.model.dtype], config.data.max_prompt_length + config.data.max_response_length
    engines = dict.fromkeys(layout.rollout_tp for layout in shapes(config, models.arch, world, machine.per_node))
    for drawing in counts[:: -(-len(counts) // MOST_SPLITS)]:
        role: dict[str, Any] = {"placement": "separate", "lag": max(1, config.rollout.lag)}
        role |= {"num_nodes": drawing // unit} if unit > 1 else {"num_ranks": drawing}
        generate: dict[float, Config] = {}  # of each engine that fits
        for tp in (tp for tp in engines if drawing % tp == 0 and drawing // tp <= work.samples):
            experts = tp if config.rollout.has_whole_experts else 1
            size = {"tensor_model_parallel_size": tp, "expert_parallel_size": experts}
            values = {**role, **size, "gpu_memory_utilization": ENGINE_SHARE}
            split = config.with_values({f"rollout.{name}": value for name, value in values.items()})
            cache = engine_cache(split.rollout, models.arch, itemsize, machine.gpu.usable_bytes, length)
            if cache.sequences(length) > 0:
                at_once, role_machine = (
                    replace(work, max_num_seqs=cache.max_num_seqs),
                    replace(machine, world_size=drawing),
                )
                layout = Layout.of(split)
                seconds = generation_seconds(at_once, layout, role_machine, cache.tokens)
                generate.setdefault(with_copies(seconds, work, layout, machine)[0], split)
        if not generate:
            continue
        seconds, split = min(generate.items(), key=lambda item: item[0])
        training = replace(machine, world_size=world - drawing)
        found = search(split, models, replace(work, draws=False), training).found
        if found:
            _, copied = with_copies(0.0, work, found[0].layout, machine)
            of_both = replace(found[0].seconds, generate=seconds, sync=copied, overlaps=True)
            yield split, replace(found[0], seconds=of_both, drawing=drawing)


# -- The search: layouts that fit, fastest first, and the arguments that choose the first one -----------------------------

_TOP = 10
_COLUMNS = (
    "draw",
    "tp",
    "pp",
    "dp",
    "ep",
    "engine",
    "tokens",
    "recompute",
    "offload",
    "share",
    "at once",
    "fullest, GiB",
)
_SECONDS = ("gen s", "score", "update", "sync", "step s", "tok/s/GPU")


def search_page(
    config: Config,
    models: RunModels,
    world_size: int | None,
    gpu: Gpu | None,
    *,
    top: int | None = None,
    mean_response: int | None = None,
) -> str:
    """The page for a config whose own layout need not be valid. Raises ConfigError."""
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
    lines = [*_head(config, work, machine, result), "", *_table(config, work, machine, result.found[: top or _TOP])]
    if work.draws and config.algorithm.source == "policy":
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
    yield (
        f"a step: {work.samples:,} samples, prompts of {work.prompt_tokens:g} and responses of {work.response_tokens:g}"
        f" tokens on average, the longest {work.longest_response:,}"
    )
    yield (
        f"peaks: {gpu.tflops:g} TFLOP/s, memory {gpu.memory_bytes_per_s / 1e12:g} TB/s, NVLink"
        f" {gpu.nvlink_bytes_per_s / 1e9:g} GB/s, network {gpu.network_bytes_per_s / 1e9:g} GB/s per GPU"
    )
    yield (
        f"{result.num_tried:,} layouts tried, {result.num_fitting:,} need at most {PROPOSED:.0%} of the memory; the"
        " fastest of each tp, pp, ep and engine size:"
    )


def _table(config: Config, work: Workload, machine: PlannedMachine, found: list[PlannedLayout]) -> Iterator[str]:
    if not found:
        yield "no layout fits: use more GPUs, GPUs with more memory, or shorter sequences"
        return
    yield from _rows(found, work, machine)
    yield ""
    yield "Seconds are estimates: docs/layouts.md says by how much they miss published ones."
    changes = list(found[0].layout.overrides(config))
    if not changes:
        yield "The first is the config's own layout."
        return
    yield "The first, as arguments:"
    yield from _arguments(changes)


def _splits(
    config: Config, models: RunModels, work: Workload, machine: PlannedMachine, colocated: SearchResult
) -> Iterator[str]:
    """Ranks of two roles, beside the fastest colocated layout."""
    splits = sorted(search_splits(config, models, work, machine), key=lambda split: split[1].seconds.step)
    if not splits:
        yield "Two roles (rollout.placement=separate): no split fits."
        return
    yield "Two roles: the ranks of `draw` only draw, the others only train. With a lag a step takes as long as the slower role."
    yield "`fullest` is of a rank that trains; an engine has `share` of a GPU of its own:"
    yield from _rows([planned for _, planned in splits], work, machine)
    split, best = splits[0]
    if colocated.found and (seconds := colocated.found[0].seconds.step) <= best.seconds.step:
        yield f"Colocated is better: {seconds:.1f} s per step, and the best split needs {best.seconds.step:.1f} s."
        return
    role = "num_nodes" if split.rollout.num_nodes else "num_ranks"
    keys = ("placement", role, "lag")
    yield "Estimated to be faster than colocated, with samples of earlier weights. The first, as arguments:"
    yield from _arguments([f"rollout.{key}={getattr(split.rollout, key)}" for key in keys])
    yield from _arguments(best.layout.overrides(config))


def _rows(found: list[PlannedLayout], work: Workload, machine: PlannedMachine) -> Iterator[str]:
    rows = [_cells(planned, work, machine) for planned in found]
    header = [*_COLUMNS, *_SECONDS]
    widths = [max(len(header[i]), *(len(row[i]) for row in rows)) for i in range(len(header))]
    for row in (header, *rows):
        yield " ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))


def _arguments(changes: Iterable[str]) -> Iterator[str]:
    yield from (f"  {change}" if " " not in change else f"  '{change}'" for change in changes)


def _cells(planned: PlannedLayout, work: Workload, machine: PlannedMachine) -> list[str]:
    layout, seconds, cache = planned.layout, planned.seconds, planned.fit.cache
    name, size = planned.fit.fullest
    sizes = (layout.tp, layout.pp, layout.replicas(machine.world_size - planned.drawing), layout.ep)
    tokens_per_s = work.tokens / seconds.step / machine.world_size
    return [
        str(planned.drawing or "-"),
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
