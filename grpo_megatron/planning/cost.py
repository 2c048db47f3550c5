"""The estimated seconds of a training step in a layout. Arithmetic alone: a layout takes microseconds.

Not counted: rewards, environments, validation, checkpoints, the exchange of tokens, and the host's part of the step.
Context-parallel ranks count as data-parallel ones; what they exchange is not counted.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from grpo_megatron.algo.losses import needs_old_logprobs, policy_losses, reads_reference, reasons_for_old_pass
from grpo_megatron.config import Config, LoraConfig, MegatronConfig
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.engine_cache import MOST_SEQUENCES, engine_weights, kv_token_bytes
from grpo_megatron.models.flops import active_parameters, flops_per_pass, tower_parameters
from grpo_megatron.models.lora.table import lora_rows
from grpo_megatron.planning.gpus import (
    ENGINE_STEP_S,
    EXPERTS,
    FP8_SPEEDUP,
    HALF_TOKENS,
    HALF_WIDTH,
    LINK,
    MATMUL,
    NETWORK,
    NETWORK_REDUCE_S,
    REDUCE_S,
    SAMPLE_S,
    SWITCH_S,
    PlannedMachine,
)
from grpo_megatron.planning.layout import Layout
from grpo_megatron.planning.parameters import DTYPE_BYTES, RunModels, frozen_parameters, image_tokens

# -- The workload of a step --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoraSize:
    """The adapters of a model."""

    rank: int
    layers: int  # adapted weights
    trained: int  # parameters of all adapters
    adapted: int  # parameters of the adapted weights
    is_merged: bool

    @classmethod
    def of(cls, lora: LoraConfig, arch: Architecture) -> LoraSize | None:
        """Counts the adapters of a model; None without LoRA."""
        if lora.rank is None:
            return None
        rows = list(lora_rows(arch, lora).values())
        trained = sum(math.prod(shape) for row in rows for shape in row.hf_shapes(arch))
        adapted = [row.base.hf_shapes(arch)[target] for row in rows[::2] for target in row.targets]
        return cls(lora.rank, len(adapted), trained, sum(map(math.prod, adapted)), lora.mode == "merged")

    @property
    def merge_bytes(self) -> float:
        """The bytes that a device's memory would move in the time that merging all adapted weights once takes.

        8 per element for a copy of W0, W0 and the result in bfloat16; and the product and the sum of each of `rank` terms, two
        float32 operations: at the 33 x 10^12 per second of an H100, the time of 0.2 bytes (models/lora/merge_kernel.py).
        """
        return self.adapted * (8 + 0.2 * self.rank)


@dataclass(frozen=True)
class Workload:
    """The work of one training step."""

    arch: Architecture
    samples: int
    samples_per_prompt: int
    prompt_tokens: float
    response_tokens: float
    longest_response: int
    scoring_passes: float = 0.0  # forward passes over all samples before the update, in passes of the policy's size
    epochs: int = 1
    updates: int = 1  # optimizer steps, of all epochs together
    critic_share: float = 0.0  # parameters of the critic / the policy's
    generates: bool = True
    itemsize: int = 2
    max_num_seqs: int = 256
    is_fp8: bool = False
    engine_itemsize: float = 2.0  # bytes of an engine's weight on average, less where it is quantized
    overlaps_gradients: bool = False
    lora: LoraSize | None = None
    frozen: int = 0  # parameters of a vision tower that are not trained
    image_tokens: float = 0.0  # of a prompt's tokens
    trains_tower: bool = False
    teachers: tuple[tuple[Architecture, MegatronConfig | None], ...] = ()  # with a layout of its own, or the policy's
    expert_rows: int = 0  # CHORD's, in the passes alone; as long as samples here

    @property
    def sample_tokens(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens_in_flight(self) -> float:
        """The mean tokens of a sequence while it is decoded."""
        return self.prompt_tokens + self.response_tokens / 2

    @property
    def num_trained(self) -> int:
        """The number of parameters with gradients."""
        return self.arch.num_parameters() - self.frozen if self.lora is None else self.lora.trained

    @property
    def num_sent(self) -> int:
        """The number of parameters that a weight sync sends."""
        return self.num_trained + (self.frozen if self.lora is None else 0)

    @property
    def rows(self) -> int:
        """The rows of a step's passes."""
        return self.samples + self.expert_rows

    @property
    def tokens(self) -> float:
        """The tokens of all rows of a step; each row counts its prompt."""
        return self.rows * self.sample_tokens

    @classmethod
    def of(cls, config: Config, models: RunModels, response_tokens: float | None = None) -> Workload:
        """Describes a step of `config`. By default prompt and response are half as long as their maxima.

        Half of the prompt of a model that reads images is images.
        """
        actor, algorithm, data = config.actor, config.algorithm, config.data
        n = max([config.rollout.n, *(source.n or 0 for source in data.sources)])
        if algorithm.source == "file":
            n = 2 if policy_losses.facts(actor.loss_mode).paired else 1
        size, vision, decoder = models.arch.num_parameters(), models.arch.vision, replace(models.arch, vision=None)
        reasons = reasons_for_old_pass(algorithm, actor, data.train_batch_size)
        passes = float(needs_old_logprobs(algorithm, actor) and bool(reasons))
        passes += reads_reference(algorithm, actor)
        passes += sum(arch.num_parameters() for arch in models.reward_archs) / size
        return cls(
            arch=models.arch,
            samples=data.train_batch_size * n,
            samples_per_prompt=n,
            expert_rows=algorithm.chord.batch_size,
            prompt_tokens=data.max_prompt_length / 2,
            response_tokens=data.max_response_length / 2 if response_tokens is None else response_tokens,
            longest_response=data.max_response_length,
            scoring_passes=passes,
            epochs=actor.ppo_epochs,
            updates=actor.num_updates(1, data.train_batch_size),
            critic_share=models.critic.num_parameters() / size if models.critic is not None else 0.0,
            generates=config.has_rollouts and algorithm.source != "file",
            itemsize=DTYPE_BYTES[config.model.dtype],
            max_num_seqs=config.rollout.max_num_seqs or MOST_SEQUENCES,  # `estimated` has the derived number
            is_fp8=actor.megatron.fp8.recipe is not None,
            engine_itemsize=engine_weights(config.rollout, decoder, DTYPE_BYTES[config.model.dtype])
            * config.rollout.tensor_model_parallel_size
            / decoder.num_parameters(),
            overlaps_gradients=actor.megatron.overlap_grad_reduce,
            lora=LoraSize.of(actor.lora, models.arch),
            frozen=frozen_parameters(models.arch, actor.vision),
            image_tokens=min(data.max_prompt_length / 4, image_tokens(data, vision)[1]) if vision else 0.0,
            trains_tower=not actor.vision.is_frozen,
            teachers=tuple(
                (arch, one.layout(actor).megatron if one.tensor_model_parallel_size is not None else None)
                for arch, one in zip(models.teachers, config.local_teachers.values(), strict=True)
            ),
        )


