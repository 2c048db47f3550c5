"""The printed search: layouts that fit, fastest first, and the arguments that choose the first one."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_megatron.checks.model_folders import read_models
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.memory.phases import GIB
from grpo_megatron.planning.cost import PlannedMachine, Workload
from grpo_megatron.planning.gpus import GPUS, REFERENCE, Gpu
from grpo_megatron.planning.search import PROPOSED, PlannedLayout, SearchResult, search

_TOP = 10
_COLUMNS = ("tp", "pp", "dp", "ep", "engine", "tokens", "recompute", "offload", "share", "at once", "fullest, GiB")
_SECONDS = ("gen s", "score", "update", "sync", "step s", "tok/s/GPU")


def search_page(
    config: Config, world_size: int | None, gpu: Gpu | None, *, top: int | None = None, mean_response: int | None = None
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
    models = read_models(config)
    work = Workload.of(config, models, mean_response)
    result = search(config, models, work, machine)
    return "\n".join([*_head(config, work, machine, result), "", *_table(config, work, machine, result, top or _TOP)])


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


def _table(config: Config, work: Workload, machine: PlannedMachine, result: SearchResult, top: int) -> Iterator[str]:
    if not result.found:
        yield "no layout fits: use more GPUs, GPUs with more memory, or shorter sequences"
        return
    rows = [_cells(planned, work, machine) for planned in result.found[:top]]
    header = [*_COLUMNS, *_SECONDS]
    widths = [max(len(header[i]), *(len(row[i]) for row in rows)) for i in range(len(header))]
    for row in (header, *rows):
        yield " ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
    yield ""
    yield "Seconds are estimates: docs/layouts.md says by how much they miss published ones."
    changes = list(result.found[0].layout.overrides(config))
    if not changes:
        yield "The first is the config's own layout."
        return
    yield "The first, as arguments:"
    yield from (f"  {change}" if " " not in change else f"  '{change}'" for change in changes)


def _cells(planned: PlannedLayout, work: Workload, machine: PlannedMachine) -> list[str]:
    layout, seconds, cache = planned.layout, planned.seconds, planned.fit.cache
    name, size = planned.fit.fullest
    sizes = (layout.tp, layout.pp, layout.replicas(machine.world_size), layout.ep)
    tokens_per_s = work.tokens / seconds.step / machine.world_size
    return [
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
