"""Seconds of the forward and backward passes of a step: an estimate with the fractions of speeds.py.

    compute      FLOP of models/flops.py / (GPUs x peak x fraction); recomputation adds a third to an update
    fraction     MATMUL (or EXPERTS) x t / (t + HALF_TOKENS), for a micro-batch of t tokens
    tp           4 h bytes x (tp - 1) / tp per token, layer and forward pass over the links; twice as much backward
    ep           2 copies of the hidden state of each of a token's experts, per layer and forward pass; twice as much backward
    pipeline     (compute + tp + ep) x (m + pp - 1) / m, for m micro-batches per optimizer step; with unequal stages
                 also x the largest / the mean
    gradients    4 + 2 bytes per parameter and optimizer step, in a ring over the data-parallel ranks. With
                 overlap_grad_reduce only the part that takes longer than the backward pass

Context-parallel ranks count as data-parallel ones; what they exchange is not counted.
"""

from __future__ import annotations

import functools
import math

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.flops import flops_per_pass, model_shape
from grpo_megatron.planning import speeds
from grpo_megatron.planning.layout import Layout
from grpo_megatron.planning.machine import PlannedMachine
from grpo_megatron.planning.workload import Workload

GRADIENT_SYNC_BYTES = 4 + 2  # float32 gradients are reduced, bfloat16 weights are gathered


@functools.cache
def _flops_per_sample(arch: Architecture, tokens: int) -> float:
    """FLOP of a forward and backward pass over one sequence."""
    return flops_per_pass(model_shape(arch), [tokens])


def pass_seconds(work: Workload, layout: Layout, machine: PlannedMachine, *, backward: bool) -> float:
    """One pass over all samples: forward and backward, or forward alone; without gradient sync."""
    replicas = layout.replicas(machine.world_size)
    per_update = work.tokens * work.epochs / work.updates / replicas
    micro_batch = min(layout.tokens, max(per_update, 1.0))
    count = max(1, math.ceil(per_update / micro_batch))
    flops = work.samples * _flops_per_sample(work.arch, round(work.sample_tokens)) / (1 if backward else 3)
    recompute = 4 / 3 if backward and layout.recompute else 1.0
    fraction = speeds.EXPERTS if work.arch.num_experts else speeds.MATMUL
    fraction *= micro_batch / (micro_batch + speeds.HALF_TOKENS) * (speeds.FP8_SPEEDUP if work.is_fp8 else 1.0)
    compute = flops * recompute / (machine.world_size * machine.gpu.tflops * 1e12 * fraction)
    exchange = _exchange_seconds(work, layout, machine) * (3 * recompute if backward else 1)
    return (compute + exchange) * layout.largest_stage(work.arch.num_layers) * (count + layout.pp - 1) / count


def _exchange_seconds(work: Workload, layout: Layout, machine: PlannedMachine) -> float:
    """Tensor- and expert-parallel communication of a forward pass over one rank's tokens."""
    arch = work.arch
    replicas = layout.replicas(machine.world_size)
    token_layers = work.tokens / replicas * arch.num_layers / layout.pp
    hidden = arch.hidden_size * work.itemsize
    seconds = token_layers * 4 * hidden * (layout.tp - 1) / layout.tp / machine.link(layout.tp)
    if layout.ep > 1:
        copies = 2 * arch.experts_per_token * hidden / layout.tp * (layout.ep - 1) / layout.ep
        seconds += token_layers * copies / machine.link(layout.tp * layout.ep)
    return seconds


def gradient_seconds(work: Workload, layout: Layout, machine: PlannedMachine) -> float:
    """Reducing gradients and gathering weights once over the data-parallel ranks."""
    replicas = layout.replicas(machine.world_size)
    experts = _expert_parameters(work.arch)
    dense = (work.arch.num_parameters() - experts) / (layout.tp * layout.pp)
    seconds = 0.0
    for size, ranks in ((dense, replicas), (experts / (layout.tp * layout.pp * layout.ep), replicas // layout.ep)):
        if ranks > 1:
            link = machine.link(layout.tp * replicas)
            seconds += size * GRADIENT_SYNC_BYTES * (ranks - 1) / ranks / link
    return seconds


def _expert_parameters(arch: Architecture) -> int:
    layers = arch.num_layers - arch.num_dense_layers
    return layers * arch.num_experts * 3 * arch.hidden_size * arch.ffn_hidden_size


def update_seconds(work: Workload, layout: Layout, machine: PlannedMachine) -> float:
    """All optimizer steps of a training step, the critic's too, and the optimizer's way to the host and back."""
    one = pass_seconds(work, layout, machine, backward=True)
    gradients = gradient_seconds(work, layout, machine) * work.updates
    if work.overlaps_gradients:
        gradients = max(0.0, gradients - work.epochs * one * 2 / 3)
    own = work.arch.num_parameters() / (layout.tp * layout.pp)
    replicas = layout.replicas(machine.world_size)
    state = 12 * own / (replicas if layout.distributed_optimizer else 1)
    adam = machine.read_seconds(2 * state + 8 * own) * work.updates
    offload = machine.host_seconds(2 * state) if layout.offload_optimizer and work.draws else 0.0
    return (work.epochs * one + gradients + adam + offload) * (1 + work.critic_share)


def scoring_seconds(work: Workload, layout: Layout, machine: PlannedMachine) -> float:
    """Log-probabilities of policy and reference, scores of reward models, values; and the reference's way to the GPU."""
    passes = work.scoring_passes + work.critic_share
    if not passes:
        return 0.0
    weights = work.arch.num_parameters() * work.itemsize / (layout.tp * layout.pp)
    offload = machine.host_seconds(weights) if layout.offload_reference else 0.0
    return passes * pass_seconds(work, layout, machine, backward=False) + offload
