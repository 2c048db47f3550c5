"""Bytes of one rank's device in each phase of a run, of its host, and whether a device of a given size has room.

Parameters and vLLM's budget are exact up to padding. The parts in ESTIMATED are estimates. A phase that does not fit
without them is an error; one that does not fit with them is only reported by the plan. Not counted: fragmentation. Compared
with no GPU yet. Critic and reward models are taken to be as large as the policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grpo_megatron.algo.losses import needs_old_logprobs, reads_reference
from grpo_megatron.config import Config
from grpo_megatron.device import device_bytes
from grpo_megatron.models.architecture import MAX_KEPT, Architecture
from grpo_megatron.models.engine_cache import engine_weights
from grpo_megatron.planning.parameters import (
    DTYPE_BYTES,
    GRADIENT_BYTES,
    RunModels,
    StageMemory,
    StageParameters,
    TeacherStages,
    forward_bytes,
    head_bytes,
    image_tokens,
    kept_bytes,
    memory_of_stages,
    merged_bytes,
    pinned_ratio,
    recomputes_all,
    tower_bytes,
    working_bytes,
)

GIB, _MIB = 2**30, 2**20
RESERVED_PARTS = ("CUDA context", "NCCL buffers", "all-reduce", "CUDA graphs")
ESTIMATED = (
    *("FP8 copies", "merged weights", "recorded routes", "activations kept", "images kept", "layer or logits"),
    "sync buckets",
    *RESERVED_PARTS,
)
PARTS = (  # in the order of the plan's rows
    *("weights", "gradients", "copy of weights", "optimizer", "reference", "reward model", "critic", "teachers"),
    *("engine weights", "KV cache", *ESTIMATED),
)


@dataclass(frozen=True)
class Phase:
    """The bytes on the device of one rank of a pipeline stage."""

    name: str
    stage: int
    parts: dict[str, float]
    utilization: float = 0.0  # the share of the device that the engine takes besides `parts`

    @property
    def total(self) -> float:
        """The bytes without the engine's share of the device."""
        return sum(self.parts.values())

    @property
    def certain(self) -> float:
        """The bytes without the engine's share and without estimates."""
        return sum(size for name, size in self.parts.items() if name not in ESTIMATED)

    @property
    def smallest_device(self) -> float:
        """The bytes of the smallest device that fits the phase, estimates included."""
        return self.total / (1 - self.utilization) if self.utilization < 1 else math.inf

    def fits(self, device: float) -> bool:
        return self.total + self.utilization * device <= device

    def is_impossible(self, device: float) -> bool:
        """Returns True if the phase does not fit even without the estimated parts."""
        return self.certain + self.utilization * device > device


