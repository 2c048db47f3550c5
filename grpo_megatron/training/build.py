"""Builds the parts of a run that need more than one section of the config. The trainer puts them together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from grpo_megatron.algo.kl import kl_penalties
from grpo_megatron.algo.losses import LossInputs, policy_losses, total_loss
from grpo_megatron.algo.needs import has_kl_loss
from grpo_megatron.checks.names import resolved_components
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import ActorConfig, Config
from grpo_megatron.data.item_table import rewards_of
from grpo_megatron.device import Device, DeviceMemory, keep_freed_memory
from grpo_megatron.environments.pool import build_pool
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.flops import model_shape, peaks
from grpo_megatron.models.forward import LossFunction, MetricSums
from grpo_megatron.models.heads.scalar import ScalarPolicy, ScoredPolicy
from grpo_megatron.models.layers.transformer_config import DTYPES
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.export import Serving, save_hf
from grpo_megatron.models.weights.resharding import Resharding
from grpo_megatron.models.weights.sync_parameters import engine_tensors
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.observability.progress import awaited
from grpo_megatron.observability.sinks import Sinks
from grpo_megatron.parallel.mesh import Mesh, build_mesh
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.build import build_engine, find_engine
from grpo_megatron.rollout.engine import RolloutEngine
from grpo_megatron.sampling.answers import EnvironmentAnswers
from grpo_megatron.sampling.generator import Generator, TrajectoryGenerator
from grpo_megatron.sync.delta_sync import DeltaLimits
from grpo_megatron.sync.tensors import EngineTensors
from grpo_megatron.training.beside.references import References
from grpo_megatron.training.colocation import Colocation, PolicyAlone, Probe, Provenance
from grpo_megatron.training.guards import Guards
from grpo_megatron.training.profiler import Profiler, flat_settings
from grpo_megatron.training.report import StepReport
from grpo_megatron.training.samples import ShownSamples, build_rollout_files
from grpo_megatron.training.score_validation import ScoreValidation
from grpo_megatron.training.stopping import Cadence
from grpo_megatron.training.validation import ValidationLoss, Validator
from grpo_megatron.types import BY_MODEL


def join_world(config: Config, device: Device) -> Mesh:
    """The mesh of the configured layout. Collective. Seeds this rank's generators."""
    megatron = config.actor.megatron
    with awaited("waiting for all ranks", os.environ.get("RANK", "0") == "0"):
        mesh = build_mesh(
            device,
            tp=megatron.tensor_model_parallel_size,
            pp=megatron.pipeline_model_parallel_size,
            ep=megatron.expert_model_parallel_size,
            cp=megatron.context_parallel_size,
            rollout_tp=config.rollout.tensor_model_parallel_size,
            seed=config.trainer.seed,
            timeout_s=config.trainer.timeout_s,
        )
    device.seed(config.trainer.seed, mesh.rank)
    if not device.is_cuda:
        keep_freed_memory()
    return mesh


def build_policy(config: Config, checked: Checked, mesh: Mesh, device: Device) -> Policy:
    """The model that is trained: a language model, or one that scores (actor.loss_mode). Collective."""
    if checked.scored_folder is not None:
        return ScoredPolicy(checked.scored_folder, config.model.dtype, config.actor, mesh, device)
    return Policy(config.model, config.actor, checked.arch, mesh, device, temperature=config.rollout.temperature)


def build_export(config: Config, checked: Checked, policy: Policy) -> Callable[[Path], None]:
    """The function that writes the policy as a Hugging Face folder. Calling it is collective.

    A server of the folder stops where rollouts stop: at every end token, and at `rollout.stop_token_ids`.
    """
    tokenizer_path = config.model.tokenizer_path or config.model.path
    ends = set(checked.end_tokens.ids if checked.end_tokens else []) | set(config.rollout.stop_token_ids)
    template = None if config.data.chat_template is None else checked.tokenizer.chat_template
    serving = Serving(template, sorted(ends))

    def export(target: Path) -> None:
        if isinstance(policy, ScalarPolicy):
            policy.save_hf(target, tokenizer_path)
            return
        stream = policy.hf_weights(config.rollout.update_weights_bucket_megabytes)
        save_hf(stream, config.model.path, tokenizer_path, target, policy.mesh, serving=serving)

    return export


