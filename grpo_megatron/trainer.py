"""Trainer: builds the parts, then runs the step. Every rank runs the same program; there is no controller.

GRPO, arXiv:2402.03300: draw a group of responses for each prompt, reward them, and take each response's advantage over
its group. Then raise the probability of the better ones by a clipped policy gradient, with a KL term to a reference.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from grpo_megatron.algo.dapo import with_overlong_penalty
from grpo_megatron.algo.losses import needs_reference, reasons_for_old_pass
from grpo_megatron.algo.plan import make_plan
from grpo_megatron.checks.components import resolved_components
from grpo_megatron.checks.digests import InputDigests, recorded_inputs
from grpo_megatron.checks.resume import announcement, check_resume
from grpo_megatron.checks.validate import Checked, check_alone
from grpo_megatron.config import Config
from grpo_megatron.data.sampler import rewards_of
from grpo_megatron.device import Device, device_bytes, keep_freed_memory
from grpo_megatron.environments.pool import build_pool
from grpo_megatron.models.engine_cache import with_sequences
from grpo_megatron.models.flops import sequence_cost
from grpo_megatron.models.layers.spec import choose_kernels
from grpo_megatron.models.policy import TooManySkippedSteps
from grpo_megatron.parallel.exchange import exchange, gather_groups
from grpo_megatron.parallel.heartbeat import Heartbeat
from grpo_megatron.parallel.mesh import Mesh, build_mesh, destroy_mesh
from grpo_megatron.processes.variables import set_determinism_variables
from grpo_megatron.report.console import Summary
from grpo_megatron.report.loggers import build_sinks
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.progress import awaited
from grpo_megatron.report.step import StepReport, record_update
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.engine import RolloutEngine
from grpo_megatron.sampling.collector import Collector, numbered_samples
from grpo_megatron.sampling.generator import Generator
from grpo_megatron.sampling.multi_turn import EnvironmentAnswers, TrajectoryGenerator
from grpo_megatron.sampling.wrappers import build_collector
from grpo_megatron.storage.run_files import steps_of
from grpo_megatron.training.checkpoint import Checkpoints, TrainedModel, checkpoint_bytes, run_state
from grpo_megatron.training.colocation import Colocation, build_colocation, build_export, build_policy
from grpo_megatron.training.correction_step import CorrectionStep, build_loss
from grpo_megatron.training.critic import build_critic
from grpo_megatron.training.guards import Guards, GuardStop
from grpo_megatron.training.output_folder import OutputFolder, record_config
from grpo_megatron.training.profiler import Profiler
from grpo_megatron.training.references import References
from grpo_megatron.training.reward_model import build_reward_model
from grpo_megatron.training.roles import RolloutRanks, StepsAhead
from grpo_megatron.training.stopping import Cadence, Stopped, Stopping
from grpo_megatron.training.validation import Validator, build_validation_loss
from grpo_megatron.training.warm_up import warm_up
from grpo_megatron.types import BY_MODEL, Batch, GroupTable, Plan, Sample


class Trainer:
    """`checked`: what `validate` read for this config; `profiled`: steps to profile. Build on every rank, `run` once."""

    def __init__(self, config: Config, checked: Checked | None = None, profiled: range | None = None) -> None:
        set_determinism_variables(config)  # before the check, which looks for CUDA; the command line has done both
        checked = checked or check_alone(config)
        self.config = config = checked.config  # whole: every checkpoint records it
        self.algorithm, self.actor, self.data = config.algorithm, config.actor, config.data
        self.output_dir, self.num_steps = config.trainer.output_dir, config.trainer.total_training_steps
        self.tokenizer_path = config.model.tokenizer_path or config.model.path
        with contextlib.ExitStack() as opened:
            self._build(config, checked, opened)
            self.profiler = None
            if profiled is not None:
                self.profiler = Profiler(profiled, self.metrics, self.mesh, self.output_dir, self.sinks.note)
            self.opened = opened.pop_all()  # reward workers and sinks, which `run` closes

    # -- construction --------------------------------------------------------------------------------------------------

    def _build(self, config: Config, checked: Checked, opened: contextlib.ExitStack) -> None:
        """Build every part once, after the parts that it needs. `opened` closes what is open if a later part fails."""
        trainer = config.trainer
        self.device = Device(trainer.device)
        self.mesh = join_world(config, self.device)
        length, memory = config.data.max_prompt_length + config.data.max_response_length, device_bytes(trainer.device)
        rollout = with_sequences(config.rollout, checked.arch, config.model.dtype, length, self.mesh, memory)
        # `self.config` keeps the user's own, which may be null: checkpoints and records have that
        config = config.with_values({"rollout": rollout})

        # Where the run continues: every later part may depend on it.
        inputs = (config.model.path, self.tokenizer_path, config.ref.path, config.critic.path, *config.reward_paths)
        self.folder = opened.enter_context(OutputFolder(trainer, self.mesh, inputs))
        self.heartbeat = opened.enter_context(Heartbeat(self.output_dir, self.mesh, trainer.stall_timeout_s))
        if trainer.save_freq != -1:
            self.folder.check_space(checkpoint_bytes(checked.arch, config.model.dtype, config.actor.lora))
        keep, verify = trainer.max_actor_ckpt_to_keep, trainer.verify_checkpoints
        self.checkpoints = Checkpoints(self.output_dir, self.mesh, keep, verify, in_background=trainer.async_save)
        self.heartbeat.is_flushing = lambda: self.checkpoints.pending is not None
        checkpoint = self.checkpoints.newest() if trainer.resume_mode == "auto" else None
        changed = [] if checkpoint is None else check_resume(checkpoint, self.config)
        self.first_step = 0 if checkpoint is None else steps_of(checkpoint)
        self.inputs = None
        if self.mesh.rank == 0:  # validation has compared the weights with the checkpoint's digests, or accepted others
            is_known = checkpoint is not None and not trainer.accept_changed_inputs
            self.inputs = InputDigests(config, recorded_inputs(checkpoint) if checkpoint and is_known else None)
            opened.callback(self.inputs.close)
        self.cadence = Cadence(trainer, self.algorithm.iteration_steps)

        # The engine is built while the device holds only the policy's weights, then sleeps. Everything else that needs
        # device memory comes after it: gradient buffers, optimizer, reward model, reference (see planning/phases.py).
        with awaited(f"loading the weights of {config.model.path}", self.mesh.rank == 0):
            self.policy = build_policy(config, checked, self.mesh, self.device)
        self._save_hf = build_export(config, checked, self.policy)
        self.colocation: Colocation | RolloutRanks | None
        generator = None
        if self.mesh.bridge is not None:
            self.colocation = RolloutRanks(config, self.policy, self.cadence if checked.val_prompts else None)
        else:
            self.colocation = colocation = build_colocation(config, checked, self.policy)
            if colocation is not None:
                weights_digest = lambda: colocation.weights_digest  # noqa: E731
                generator = build_generator(config, checked, self.mesh, colocation.engine, weights_digest, opened)

        # The models in their state before the first step: warmed up, or restored.
        raw = self.config.model_dump(mode="json")
        record_config(self.output_dir, self.mesh, raw, resumed=checkpoint is not None)
        self.sinks = build_sinks(trainer, rank=self.mesh.rank, first_step=self.first_step, run_config=raw)
        opened.enter_context(self.sinks)
        self.heartbeat.listener = self.sinks.enter
        if memory is not None and self.config.rollout.max_num_seqs is None and self.colocation is not None:
            self.sinks.note(
                f"an engine decodes at most {rollout.sequences} sequences at a time (rollout.max_num_seqs=null)"
            )
        self.sinks.note(f"kernels: {choose_kernels(self.actor.megatron, self.device, config.model.dtype).describe()}")
        if self.folder.moved_to is not None:
            self.sinks.note(f"an earlier run's files are now in {self.folder.moved_to}")
        if checkpoint is None and config.sft.steps:
            warm_up(config, checked, self.policy, self.heartbeat, self.sinks.note, self._save_hf, self.inputs)
        num_updates, period = (self.actor.num_updates(n, self.data.train_batch_size) for n in (config.policy_steps, 1))
        self.policy.set_optimizer(self.actor.optim, max(1, num_updates), period=period)
        self.reward_model = build_reward_model(config, checked, self.mesh, self.device)
        self.critic = build_critic(config, checked, self.mesh, self.device)
        self.trained = [model for model in (self.reward_model, self.critic) if isinstance(model, TrainedModel)]
        if checkpoint is not None:
            self.checkpoints.load(checkpoint, self.policy, self.trained)
            self.sinks.note(f"resumed from {checkpoint}: {self.first_step} steps done")
            if changed:
                self.sinks.note(announcement(changed, self.policy.num_updates, num_updates))
        parts = (config, checked.arch, self.mesh, self.device, self.cadence, self.first_step, self.policy)
        self.references = References(*parts) if needs_reference(self.algorithm, self.actor) else None

        # The parts of the step that use these models.
        self.collector: Collector
        self.validator: Validator | RolloutRanks | None = None
        if isinstance(self.colocation, RolloutRanks):
            self.collector, self.validator = self.colocation, self.colocation if checked.val_prompts else None
        else:
            self.collector = build_collector(
                self.algorithm,
                self.data,
                rollout,
                prompts=checked.train_prompts,
                offline_groups=checked.offline_groups,
                generator=generator,
                mesh=self.mesh,
                sync_initial=self._sync_initial_model,
            )
            if generator is not None and checked.val_prompts:
                self.validator = Validator(generator, checked.val_prompts, self.data, rollout, self.mesh, trainer)
        self.validation_loss = build_validation_loss(config, checked, self.policy, self.references)
        self.correction_step = CorrectionStep(self.algorithm, self.actor, self.mesh, self.data)
        self.loss = self.correction_step.corrected(build_loss(self.actor))
        self.guards = Guards(config, self.mesh, self._save_hf, self.heartbeat.phase)
        self.metrics = Metrics(self.device.synchronize, in_float32=config.model.exact)
        self.metrics.within = self.heartbeat.phase
        self.report = StepReport(config, checked.tokenizer, self.policy, self.sinks, self.guards)
        self.summary = Summary(self.output_dir, config if checked.scored_folder is None else None)
        self.stopping = Stopping(trainer, self.mesh, self.folder.lock)
        if checkpoint is not None:
            self._restore_run(checkpoint)
        if isinstance(self.colocation, RolloutRanks):
            self.colocation.begin(self.first_step, self.num_steps)

    def _restore_run(self, checkpoint: Path) -> None:
        """Restore what a checkpoint holds besides models and optimizers."""
        run = run_state(checkpoint)
        ahead = len((run.get("collector") or {}).get("ahead", ()))
        if ahead and not isinstance(self.collector, StepsAhead):
            self.collector = StepsAhead(self.collector, self.mesh)
        if run.get("collector"):
            self.collector.load_state(run["collector"])
        if run.get("kl"):
            self.correction_step.kl.load_state(run["kl"])
        if self.colocation is not None:
            self.colocation.provenance.load_state(run.get("weights_digests", {}), self.first_step + ahead)
        self.summary.recall()

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the last step, validate and save the result, and release everything."""
        with self.opened, self.heartbeat.naming_timeouts():
            try:
                self.train()
            except (GuardStop, TooManySkippedSteps):  # on every rank, at one point: a save under way can be completed
                self.checkpoints.wait()
                raise
            except Stopped as stopped:
                if isinstance(self.colocation, RolloutRanks):
                    self.colocation.close(stopped.exit_code)
                raise
            self.finish()
        self.close()  # not after a failure: it is collective, and other ranks may not get here

    def train(self) -> None:
        steps = range(self.first_step, self.num_steps)
        for step in steps if self.profiler is None else self.profiler.over(steps):
            self.heartbeat.step = step
            with self.metrics.phase("step"):
                self.begin_iteration(step)  # the reference becomes the policy, where the run is iterative
                self.validate_loss(step)  # of held-out rows, when due
                with self.rollout(step):  # weights into the engine, checked; engine awake
                    self.validate(step)  # held-out problems, when due
                    samples = self.collect(step)  # prompts -> samples -> rewards
                table = self.rewards(step, samples)  # every sample's reward, on every rank
                plan = self.plan(table)  # advantages, token weights, who trains on what
                batch = exchange(samples, table, plan, self.mesh)  # this replica's share, balanced by tokens
                batch.old_logprobs = self.old_logprobs(batch)  # None: the update's own
                batch.ref_logprobs = self.ref_logprobs(batch)
                table, plan = self.correction_step.apply(batch, table, plan, self.metrics)  # mismatch, KL in the reward
                plan = self.update_critic(step, batch, table, plan)  # PPO: values, GAE
                self.update(step, batch)  # mini-batches, clipping, optimizer
                self.end_iteration(step)  # the reward model learns from the iteration's samples
            self.log(step, samples, table, plan, batch)  # before the save: no checkpoint has a step that was not logged
            self.save(step + 1)
            self.stopping.after(step + 1, self.save_at_once)

    def begin_iteration(self, step: int) -> None:
        if self.references is not None and self.cadence.renews_reference_before(step):
            with self.metrics.phase("renew_reference"):
                self.references.renew(step, self.policy, self._save_hf)

    def rollout(self, step: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.colocation is None else self.colocation.rollout(step, self.metrics)

    def validate(self, step: int) -> None:
        found = self.collector.validations(step, self.metrics) if isinstance(self.collector, StepsAhead) else []
        if isinstance(self.validator, Validator) and self.cadence.validates_before(step):
            found.append((step, self.validator.run(step, self.metrics)))
        for version, results in found:
            self._log_validation(version, results)
        if found and found[-1][0] != step:
            self.metrics.constant("rollout/validated_version", found[-1][0])

    def validate_loss(self, step: int) -> None:
        if self.validation_loss is not None and self.cadence.validates_before(step):
            self._log_validation(step, self.validation_loss.run(self.metrics))

    def _log_validation(self, step: int, results: dict[str, float]) -> None:
        """The results, of the weights before step `step`, are logged with this step: with a lag, a later one."""
        self.summary.add(step, results)
        for name, value in results.items():
            self.metrics.constant(name, value)

    def collect(self, step: int) -> list[Sample]:
        samples = numbered_samples(self.collector.groups(step, self.data.train_batch_size, self.metrics))
        if self.colocation is not None and self.algorithm.source != "file":
            self.colocation.provenance.check(step, samples)
        return samples

    def rewards(self, step: int, samples: list[Sample]) -> GroupTable:
        table = gather_groups(samples, self.mesh)
        if self.reward_model is not None:
            table = self.reward_model.reward(step, samples, table, self.metrics)
        self.guards.begin(step, table)
        return with_overlong_penalty(table, self.config.reward.overlong_buffer, self.data.max_response_length)

    def plan(self, table: GroupTable) -> Plan:
        with self.metrics.phase("adv"):
            return make_plan(
                table,
                self.algorithm,
                self.actor,
                dp=self.mesh.dp,
                train_batch_size=self.data.train_batch_size,
                max_response_length=self.data.max_response_length,
                cost=sequence_cost(self.policy.arch),
                exact=self.config.model.exact,
            )

    def old_logprobs(self, batch: Batch) -> torch.Tensor | None:
        if not reasons_for_old_pass(self.algorithm, self.actor, self.data.train_batch_size):
            return None
        with self.metrics.phase("old_log_prob"):
            return self.policy.logprobs(batch)

    def ref_logprobs(self, batch: Batch) -> torch.Tensor | None:
        with self.metrics.phase("ref"):
            return None if self.references is None else self.references.logprobs(batch)

    def update_critic(self, step: int, batch: Batch, table: GroupTable, plan: Plan) -> Plan:
        """The plan with the advantages of the critic's values."""
        if self.critic is None:
            return plan
        plan = self.critic.estimate(step, batch, table, plan, self.metrics)
        self.critic.update(batch, table, plan, self.metrics)
        return plan

    def update(self, step: int, batch: Batch) -> None:
        if self.critic is not None and not self.critic.trains_policy(step):
            return
        sums, norms = [], []
        with self.metrics.phase("update_actor"):
            for _ in range(self.actor.ppo_epochs):
                for micro_batches, num_forward_only in batch.updates():
                    loss_pass = self.policy.forward_backward(batch, micro_batches, self.loss, num_forward_only)
                    if self.correction_step.is_folded:
                        batch.old_logprobs = self.policy.from_last_stage(loss_pass.host_logprobs())
                        self.correction_step.measure(batch, self.metrics)
                    sums.append(loss_pass.sums)
                    norms.append(self.policy.optim_step(partial(self.guards, batch, micro_batches, loss_pass.sums)))
            constants = self.policy.update_metrics(norms)
        record_update(self.metrics, sums, constants, self.mesh.is_first_replica_rank)

    def end_iteration(self, step: int) -> None:
        if self.reward_model is not None and self.cadence.reward_model_learns_after(step):
            self.reward_model.learn(step, self.metrics)

    def save(self, steps_done: int) -> None:
        if self.cadence.saves_after(steps_done):
            with self.metrics.phase("save_checkpoint"):
                self.save_now(steps_done)
        elif self.checkpoints.pending is not None:
            with self.metrics.phase("save_checkpoint"):
                self.checkpoints.poll()

    def save_now(self, steps_done: int) -> Path:
        run = {"collector": self.collector.state(), "kl": self.correction_step.kl.state()}
        run["inputs"] = self.inputs.state() if self.inputs else {}
        run["weights_digests"] = {} if self.colocation is None else self.colocation.provenance.state()
        return self.checkpoints.save(steps_done, self.policy, self.config, run, self.trained)

    def save_at_once(self, steps_done: int) -> Path:
        with self.heartbeat.phase("save_checkpoint"):
            checkpoint = self.save_now(steps_done)
            self.checkpoints.wait()
        return checkpoint

    def log(self, step: int, samples: list[Sample], table: GroupTable, plan: Plan, batch: Batch) -> None:
        self.report.log(step, self.metrics, samples, table, plan, batch, epoch=self.collector.epoch())

    # -- after the last step -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Validate and export the final weights, draw the curves, print the first and the last validation."""
        self.checkpoints.wait()
        if self.cadence.validates_at_end():
            results = {} if self.validation_loss is None else self.validation_loss.run(self.metrics)
            if self.validator is not None:
                with self.rollout(self.num_steps):
                    results |= self.validator.run(self.num_steps, self.metrics)
            self.summary.add(self.num_steps, results)
            self.metrics.reduce(self.mesh.all_gather)  # clears the timings of this validation, which belong to no step
            self.sinks.log(self.num_steps, results)
        if self.config.trainer.save_hf_at_end:
            self._save_hf(self.output_dir / "hf", adapters=self.config.trainer.save_hf_at_end != "merged")
            for model in self.trained:
                model.save_hf(self.output_dir / model.folder_name, self.tokenizer_path)
        if self.mesh.rank == 0:
            self.summary.show(self.sinks)
        self.stopping.finished(self.num_steps, self.checkpoints.last)

    def close(self) -> None:
        """Release the engine and leave the process groups. Collective."""
        if self.colocation is not None:
            self.colocation.close()
        destroy_mesh()

    def _sync_initial_model(self, step: int, metrics: Metrics) -> None:
        """The engine draws from the model that the run, or its outer iteration, started from. Collective."""
        assert isinstance(self.colocation, Colocation) and self.references is not None, "algorithm.source=initial draws"
        self.colocation.sync_weights_from(self.references.reference, step, metrics)


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
            num_drawing=config.num_rollout_ranks,
        )
    device.seed(config.trainer.seed, mesh.rank)
    if not device.is_cuda:
        keep_freed_memory()
    return mesh