@dataclass(frozen=True)
class _Rank:
    """One rank of a stage, with the sizes of everything that its phases have."""

    config: Config
    arch: Architecture
    world_size: int
    stage: int
    parameters: StageParameters
    memory: StageMemory
    engine_weights: float
    reserved: dict[str, float]
    critic: StageParameters | None

    def phases(self) -> Iterator[Phase]:
        """Yields the phases in their order.

        load      the policy is built. DDP allocates gradient buffers and, with the distributed optimizer, a buffer that the
                  weights are copied into
        start     the engine is built, with the policy's gradient buffers offloaded if `offload_optimizer` is on. vLLM requires
                  gpu_memory_utilization x device to be free before it allocates anything: `request_memory` of vLLM's
                  v1/worker/utils.py raises otherwise. The policy's bytes are not part of that budget
        sync      the engine's weights are awake and receive the policy's, in buckets
        rollout   the engine has its whole budget: weights, activations, and the rest as the KV cache
        rewards   frozen reward models score the responses, one after the other
        teacher   teachers score the responses, one after the other
        scoring   log-probabilities of the policy and the reference; gradient buffers and optimizer are on the device again
        critic    values and the critic's update
        update    forward and backward passes, optimizer step
        learn     the reward model's update (iterative GRPO)

        A run that generates nothing has no start, sync and rollout, and no scoring where nothing reads log-probabilities
        from before the update. A save needs nothing on the device; `host_parts` counts what it needs on the host.
        """
        megatron, memory = self.config.actor.megatron, self.memory
        gradients = {"gradients": memory.gradients}
        copy = {"copy of weights": memory.trained} if megatron.use_distributed_optimizer else {}
        yield self._phase("load", {**gradients, **copy})
        if self.config.colocates:
            utilization = self.config.rollout.gpu_memory_utilization
            yield self._phase("start", {} if megatron.offload_optimizer else gradients, utilization)
            sync = self._beside_engine(needs_reference=self.config.algorithm.source == "initial")
            buckets = self.config.rollout.update_weights_bucket_megabytes * 2**20
            yield self._phase("sync", {**sync, "engine weights": self.engine_weights, "sync buckets": buckets})
            yield self._rollout()
        trained = self._trained()
        if memory.frozen_rewards:
            offloaded = max(memory.frozen_rewards) if megatron.offload_reference else 0.0
            parts = {**trained, "reward model": trained["reward model"] + offloaded}
            parts["reference"] = 0.0 if megatron.offload_reference else memory.reference
            yield self._phase("rewards", {**parts, **self._forward(is_policy=False)})
        recorded = {"recorded routes": route_bytes(self.config, self.arch, self.world_size, "old")}
        if self.config.has_rollouts or self._is_scored():
            yield self._phase("scoring", {**trained, **recorded, "reference": memory.reference, **self._forward()})
        trained["reference"] = 0.0 if megatron.offload_reference else memory.reference
        if memory.teacher_weights:
            onloaded = max(memory.teacher_weights) if megatron.offload_reference else 0.0
            parts = {**trained, **recorded, "teachers": trained["teachers"] + onloaded}
            yield self._phase("teacher", {**parts, "layer or logits": memory.teacher_working})
        if memory.critic:
            yield self._phase("critic", {**trained, "critic": memory.critic, **self._backward(self.critic)})
        yield self._phase("update", {**trained, **recorded, **self._backward(self.parameters)})
        if memory.reward_training:
            learning = {**trained, "reward model": trained["reward model"]}
            if megatron.offload_optimizer:
                learning["reward model"] += memory.reward_training
            yield self._phase("learn", {**learning, **self._backward(None)})

    def _phase(self, name: str, parts: dict[str, float], utilization: float = 0.0) -> Phase:
        never_sleeps = self.config.colocates and not self.config.rollout.free_cache_engine
        if never_sleeps and name not in ("load", "start", "rollout"):
            parts.pop("engine weights", None)
            utilization = self.config.rollout.gpu_memory_utilization
        reserved = {**self.reserved, "CUDA graphs": 0.0} if name == "load" or utilization else self.reserved
        sizes = {"weights": self.memory.weights, **parts, **reserved}
        return Phase(name, self.stage, {part: size for part, size in sizes.items() if size}, utilization)

    def _is_scored(self) -> bool:
        """Returns True if log-probabilities are computed besides those of the update."""
        algorithm, actor = self.config.algorithm, self.config.actor
        reads_logprobs = needs_old_logprobs(algorithm, actor) or reads_reference(algorithm, actor)
        return reads_logprobs or bool(self.config.data.val_loss_files)

    def _rollout(self) -> Phase:
        rollout = self.config.rollout
        parts = {**self._beside_engine(needs_reference=False), "FP8 copies": float(self.parameters.fp8)}
        if cache := rollout.engine_kwargs.get("kv_cache_memory_bytes"):  # vLLM then ignores its budget after the start
            parts |= {"engine weights": self.engine_weights, "KV cache": float(cache)}
            return self._phase("rollout", parts)
        return self._phase("rollout", parts, rollout.gpu_memory_utilization)

    def _trained(self) -> dict[str, float]:
        """Sizes what belongs to models that are trained, outside rollouts."""
        memory = self.memory
        megatron = self.config.actor.megatron
        reward = memory.reward_model - (memory.reward_training if megatron.offload_optimizer else 0)
        reward -= sum(memory.frozen_rewards) if megatron.offload_reference else 0
        critic = memory.critic_weights if megatron.offload_optimizer else memory.critic
        critic = 0.0 if self.config.critic.offload else critic
        teachers = memory.teacher_heads if megatron.offload_reference else memory.teachers
        parts = {"gradients": memory.gradients, "optimizer": memory.optimizer, "teachers": teachers}
        return {**parts, "reward model": reward, "critic": critic}

    def _beside_engine(self, *, needs_reference: bool) -> dict[str, float]:
        """Sizes what is on the device besides the policy's weights while the engine is awake."""
        megatron = self.config.actor.megatron
        parts = self._trained()
        if megatron.offload_optimizer:
            parts["gradients"] = parts["optimizer"] = 0.0
        if needs_reference or not megatron.offload_reference:
            parts["reference"] = self.memory.reference
        return parts

    # FP8 copies: Transformer Engine quantizes the weights of linear layers in each pass, to one byte, and where there is a
    # backward pass to a second one in the other layout. They are freed at the end of the pass (models/forward.py); the probe
    # of a rollout is one.

    def _forward(self, *, is_policy: bool = True) -> dict[str, float]:
        actor, itemsize = self.config.actor, DTYPE_BYTES[self.config.model.dtype]
        head = head_bytes(self.arch, actor, itemsize, backward=False) if is_policy and self._has_head() else 0.0
        working = max(forward_bytes(self.arch, actor, itemsize), head, self._tower()[1] if is_policy else 0.0)
        merged = merged_bytes(self.parameters, actor.lora, actor, itemsize, backward=False) if is_policy else 0.0
        return {"FP8 copies": float(self.parameters.fp8), "merged weights": merged, "layer or logits": working}

    def _backward(self, model: StageParameters | None) -> dict[str, float]:
        """Sizes a forward and backward pass. `model`: the policy's or the critic's stage; None: a reward model's."""
        actor, itemsize, layers = self.config.actor, DTYPE_BYTES[self.config.model.dtype], self.parameters.layers
        is_policy, merged = model is self.parameters, 0.0
        if model is not None:
            lora = actor.lora if is_policy else self.config.critic.lora
            merged = merged_bytes(model, lora, actor, itemsize, backward=True)
        tower, of_image = self._tower() if is_policy else (0.0, 0.0)
        is_full, head = bool(self.config.teachers) and self.config.distillation.reads_states, 0.0
        if is_policy and self._has_head():
            head = head_bytes(self.arch, actor, itemsize, backward=True, has_full_divergence=is_full)
        return {
            "FP8 copies": 2.0 * self.parameters.fp8,
            "merged weights": merged,
            "activations kept": kept_bytes(self.arch, actor, itemsize, stage=self.stage, layers=layers),
            "images kept": tower,
            "layer or logits": max(working_bytes(self.arch, actor, itemsize, layers=layers), head, of_image),
        }

    def _tower(self) -> tuple[float, float]:
        if self.stage:
            return 0.0, 0.0
        return tower_bytes(self.config, self.arch, DTYPE_BYTES[self.config.model.dtype])

    def _has_head(self) -> bool:
        return self.stage == self.config.actor.megatron.pipeline_model_parallel_size - 1