# -- Generation --------------------------------------------------------------------------------------------------------


def generation_seconds(work: Workload, layout: Layout, machine: PlannedMachine, cache_tokens: float) -> float:
    """Estimates generation by engines with room for `cache_tokens` tokens each.

    An engine decodes b sequences at a time: as many as its samples, its cache and max_num_seqs allow. While samples wait,
    b stays: r (S / b - 1) decoding steps, for S samples of r tokens. Then the last b sequences end one by one: as many
    decoding steps as the longest response has tokens.
    """
    engines = machine.world_size // layout.rollout_tp
    samples = max(1, math.ceil(work.samples / engines))
    at_once = max(1.0, min(samples, work.max_num_seqs, cache_tokens / work.tokens_in_flight))
    waiting = max(0.0, samples / at_once - 1) * work.response_tokens
    running_out = max(1.0, at_once * work.response_tokens / work.longest_response)
    seconds = waiting * _step_seconds(work, layout, machine, at_once)
    seconds += work.longest_response * _step_seconds(work, layout, machine, running_out)
    return seconds + _prompt_seconds(work, layout, machine, samples)


def _step_seconds(work: Workload, layout: Layout, machine: PlannedMachine, sequences: float) -> float:
    """Estimates one decoding step of an engine with b sequences: max(memory, compute) + reduce + host.

    memory    the weights that b tokens visit, and the cache that b sequences see, read once, over the engine's ranks
    compute   2 N b FLOP, N the active parameters
    reduce    two all-reduces per layer between the engine's ranks
    host      ENGINE_STEP_S + SAMPLE_S b
    """
    arch, tp = work.arch, layout.rollout_tp
    seen = [min(work.tokens_in_flight, arch.window_of(layer) or math.inf) for layer in range(arch.num_layers)]
    cache = sequences * sum(seen) / len(seen) * kv_token_bytes(arch, tp, work.itemsize)
    memory = machine.read_seconds(_visited_weights(arch, sequences) * work.engine_itemsize / tp + cache)
    active = active_parameters(arch)
    compute = 2 * active * sequences / (tp * machine.gpu.tflops * 1e12 * MATMUL)
    reduce = 0.0
    if tp > 1:
        latency = REDUCE_S if tp <= machine.per_node else NETWORK_REDUCE_S
        size = 2 * sequences * arch.hidden_size * work.itemsize * (tp - 1) / tp
        reduce = 2 * arch.num_layers * (latency + size / machine.link(tp))
    return max(memory, compute) + reduce + ENGINE_STEP_S + SAMPLE_S * sequences


