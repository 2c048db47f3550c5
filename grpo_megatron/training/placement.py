"""Placement: where a run's samples come from, chosen once when the run is built.

    NoRollouts   responses are read from a file; there is no engine
    Colocated    an engine shares the device with the policy
    RolloutRanks the last ranks of the job only sample (roles.py)

The loop uses the five methods of `Placement` and tests for none of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Protocol

from grpo_megatron.checks.components import resolved_components
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config
from grpo_megatron.device import Device, device_bytes, keep_freed_memory
from grpo_megatron.environments.pool import build_pool
from grpo_megatron.models.engine_cache import with_sequences
from grpo_megatron.models.policy import Policy
from grpo_megatron.parallel.mesh import Mesh, build_mesh
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.progress import awaited
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.engine import RolloutEngine
from grpo_megatron.sampling.collector import Clock, Collector
from grpo_megatron.sampling.generator import Generator
from grpo_megatron.sampling.multi_turn import EnvironmentAnswers, TrajectoryGenerator
from grpo_megatron.sampling.wrappers import build_collector
from grpo_megatron.sync.attest import Provenance
from grpo_megatron.training.beside import References
from grpo_megatron.training.colocation import Colocation, build_colocation
from grpo_megatron.training.roles import RolloutRanks, StepsAhead
from grpo_megatron.training.stopping import Cadence
from grpo_megatron.training.validation import NoValidation, PromptValidation, Validator


class Placement(Protocol):
    """The protocol of a source of samples. Every method is collective."""

    provenance: Provenance

    @property
    def generator(self) -> Generator | None:
        """This rank's generator; None: it does not sample."""
        ...

    def rollout(self, version: int, metrics: Metrics) -> contextlib.AbstractContextManager[None]:
        """Inside the block, the policy's current weights sample as `version`."""
        ...

    def build_collector(self, checked: Checked, references: References | None, has_steps_ahead: bool) -> Collector:
        """Returns the collector of training samples.

        `references`: what algorithm.source=initial samples from. `has_steps_ahead`: a checkpoint has samples of later steps.
        """
        ...

    def build_validation(self, checked: Checked) -> PromptValidation:
        """Returns the validation on held-out prompts."""
        ...

    def begin(self, first_step: int, num_steps: int) -> None:
        """Start sampling. Call it once, after all state is restored."""
        ...

    def close(self, exit_code: int = 0) -> None:
        """Release the engine. `exit_code` other than 0: the run has stopped early."""
        ...


class NoRollouts:
    """The placement of a run that reads its responses from a file and validates no prompts."""

    generator = None

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh, self.provenance = config, mesh, Provenance(mesh, 0)

    def rollout(self, version: int, metrics: Metrics) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def build_collector(self, checked: Checked, references: References | None, has_steps_ahead: bool) -> Collector:
        return local_collector(self.config, checked, self.mesh, None)

    def build_validation(self, checked: Checked) -> PromptValidation:
        return NoValidation()

    def begin(self, first_step: int, num_steps: int) -> None:
        pass

    def close(self, exit_code: int = 0) -> None:
        pass


class Colocated:
    """The placement of a run whose ranks train and sample in turn."""

    def __init__(self, config: Config, colocation: Colocation, generator: Generator, cadence: Cadence) -> None:
        self.config, self.colocation, self.generator, self.cadence = config, colocation, generator, cadence
        self.mesh, self.provenance, self.rollout = colocation.mesh, colocation.provenance, colocation.rollout

    def build_collector(self, checked: Checked, references: References | None, has_steps_ahead: bool) -> Collector:

        def sync_initial(step: int, metrics: Metrics) -> None:
            assert references is not None, "algorithm.source=initial has a reference"
            self.colocation.sync_weights_from(references.reference, step, metrics)

        collector = local_collector(self.config, checked, self.mesh, self.generator, sync_initial=sync_initial)
        return StepsAhead(collector, self.mesh) if has_steps_ahead else collector

    def build_validation(self, checked: Checked) -> PromptValidation:
        return (
            Validator(self.generator, checked.val_prompts, self.config, self.cadence)
            if checked.val_prompts
            else NoValidation()
        )

    def begin(self, first_step: int, num_steps: int) -> None:
        pass

    def close(self, exit_code: int = 0) -> None:
        """See Placement. After an early stop the process ends with the engine."""
        if not exit_code:
            self.colocation.close()