def memory_phases(
    config: Config,
    arch: Architecture,
    world_size: int,
    policy: list[StageParameters],
    reward_models: Sequence[list[StageParameters]],
    critic: list[StageParameters] | None = None,
    teachers: TeacherStages | tuple[()] = (),
    stage: int | None = None,
) -> list[Phase]:
    """Lists every phase of the run, each of the pipeline stage that needs most in it, or of one stage."""
    memories = memory_of_stages(config, world_size, policy, reward_models, critic, teachers)
    engine = engine_weights(config.rollout, arch, DTYPE_BYTES[config.model.dtype])
    reserved = reserved_bytes(config, arch, world_size)

    def rank(number: int) -> _Rank:
        of_stage = policy[number], memories[number], engine, reserved, critic[number] if critic else None
        return _Rank(config, arch, world_size, number, *of_stage)

    if stage is not None:
        return list(rank(stage).phases())
    stages = [
        list(rank(number).phases())
        for number in range(len(policy))
        # A middle stage that is like the one before needs no more: it keeps activations of fewer micro-batches.
        if not 0 < number < len(policy) - 1
        or (policy[number], memories[number]) != (policy[number - 1], memories[number - 1])
    ]
    return [max(same, key=lambda phase: phase.total) for same in zip(*stages, strict=True)]