def _visited_weights(arch: Architecture, tokens: float) -> float:
    """Counts the parameters that a batch of `tokens` tokens reads: of the experts those that at least one token visits.

    A vision tower is not read.
    """
    size = replace(arch, vision=None).num_parameters()
    if not arch.num_experts:
        return size
    not_visited = (1 - arch.experts_per_token / arch.num_experts) ** tokens
    return size - _expert_parameters(arch) * not_visited


def _prompt_seconds(work: Workload, layout: Layout, machine: PlannedMachine, samples: int) -> float:
    """Estimates the prefill of each prompt, once per engine: its samples are neighbours, and share the prefix.

    The engine's ranks divide the images.
    """
    prompts = math.ceil(samples / work.samples_per_prompt)
    flops = 2 * active_parameters(work.arch) * prompts * work.prompt_tokens
    flops += 2 * tower_parameters(work.arch) * prompts * work.image_tokens
    return flops / (layout.rollout_tp * machine.gpu.tflops * 1e12 * MATMUL)


# -- Training ----------------------------------------------------------------------------------------------------------

GRADIENT_SYNC_BYTES = 4 + 2  # float32 gradients are reduced, bfloat16 weights are gathered


@functools.cache
def _flops_per_sample(arch: Architecture, tokens: int) -> float:
    """Counts the FLOP of a forward and backward pass over one sequence."""
    return flops_per_pass(arch, [tokens])


def pass_seconds(work: Workload, layout: Layout, machine: PlannedMachine, *, backward: bool) -> float:
    """Estimates one pass over all samples, forward and backward or forward alone, without gradient sync.

        (compute + exchange + merging) x largest stage / mean stage x (m + pp - 1) / m,  m micro-batches per optimizer step

    compute   FLOP of models/flops.py / (GPUs x peak x fraction); recomputation adds a third to an update. Split LoRA has no
              gradients of weights: two thirds of the FLOP
    fraction  MATMUL (or EXPERTS x w / (w + HALF_WIDTH), for w rows of an expert per rank) x t / (t + HALF_TOKENS), for a
              micro-batch of t tokens
    merging   of merged LoRA, once per micro-batch and direction
    """
    replicas = layout.replicas(machine.world_size)
    per_update = work.tokens * work.epochs / work.updates / replicas
    micro_batch = min(layout.tokens, max(per_update, 1.0))
    count = max(1, math.ceil(per_update / micro_batch))
    flops = work.rows * _flops_per_sample(work.arch, round(work.sample_tokens)) / (1 if backward else 3)
    recompute = 4 / 3 if backward and layout.recompute else 1.0
    share, merging = recompute, 0.0  # of a forward and backward pass
    if work.lora is not None and work.lora.is_merged:
        merges = count * (2 if backward else 1)
        merging = merges * machine.read_seconds(work.lora.merge_bytes / (layout.tp * layout.pp))
    elif work.lora is not None and backward:
        share -= 1 / 3
    width = work.arch.ffn_hidden_size / layout.tp  # of an expert, on one rank
    fraction = EXPERTS * width / (width + HALF_WIDTH) if work.arch.num_experts else MATMUL
    fraction *= micro_batch / (micro_batch + HALF_TOKENS) * (FP8_SPEEDUP if work.is_fp8 else 1.0)
    if work.trains_tower:  # on every rank of the first stage; features of a frozen one are kept
        tower = (6 if backward else 2) * tower_parameters(work.arch) * work.rows * work.image_tokens
        flops += tower * layout.tp * layout.pp / share
    compute = flops * share / (machine.world_size * machine.gpu.tflops * 1e12 * fraction)
    exchange = _exchange_seconds(work, layout, machine) * (3 * recompute if backward else 1)
    return (compute + exchange + merging) * layout.largest_stage(work.arch.num_layers) * (count + layout.pp - 1) / count