def build_placement(
    config: Config, checked: Checked, policy: Policy, cadence: Cadence, opened: contextlib.ExitStack
) -> Placement:
    """Build the placement of the config. `opened` will close worker processes. Collective. Raises RankError."""
    if policy.mesh.bridge is not None:
        return RolloutRanks(config, policy, cadence if checked.val_prompts else None)
    colocation = build_colocation(config, checked, policy)
    if colocation is None:
        return NoRollouts(config, policy.mesh)
    generator = build_generator(
        config, checked, policy.mesh, colocation.engine, lambda: colocation.weights_digest, opened
    )
    return Colocated(config, colocation, generator, cadence)


# -- Parts that ranks of both roles build ------------------------------------------------------------------------------


def join_world(config: Config, device: Device) -> Mesh:
    """Build the mesh of the configured layout, and seed this rank's generators. Collective."""
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
            num_rollout_ranks=config.num_rollout_ranks,
        )
    device.seed(config.trainer.seed, mesh.rank)
    if not device.is_cuda:
        keep_freed_memory()
    return mesh


def with_engine_sequences(config: Config, checked: Checked, mesh: Mesh) -> Config:
    """Returns the config with the sequences that an engine decodes at a time, where `rollout.max_num_seqs` is null."""
    length = config.data.max_prompt_length + config.data.max_response_length
    memory = device_bytes(config.trainer.device)
    return config.with_values(
        {"rollout": with_sequences(config.rollout, checked.arch, config.model.dtype, length, mesh, memory)}
    )


def build_generator(
    config: Config,
    checked: Checked,
    mesh: Mesh,
    engine: RolloutEngine,
    weights_digest: Callable[[], str],
    opened: contextlib.ExitStack,
) -> Generator:
    """Build the generator of samples and rewards. `opened` will close its workers. Collective over the ranks that sample."""
    environment, rollout, reward = checked.environment, config.rollout, config.reward
    pool, gives_rewards = None, environment is not None and environment.gives_rewards
    if mesh.is_replica_leader and not gives_rewards:
        pool = RewardPool(reward.num_workers, reward.timeout_s, reward.kwargs, resolved_components(config))
        opened.callback(pool.close)
    parts = (engine, pool, checked.tokenizer, mesh, rollout, weights_digest)
    if environment is None:
        return Generator(*parts, max_failed_ratio=reward.max_failed_ratio)
    environments = opened.enter_context(build_pool(rollout.multi_turn)) if mesh.is_replica_leader else None
    return TrajectoryGenerator(
        *parts,
        answers=EnvironmentAnswers(environments, environment.renderer, rollout.multi_turn, mesh),
        gives_rewards=gives_rewards,
        max_prompt_length=config.data.max_prompt_length,
        max_failed_ratio=reward.max_failed_ratio,
    )


def local_collector(
    config: Config,
    checked: Checked,
    mesh: Mesh,
    generator: Generator | None,
    *,
    sync_initial: Callable[[int, Metrics], None] | None = None,
    clock: Clock | None = None,
) -> Collector:
    """Build the collectors that the config asks for, over this rank's generator. See `build_collector`."""
    return build_collector(
        config.algorithm,
        config.data,
        config.rollout,
        prompts=checked.train_prompts,
        offline_groups=checked.offline_groups,
        generator=generator,
        mesh=mesh,
        sync_initial=sync_initial,
        clock=clock or Clock(num_steps=config.trainer.total_training_steps),
    )
