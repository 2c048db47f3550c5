"""Seconds that the engines need to draw a step's samples: an estimate with the fractions of speeds.py.

An engine decodes b sequences at a time: as many as its samples, its cache and max_num_seqs allow. One decoding step:

    memory    the weights that b tokens visit, and the cache of b sequences, read once, over the engine's ranks
    compute   2 N b FLOP, N the active parameters; the slower of memory and compute counts
    reduce    two all-reduces per layer between the engine's ranks
    host      ENGINE_STEP_S + SAMPLE_S b

While samples wait, b stays; then the last b sequences run out, until the longest response has its last token. There are
r (S / b - 1) steps of the first kind, for S samples of r tokens, and as many of the second kind as the longest response has.
"""

from __future__ import annotations

import math

from grpo_megatron.checks.engine_cache import kv_token_bytes
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.flops import model_shape
from grpo_megatron.planning import speeds
from grpo_megatron.planning.layout import Layout
from grpo_megatron.planning.machine import PlannedMachine
from grpo_megatron.planning.workload import Workload


def generation_seconds(work: Workload, layout: Layout, machine: PlannedMachine, cache_tokens: float) -> float:
    """`cache_tokens`: what the cache of an engine holds."""
    engines = machine.world_size // layout.rollout_tp
    samples = max(1, math.ceil(work.samples / engines))
    in_flight = work.prompt_tokens + work.response_tokens / 2
    at_once = max(1.0, min(samples, work.max_num_seqs, cache_tokens / in_flight))
    waiting = max(0.0, samples / at_once - 1) * work.response_tokens
    running_out = max(1.0, at_once * work.response_tokens / work.longest_response)
    seconds = waiting * _step_seconds(work, layout, machine, at_once)
    seconds += work.longest_response * _step_seconds(work, layout, machine, running_out)
    return seconds + _prompt_seconds(work, layout, machine, samples)


def _step_seconds(work: Workload, layout: Layout, machine: PlannedMachine, sequences: float) -> float:
    """One decoding step of an engine with so many sequences."""
    arch, tp = work.arch, layout.rollout_tp
    in_flight = work.prompt_tokens + work.response_tokens / 2
    cache = sequences * in_flight * kv_token_bytes(arch, tp, work.itemsize)
    memory = machine.read_seconds(_visited_weights(arch, sequences) * work.itemsize / tp + cache)
    active = model_shape(arch).active_parameters
    compute = 2 * active * sequences / (tp * machine.gpu.tflops * 1e12 * speeds.MATMUL)
    reduce = 0.0
    if tp > 1:
        latency = speeds.REDUCE_S if tp <= machine.per_node else speeds.NETWORK_REDUCE_S
        size = 2 * sequences * arch.hidden_size * work.itemsize * (tp - 1) / tp
        reduce = 2 * arch.num_layers * (latency + size / machine.link(tp))
    return max(memory, compute) + reduce + speeds.ENGINE_STEP_S + speeds.SAMPLE_S * sequences


def _visited_weights(arch: Architecture, tokens: float) -> float:
    """Parameters that a batch of `tokens` tokens reads: of the experts those that at least one token visits."""
    if not arch.num_experts:
        return arch.num_parameters()
    layers = arch.num_layers - arch.num_dense_layers
    experts = layers * arch.num_experts * 3 * arch.hidden_size * arch.ffn_hidden_size
    visited = 1 - (1 - arch.experts_per_token / arch.num_experts) ** tokens
    return arch.num_parameters() - experts * (1 - visited)


def _prompt_seconds(work: Workload, layout: Layout, machine: PlannedMachine, samples: int) -> float:
    """Computing each prompt once per engine: its samples are neighbours, and share the prefix."""
    prompts = math.ceil(samples / work.samples_per_prompt)
    flops = 2 * model_shape(work.arch).active_parameters * prompts * work.prompt_tokens
    return flops / (layout.rollout_tp * machine.gpu.tflops * 1e12 * speeds.MATMUL)