def route_bytes(config: Config, arch: Architecture, world_size: int, kind: str) -> float:
    """Returns the most bytes of a step's routes on a rank, where `actor.moe.route_replay` is `kind`.

    engine: all layers of its replica's sequences, on the host. old: 2 bytes for each expert of its local layers and tokens.
    """
    if (moe := config.actor.moe).route_replay != kind:
        return 0.0
    megatron, data = config.actor.megatron, config.data
    ranks = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
    tokens = data.train_batch_size * config.rollout.n * (data.max_prompt_length + data.max_response_length)
    per_token = arch.route_bytes if moe.route_replay == "engine" else 2 * arch.num_routes / ranks
    return tokens * per_token * ranks / world_size


def image_bytes(config: Config, arch: Architecture, world_size: int, *, has_reference: bool) -> float:
    """Returns the most bytes of images on a rank's host: a step's pixels, one image's patches, features of frozen towers."""
    if (vision := arch.vision) is None:
        return 0.0
    megatron, batch = config.actor.megatron, config.data.train_batch_size
    ranks = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    in_turns = config.rollout.multi_turn.environment is not None
    samples = math.ceil(batch * config.rollout.n * ranks / world_size)  # of a replica
    largest, together = image_tokens(config.data, vision, in_turns=in_turns)
    per_token = 3 * (vision.patch * vision.merge) ** 2  # two frames of float32, for an image at a time
    kept = MAX_KEPT * (config.actor.vision.is_frozen + has_reference)
    return per_token * ((samples if in_turns else min(batch, samples)) * together + 8 * largest) + kept


# -- Reserved by CUDA, NCCL and a sleeping engine ----------------------------------------------------------------------
# All sizes are estimates from sources and published reports. Compared with no GPU yet.

# torch alone takes 0.3 GiB (pytorch issue 107667). Assumed: 0.2 more for the kernels of Transformer Engine, cuDNN and vLLM,
# which are loaded at their first call, and for cuBLAS's workspace.
CONTEXT = 512 * _MIB
# Buffers for three protocols: 0.5 + 4.7 + 4 MiB (LL, LL128, NCCL_BUFFSIZE) are received into, and sending takes 2 MiB.
CONNECTION = 12 * _MIB
# NCCL_CUMEM_ENABLE=0 (processes/variables.py) makes a communicator connect its rings and its trees at its start, not when they
# are first used (init.cc: runtimeConn). Per channel a ring has one connection, and a tree of more than two ranks one more, in the
# other direction of the same chain. An 8 x H100 node has 24 channels. A communicator that sends and receives has connections
# on 32 channels to each peer of its node: 7 peers took 3.3 GB at the first message (NCCL issue 1685). Peers on other nodes
# share one buffer.
CHANNELS, PEER_CHANNELS = 24, 32
# vLLM 0.32, for an engine of several GPUs of one node (custom_all_reduce.py, all_reduce_utils.py): 8 MiB of messages, 8 MiB
# of addresses, 16 MiB to reduce and scatter, and up to 64 MiB of symmetric memory.
ALL_REDUCE = 96 * _MIB
LARGEST_ALL_REDUCE = 8  # GPUs of an engine that use these buffers
# They stay while the engine sleeps. vLLM reports 0.21 GiB for a model of 1B (pull request 11349) and 0.36 GiB for a larger
# one. While the engine is awake they are part of its share (from vLLM 0.21 on).
GRAPHS = 512 * _MIB


def reserved_bytes(config: Config, arch: Architecture, world_size: int) -> dict[str, float]:
    """Sizes each of RESERVED_PARTS on one rank, while its engine sleeps."""
    rollout = config.rollout
    size = rollout.tensor_model_parallel_size if config.colocates else 1
    has_buffers = 1 < size <= min(LARGEST_ALL_REDUCE, config.trainer.n_gpus_per_node)
    has_graphs = config.colocates and not rollout.enforce_eager
    channels = num_chains(config, arch, world_size) * CHANNELS
    channels += num_node_peers(config, world_size) * PEER_CHANNELS
    sizes = (CONTEXT, channels * CONNECTION, ALL_REDUCE if has_buffers else 0, GRAPHS if has_graphs else 0)
    return dict(zip(RESERVED_PARTS, map(float, sizes), strict=True))


