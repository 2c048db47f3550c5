"""The page of a plan: run_page.py's description of the run, node borders, estimated step, warnings, verdict."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from grpo_megatron.checks.layout import ROLLOUT_TP, TP, data_parallel_size
from grpo_megatron.checks.machine import is_for_this_machine
from grpo_megatron.config import Config
from grpo_megatron.device import device_bytes
from grpo_megatron.memory.parameters import RunModels
from grpo_megatron.memory.phases import GIB, shortage
from grpo_megatron.planning.cost import PlannedMachine, Workload, step_seconds
from grpo_megatron.planning.gpus import GPUS, REFERENCE, Gpu
from grpo_megatron.planning.run_page import describe_run
from grpo_megatron.planning.search import Fit, PlannedLayout, fit, nearest_layouts
from grpo_megatron.planning.traffic import border_traffic

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked


# -- Warnings: what works, but costs more than the user may think ------------------------------------------------------

IDLE = 0.02  # a share of idle ranks that is worth a warning
BUBBLE = 0.2  # a share of the pipeline's time


def plan_warnings(
    config: Config, models: RunModels, work: Workload, machine: PlannedMachine, found: Fit | None, checked: Checked
) -> Iterator[str]:
    """`found`: the fit to a GPU, if one was named."""
    yield from _groups_over_nodes(config, work, machine)
    if found is not None and found.cache is not None:
        yield from _small_cache(config, work, machine, found)
    yield from _copied_cache(config, models)
    yield from _uneven_batches(config, work, machine)
    yield from _pipeline_bubble(config, work, machine)
    yield from _few_rows(config, checked)


def core_warning(config: Config, world_size: int) -> Iterator[str]:
    """Ranks that share the cores of this machine, which `world_size` ranks are planned for."""
    cores = os.cpu_count() or 1
    ranks = min(config.trainer.n_gpus_per_node, world_size)
    if ranks > cores:
        yield (
            f"{ranks} ranks on this machine's {cores} cores: each gets {cores / ranks:.2g} of one; lower"
            " trainer.n_gpus_per_node, or expect the step to take longer by that factor"
        )


def _groups_over_nodes(config: Config, work: Workload, machine: PlannedMachine) -> Iterator[str]:
    arch, per_node = work.arch, machine.per_node
    gpu = machine.gpu
    for key, size in ((TP, config.actor.megatron.tensor_model_parallel_size), (ROLLOUT_TP, _rollout_tp(config))):
        if size > 1 and (per_node % size if size < per_node else size > per_node):
            megabytes = 4 * arch.num_layers * arch.hidden_size * work.itemsize * (size - 1) / size / 1e6
            megabytes /= 2 if key == ROLLOUT_TP else 1  # an all-reduce is two of the four transfers per layer
            yield (
                f"{key}={size} spans nodes of {per_node}: {megabytes:.3g} MB per token and forward pass cross the"
                f" network, at {gpu.network_bytes_per_s / 1e9:g} GB/s per GPU instead of"
                f" {gpu.nvlink_bytes_per_s / 1e9:g}; set a divisor of {per_node}"
            )


def _rollout_tp(config: Config) -> int:
    return config.rollout.tensor_model_parallel_size if config.draws else 1


def _small_cache(config: Config, work: Workload, machine: PlannedMachine, found: Fit) -> Iterator[str]:
    assert found.cache is not None
    at_once = found.cache.sequences(found.length)
    wanted = min(config.rollout.max_num_seqs, math.ceil(work.samples * _rollout_tp(config) / machine.world_size))
    share = f"rollout.gpu_memory_utilization={config.rollout.gpu_memory_utilization:g}"
    if found.cache.cache <= 0 or not at_once:
        yield (
            f"the engine's weights of {found.cache.weights / 2**30:.2f} GiB and workspace of about"
            f" {found.cache.workspace / 2**30:.2f} GiB leave {max(0.0, found.cache.cache) / 2**30:.2f} GiB of its"
            f" {config.rollout.gpu_memory_utilization * found.device / 2**30:.2f} GiB for the cache, less than one"
            f" sequence of {found.length:,} tokens; raise {share} or {ROLLOUT_TP}={_rollout_tp(config)}"
        )
    elif at_once < wanted / 2:
        yield (
            f"the engine's cache holds {at_once:,} sequences of {found.length:,} tokens, and {wanted:,} are to be drawn"
            f" at once: long responses wait or are computed again; raise {share} or {ROLLOUT_TP}={_rollout_tp(config)}"
        )


def _copied_cache(config: Config, models: RunModels) -> Iterator[str]:
    tp, groups = _rollout_tp(config), models.arch.num_query_groups
    if models.arch.latent is not None and tp > 1:
        yield f"{ROLLOUT_TP}={tp}: the latents of each token are in the cache of all {tp} ranks of an engine"
    elif tp > groups:
        yield (
            f"{ROLLOUT_TP}={tp} and {groups} key-value heads: each head is in the cache of {tp // groups} ranks;"
            f" {groups} or fewer would hold as many tokens per GPU"
        )


def _uneven_batches(config: Config, work: Workload, machine: PlannedMachine) -> Iterator[str]:
    dp = data_parallel_size(config, machine.world_size)
    shares = [("each optimizer step", work.samples * work.epochs // work.updates, dp, "data-parallel ranks")]
    if work.draws:
        shares.append(("a step", work.samples, machine.world_size // _rollout_tp(config), "engines"))
    for what, samples, parts, noun in shares:
        most = math.ceil(samples / parts)
        idle = 1 - samples / parts / most
        if idle > IDLE:
            yield (
                f"{samples:,} samples of {what} over {parts:,} {noun}: {most:,} at most and"
                f" {samples / parts:.3g} on average, so {idle:.0%} of them are idle; choose a multiple of {parts:,}"
                " (data.train_batch_size x rollout.n, actor.ppo_mini_batch_size)"
            )


def _pipeline_bubble(config: Config, work: Workload, machine: PlannedMachine) -> Iterator[str]:
    pp = config.actor.megatron.pipeline_model_parallel_size
    length = config.data.max_prompt_length + config.data.max_response_length
    per_rank = work.samples * work.epochs / work.updates / data_parallel_size(config, machine.world_size)
    tokens = per_rank * length
    count = max(1, math.ceil(tokens / config.actor.ppo_max_token_len_per_gpu))
    bubble = (pp - 1) / (count + pp - 1)
    if bubble > BUBBLE:
        yield (
            f"at most {count} micro-batches per optimizer step for {pp} pipeline stages: {bubble:.0%} of the update is"
            " idle; lower actor.ppo_max_token_len_per_gpu or actor.megatron.pipeline_model_parallel_size"
        )


def _few_rows(config: Config, checked: Checked) -> Iterator[str]:
    rows = len(checked.train_prompts) or len(checked.offline_groups)
    batches = [("data.train_batch_size", config.data.train_batch_size, rows)]
    if config.sft.steps:
        batches.append(("sft.train_batch_size", config.sft.train_batch_size, len(checked.supervised_rows)))
    for key, batch, found in batches:
        if 0 < found < batch:
            yield f"{key}={batch} and {found} rows: every step has each row {batch / found:.2g} times on average"


# -- The verdict: whether the run fits a GPU, what to change if not, and the nearest layouts that do -------------------

PAGE_WIDTH = 120  # characters per line of a plan, where the width of the terminal is not known


def verdict_lines(
    config: Config, models: RunModels, work: Workload, machine: PlannedMachine, found: Fit, width: int = PAGE_WIDTH
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


def verdict_without_gpu(config: Config, models: RunModels, world_size: int) -> Iterator[str]:
    """Which of the known GPUs fit."""
    if config.trainer.device == "cpu":
        yield "NO VERDICT for trainer.device=cpu: only the memory of GPUs is counted"
        return
    fits = {name: fit(config, models, world_size, gpu.usable_bytes).fits for name, gpu in GPUS.items()}
    yield "--gpu NAME or --gpu GIB says what to change, and which layouts fit."
    good, bad = ([name for name in GPUS if fits[name] == value] for value in (True, False))
    yield f"FITS {', '.join(good) or 'none of the known GPUs'}" + (f"; DOES NOT FIT {', '.join(bad)}" if bad else "")


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
    models = checked.models(config)
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


def _border_lines(config: Config, models: RunModels, work: Workload, world_size: int) -> Iterator[str]:
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