def build_rollout_engine(config: Config, checked: Checked, mesh: Mesh, device: Device) -> RolloutEngine:
    """The engine, awake and without usable weights. Collective. Raises RankError if too little memory is free."""
    assert checked.end_tokens is not None, "only a dry run has no tokenizer"
    mesh.agree(memory_problem(config, device.memory()))
    return build_engine(
        config.rollout,
        config.model.path,
        mesh,
        device,
        dtype=config.model.dtype,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        eos_token_ids=checked.end_tokens.ids,
        tensors=_engine_tensors(config, checked.arch),
    )


def _engine_tensors(config: Config, arch: Architecture) -> EngineTensors:
    rollout = config.rollout
    reads_shards = find_engine(rollout.engine).reads_shards
    tp, ep = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    return engine_tensors(arch, tp, reads_shards=reads_shards, rollout_ep=ep)


def build_resharding(config: Config, policy: Policy) -> Resharding:
    """The plan from the policy's layout to the engine's. Collective."""
    is_delta = config.rollout.sync == "delta"
    return Resharding(
        policy.arch,
        policy.mesh,
        policy.stage_of,
        _engine_tensors(config, policy.arch),
        dtype=DTYPES[config.model.dtype],
        device=policy.device.torch_device,
        bucket_megabytes=config.rollout.update_weights_bucket_megabytes,
        delta=DeltaLimits(config.rollout.delta_full_every, config.rollout.delta_max_density) if is_delta else None,
    )


def memory_problem(config: Config, memory: DeviceMemory | None) -> str | None:
    """Why the engine cannot be built now: vLLM requires gpu_memory_utilization x the device to be free. None: it can."""
    utilization = config.rollout.gpu_memory_utilization
    if memory is None or memory.free >= utilization * memory.total:
        return None
    free, total, reserved = (size / 2**30 for size in memory)
    is_offloaded = config.actor.megatron.offload_optimizer
    remedy = "" if is_offloaded else "actor.megatron.offload_optimizer=true, which frees the gradient buffers, or "
    return (
        f"rollout.gpu_memory_utilization={utilization:g} x {total:.2f} GiB = {utilization * total:.2f} GiB must be free"
        f" when the engine is built, and {free:.2f} GiB are: this process's tensors have {reserved:.2f} GiB, and"
        f" {total - free - reserved:.2f} GiB are of CUDA, NCCL and other processes; set {remedy}a lower"
        " gpu_memory_utilization (train --dry-run --gpu-memory GIB shows every phase)"
    )


def build_colocation(config: Config, checked: Checked, policy: Policy) -> PolicyAlone:
    """The policy, with a sleeping engine beside it if the run draws. Collective. Raises RankError if too little memory is free.

    The engine is built while nothing but the policy's weights is on the device. (Without `offload_optimizer` the gradient
    buffers are, too; they are then beside the engine in every rollout, so that freeing them here would help no run.)
    """
    max_length = config.data.max_prompt_length + config.data.max_response_length
    algorithm = config.algorithm
    provenance = Provenance(
        policy.mesh,
        max_staleness=config.max_staleness,
        is_drawn=algorithm.source != "file",
    )
    if not config.draws:
        return PolicyAlone(provenance)
    policy.offload()
    policy.device.empty_cache()
    with awaited("building the engine of the rollouts (importing it, loading weights)", policy.mesh.rank == 0):
        engine = build_rollout_engine(config, checked, policy.mesh, policy.device)
    colocation = Colocation(
        policy,
        engine,
        policy.mesh,
        build_resharding(config, policy),
        probe=Probe(
            policy.arch.vocab_size, max_length, dtype=config.model.dtype, tolerance=config.rollout.probe_tolerance
        ),
        provenance=provenance,
    )
    policy.device.empty_cache()
    policy.onload()
    return colocation