def num_chains(config: Config, arch: Architecture, world_size: int) -> int:
    """Counts a rank's connections per channel in the groups that reduce or gather over NCCL: 1 of two ranks, 2 of more."""
    megatron = config.actor.megatron
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    ep = megatron.expert_model_parallel_size if arch.num_experts else 1
    replicas = world_size // (tp * pp)
    groups = {
        "world": world_size,
        "tensor": tp,
        "pipeline": pp,
        "context": megatron.context_parallel_size,
        "data": replicas,
        "tied embeddings": 2 if arch.tied and pp > 1 else 1,
        "experts": tp * ep if arch.num_experts else 1,
        "experts' data": replicas // ep if arch.num_experts else 1,
        "gradient norm": world_size if megatron.use_distributed_optimizer else tp * pp,
        "engine": config.rollout.tensor_model_parallel_size if config.colocates else 1,
    }
    return sum(min(size, 3) - 1 for size in groups.values())


def num_node_peers(config: Config, world_size: int) -> int:
    """Counts the ranks of its node that a rank has connections to: in the weight sync, and between experts."""
    megatron = config.actor.megatron
    tp, ep = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
    per_node = min(config.trainer.n_gpus_per_node, world_size)
    is_local = (
        tp in (1, config.rollout.tensor_model_parallel_size) and ep == 1 and megatron.pipeline_model_parallel_size == 1
    )
    syncs = config.colocates and not is_local
    return (per_node - 1 if syncs else 0) + min(ep, per_node) - 1


# -- Host memory of one rank -------------------------------------------------------------------------------------------
# offloaded   pinned copies, which stay for the next offload: the optimizer's state, weights of frozen models, the critic
# save        the rank's shard of weights and optimizer on its way to the disk; in the background, that of all models. Megatron
#             copies each tensor without blocking, which torch does into pinned memory, and keeps for the next save
# A load reads one stored rectangle of a tensor at a time into tensors that exist: less than a save.

PROCESS_BYTES = 4 * GIB  # an assumption: modules, CUDA's host memory, prompts and samples, staging of the sync


def host_parts(config: Config, arch: Architecture, world_size: int, memory: StageMemory) -> dict[str, float]:
    """Sizes what a rank with a GPU needs on its node, at most. `process` is estimated."""
    megatron, itemsize = config.actor.megatron, DTYPE_BYTES[config.model.dtype]
    learning_weights = memory.reward_model - memory.reward_training - sum(memory.frozen_rewards)
    adam = {  # of the models that learn
        "policy": memory.optimizer,
        "reward model": memory.reward_training - GRADIENT_BYTES * learning_weights / itemsize,
        "critic": memory.critic - memory.critic_weights - memory.critic_trained * GRADIENT_BYTES / itemsize,
    }
    parts = dict.fromkeys(("process", "offloaded optimizer", "offloaded weights", "copies of a save"), 0.0)
    parts["process"] = float(PROCESS_BYTES)
    if megatron.offload_optimizer:
        parts["offloaded optimizer"] = sum(adam.values())
    elif config.critic.offload:
        parts["offloaded optimizer"] = adam["critic"]
    if megatron.offload_reference:
        parts["offloaded weights"] += memory.reference + sum(memory.frozen_rewards) + sum(memory.teacher_weights)
    if config.critic.offload:
        parts["offloaded weights"] += memory.critic_weights
    saved = memory.weights if config.actor.lora.rank is None else memory.trained
    if config.replaces_rollout_ranks and (lag := config.rollout.lag):
        parts["weights of earlier steps"] = float(saved * (lag + 2))  # what lost rollout ranks may sample with again
    if config.trainer.save_freq > 0 or config.trainer.healing.is_mirrored:
        replicas = world_size // (megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size)
        weights = {"policy": saved, "reward model": learning_weights, "critic": memory.critic_trained}
        per_state = 1 + (4 / 8 if itemsize == 4 else 0)  # a float32 model's weights are stored as Adam's, too
        copies = [weights[name] / replicas + adam[name] * per_state for name in adam]
        in_background = config.trainer.async_save or config.trainer.healing.is_mirrored
        ratio = pinned_ratio(arch, megatron.tensor_model_parallel_size)
        parts["copies of a save"] = ratio * (sum(copies) if in_background else max(copies))
    return {name: size for name, size in parts.items() if size}