def build_generator(
    config: Config,
    checked: Checked,
    mesh: Mesh,
    engine: RolloutEngine,
    weights_digest: Callable[[], str],
    opened: contextlib.ExitStack,
) -> Generator:
    """The generator of samples and rewards. `opened` will close its worker processes. Collective over the ranks that draw.

    Raises RuntimeError when a reward function of any prompt fails its test.
    """
    environment, rollout, reward = checked.environment, config.rollout, config.reward
    pool, gives_rewards = None, environment is not None and environment.gives_rewards
    if mesh.is_block_leader and not gives_rewards:
        pool = RewardPool(reward.num_workers, reward.timeout_s, reward.kwargs, resolved_components(config))
        opened.callback(pool.close)
        names = {name for part in (checked.train_prompts, checked.val_prompts) for name in rewards_of(part)}
        pool.self_test(sorted(names - {BY_MODEL}))
    parts = (engine, pool, checked.tokenizer, mesh, rollout, weights_digest)
    if environment is None:
        return Generator(*parts, max_failed_ratio=reward.max_failed_ratio)
    environments = opened.enter_context(build_pool(rollout.multi_turn)) if mesh.is_block_leader else None
    return TrajectoryGenerator(
        *parts,
        answers=EnvironmentAnswers(environments, environment.renderer, rollout.multi_turn, mesh),
        gives_rewards=gives_rewards,
        max_prompt_length=config.data.max_prompt_length,
        max_failed_ratio=reward.max_failed_ratio,
    )