def build_generator(
    config: Config, checked: Checked, colocation: PolicyAlone, opened: contextlib.ExitStack
) -> Generator | None:
    """What draws and rewards samples, of one turn or of several; None without an engine.

    `opened` will close its worker processes. Raises RuntimeError when reward workers fail their test.
    """
    if not isinstance(colocation, Colocation):
        return None
    mesh, rollout, environment = colocation.mesh, config.rollout, checked.environment
    rewards = None
    if mesh.is_block_leader and not (environment and environment.gives_rewards):
        rewards = build_reward_pool(config, checked, opened)
    parts = (colocation.engine, rewards, checked.tokenizer, mesh, rollout, lambda: colocation.weights_digest)
    max_failed_ratio = config.reward.max_failed_ratio
    if environment is None:
        return Generator(*parts, max_failed_ratio=max_failed_ratio)
    pool = opened.enter_context(build_pool(rollout.multi_turn)) if mesh.is_block_leader else None
    return TrajectoryGenerator(
        *parts,
        answers=EnvironmentAnswers(pool, environment.renderer, rollout.multi_turn, mesh),
        gives_rewards=environment.gives_rewards,
        max_prompt_length=config.data.max_prompt_length,
        max_failed_ratio=max_failed_ratio,
    )


def build_validator(config: Config, checked: Checked, generator: Generator | None, mesh: Mesh) -> Validator:
    """What answers the held-out problems."""
    folder, num_logged = config.trainer.output_dir, config.trainer.num_logged_samples
    return Validator(generator, checked.val_prompts, config.data, config.rollout, mesh, folder, num_logged)


def build_reward_pool(config: Config, checked: Checked, opened: contextlib.ExitStack) -> RewardPool:
    """Reward workers that have passed their self-test, before the first step. `opened` will close them.

    Raises RuntimeError when they fail the test.
    """
    reward = config.reward
    pool = RewardPool(reward.num_workers, reward.timeout_s, reward.kwargs, resolved_components(config))
    opened.callback(pool.close)
    pool.self_test(sorted({*rewards_of(checked.train_prompts), *rewards_of(checked.val_prompts)} - {BY_MODEL}))
    return pool


def build_validation_loss(
    config: Config, checked: Checked, policy: Policy, references: References, cadence: Cadence
) -> ValidationLoss:
    """The loss of held-out rows; with a scalar head, its calibration too."""
    kind = ValidationLoss if checked.scored_folder is None else ScoreValidation
    return kind(checked.val_loss_groups, config, policy, references, cadence)


def build_loss(actor: ActorConfig) -> LossFunction:
    policy_loss = policy_losses.get(actor.loss_mode)
    penalty = kl_penalties.get(actor.kl_loss_type) if has_kl_loss(actor) else None

    def loss(inputs: LossInputs) -> tuple[Tensor, MetricSums]:
        return total_loss(inputs, actor, policy_loss, penalty)

    return loss


def build_report(config: Config, checked: Checked, policy: Policy, sinks: Sinks, guards: Guards) -> StepReport:
    shape = model_shape(checked.arch)
    return StepReport(
        config.data,
        config.actor,
        policy.mesh,
        policy.device,
        sinks,
        guards,
        policy.has_finite_weights,
        build_rollout_files(config.trainer, policy.mesh, checked.tokenizer),
        ShownSamples(policy.mesh, checked.tokenizer, config.draws),
        shape=shape,
        peaks=peaks(config, policy.device.name, shape.num_layers),
        multiple=policy.multiple,
    )


def build_profiler(
    steps: range | None, config: Config, metrics: Metrics, colocation: PolicyAlone, policy: Policy, sinks: Sinks
) -> Profiler:
    """Of the `steps` of `--profile`. `colocation` and `policy` are those of the run."""
    return Profiler(
        steps,
        metrics,
        colocation.engine,
        policy.mesh,
        policy.device.synchronize,
        output_dir=config.trainer.output_dir,
        settings=flat_settings(config.model_dump(mode="json")),
        note=sinks.note,
    )