def phase_shortages(
    config: Config, world_size: int, models: RunModels, device: float | None = None, *, elsewhere: bool = False
) -> Iterator[str]:
    """Yields the phases of a valid layout that cannot fit a device of `device` bytes; none on the CPU.

    `device` None: this rank's GPU, unless the run is for another machine. Not run on a GPU yet.
    """
    if device is None and not elsewhere:
        device = device_bytes(config.trainer.device)
    if device is not None and config.trainer.device != "cpu":
        phases = memory_phases(config, models.arch, world_size, *models.stages(config))
        yield from phase_problems(config, models.arch, phases, device)


def phase_problems(config: Config, arch: Architecture, phases: list[Phase], device: float) -> Iterator[str]:
    """Yields the phases that cannot fit a device of `device` bytes: the exact parts alone are too large."""
    for phase in phases:
        if phase.is_impossible(device):
            yield shortage(config, phase, device)
    if not config.has_rollouts:
        return
    engine = engine_weights(config.rollout, arch, DTYPE_BYTES[config.model.dtype])
    budget = config.rollout.gpu_memory_utilization * device
    if budget <= engine:
        yield (
            f"rollout.gpu_memory_utilization={config.rollout.gpu_memory_utilization:g} x {device / GIB:.2f} GiB ="
            f" {budget / GIB:.2f} GiB leaves no KV cache beside the engine's weights of {engine / GIB:.2f} GiB; raise it,"
            " or rollout.tensor_model_parallel_size"
        )


def shortage(config: Config, phase: Phase, device: float) -> str:
    """Describes a phase that does not fit in one line: the sum, and what to change."""
    terms = [f"{name} {'~' if name in ESTIMATED else ''}{size / GIB:.2f}" for name, size in phase.parts.items()]
    if phase.utilization:
        terms.append(f"engine {phase.utilization:g} x {device / GIB:.2f} = {phase.utilization * device / GIB:.2f}")
    total = phase.total + phase.utilization * device
    return (
        f"phase {phase.name} does not fit a device of {device / GIB:.2f} GiB: {' + '.join(terms)} ="
        f" {total / GIB:.2f}; set {', or '.join(_remedies(config, phase, device))}"
    )


def _remedies(config: Config, phase: Phase, device: float) -> Iterator[str]:
    megatron, is_awake = config.actor.megatron, phase.name in ("start", "sync", "rollout")
    if is_awake and "gradients" in phase.parts:
        yield "actor.megatron.offload_optimizer=true"
    if not megatron.offload_reference and (
        ("reference" in phase.parts and phase.name != "scoring") or {"reward model", "teachers"} & phase.parts.keys()
    ):
        yield "actor.megatron.offload_reference=true"
    if "critic" in phase.parts and not config.critic.offload and phase.name != "critic":
        yield "critic.offload=true"
    if phase.utilization and not is_awake:
        yield "rollout.free_cache_engine=true"
    largest = math.floor(100 * (1 - phase.total / device)) / 100
    if phase.utilization and is_awake and largest > 0:
        yield f"rollout.gpu_memory_utilization={largest:g}"
    if "optimizer" in phase.parts and not megatron.use_distributed_optimizer:
        yield "actor.megatron.use_distributed_optimizer=true"
    if "images kept" in phase.parts:
        yield "actor.vision.freeze_tower=true, or a smaller data.image_max_pixels"
    if "activations kept" in phase.parts:
        if not recomputes_all(megatron):
            yield (
                "actor.megatron.override_transformer_config="
                "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
            )
        yield "a smaller actor.ppo_max_token_len_per_gpu"
    if "sync buckets" in phase.parts:
        yield "a smaller rollout.update_weights_bucket_megabytes"
    yield "a larger actor.megatron.tensor_model_parallel_size or pipeline_model_parallel_size"