def _exchange_seconds(work: Workload, layout: Layout, machine: PlannedMachine) -> float:
    """Estimates tensor- and expert-parallel communication of a forward pass over one rank's tokens.

    tp  4 h bytes x (tp - 1) / tp per token and layer; twice as much backward
    ep  2 copies of the hidden state of each of a token's experts, per layer; twice as much backward
    """
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
    """Estimates reducing gradients and gathering weights once, in a ring over the data-parallel ranks."""
    replicas = layout.replicas(machine.world_size)
    experts = 0 if work.lora is not None else _expert_parameters(work.arch)
    dense = (work.num_trained - experts) / (layout.tp * layout.pp)
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
    """Estimates all optimizer steps of a training step, the critic's too, and the optimizer's way to the host and back.

    With overlap_grad_reduce only the part of the gradient sync counts that takes longer than the backward pass.
    """
    one = pass_seconds(work, layout, machine, backward=True)
    gradients = gradient_seconds(work, layout, machine) * work.updates
    if work.overlaps_gradients:
        gradients = max(0.0, gradients - work.epochs * one * 2 / 3)
    local = work.num_trained / (layout.tp * layout.pp)
    replicas = layout.replicas(machine.world_size)
    state = 12 * local / (replicas if layout.distributed_optimizer else 1)
    adam = machine.read_seconds(2 * state + 8 * local) * work.updates
    offload = machine.host_seconds(2 * state) if layout.offload_optimizer and work.generates else 0.0
    return (work.epochs * one + gradients + adam + offload) * (1 + work.critic_share)


def scoring_seconds(work: Workload, layout: Layout, machine: PlannedMachine) -> float:
    """Estimates log-probabilities, scores of reward models and teachers, values, and the way of frozen models to the GPU."""
    passes = work.scoring_passes + work.critic_share
    seconds = 0.0
    if passes:
        weights = work.arch.num_parameters() * work.itemsize / (layout.tp * layout.pp)
        offload = machine.host_seconds(weights) if layout.offload_reference else 0.0
        seconds = passes * pass_seconds(work, layout, machine, backward=False) + offload
    for arch, megatron in work.teachers:
        local = layout
        if megatron is not None:
            tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
            local = replace(layout, tp=tp, pp=pp, ep=megatron.expert_model_parallel_size)
        experts = _expert_parameters(arch) if arch.num_experts else 0
        weights = work.itemsize * (arch.num_parameters() - experts + experts / local.ep) / (local.tp * local.pp)
        of_teacher = replace(work, arch=arch, lora=None, trains_tower=False)
        # Each row has one teacher: several score equal shares here.
        seconds += pass_seconds(of_teacher, local, machine, backward=False) / len(work.teachers)
        seconds += machine.host_seconds(weights) if local.offload_reference else 0.0
    return seconds


@dataclass(frozen=True)
class StepSeconds:
    """The estimated seconds of the parts of a training step. `overlaps`: other ranks generate while these train."""

    generate: float
    score: float
    update: float
    sync: float
    overlaps: bool = False

    @property
    def step(self) -> float:
        training = self.score + self.update + self.sync
        return max(self.generate, training) if self.overlaps else self.generate + training


def step_seconds(work: Workload, layout: Layout, machine: PlannedMachine, cache_tokens: float) -> StepSeconds:
    """Estimates a step. `cache_tokens`: room in the cache of one engine; not read if nothing is generated."""
    return StepSeconds(
        generate=generation_seconds(work, layout, machine, cache_tokens) if work.generates else 0.0,
        score=scoring_seconds(work, layout, machine),
        update=update_seconds(work, layout, machine),
        sync=sync_seconds(work, layout, machine) if work.generates else 0.0,
    )


def sync_seconds(work: Workload, layout: Layout, machine: PlannedMachine) -> float:
    """Estimates one weight sync: each engine's shard over NVLink, and the shards that a node lacks over the network.

    NCCL runs both on one stream, so the times add up (sync/plan.py; traffic.py is exact). Adapters are merged there.
    """
    size = work.num_sent * work.itemsize
    merging = machine.read_seconds(work.lora.merge_bytes / layout.rollout_tp) if work.lora is not None else 0.0
    per_node = min(machine.per_node, machine.world_size)
    ranks_of_stage = machine.world_size // layout.pp
    stages_in_node = max(1, per_node // ranks_of_stage)
    missing = 1 - min(1.0, stages_in_node / layout.pp)
    network = size * missing / per_node / (machine.gpu.network_bytes_per_s * NETWORK)
    within = size / layout.rollout_tp / (machine.gpu.nvlink_bytes_per_s * LINK)
    return network + within + merging + SWITCH_S
