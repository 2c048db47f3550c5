"""Warnings of a plan: what is allowed and works, but costs more than the user may think. Each with its numbers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from grpo_megatron.checks.layout import ROLLOUT_TP, TP, data_parallel_size
from grpo_megatron.config import Config
from grpo_megatron.planning.fit import Fit
from grpo_megatron.planning.machine import PlannedMachine
from grpo_megatron.planning.models import PlannedModels
from grpo_megatron.planning.workload import Workload

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked

IDLE = 0.02  # a share of idle ranks that is worth a warning
BUBBLE = 0.2  # a share of the pipeline's time


def plan_warnings(
    config: Config, models: PlannedModels, work: Workload, machine: PlannedMachine, found: Fit | None, checked: Checked
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


def _copied_cache(config: Config, models: PlannedModels) -> Iterator[str]:
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
