"""Trainer: builds the parts, then runs the step. Every rank runs the same program; there is no controller.

GRPO, arXiv:2402.03300: draw a group of responses for each prompt, reward them, and take each response's advantage over
its group. Then raise the probability of the better ones by a clipped policy gradient, with a KL term to a reference.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from grpo_megatron.algo.losses import reasons_for_old_pass
from grpo_megatron.algo.plan import make_plan, with_overlong_penalty
from grpo_megatron.checks.names import resolved_components
from grpo_megatron.checks.resume import announcement, check_resume
from grpo_megatron.checks.validate import Checked, check_alone
from grpo_megatron.config import Config
from grpo_megatron.device import Device, keep_freed_memory
from grpo_megatron.models.flops import sequence_cost
from grpo_megatron.models.layers.spec import choose_kernels
from grpo_megatron.models.policy import TooManySkippedSteps
from grpo_megatron.observability.console import Summary
from grpo_megatron.observability.loggers import build_sinks
from grpo_megatron.observability.metrics import Metrics, percentile_limit
from grpo_megatron.observability.progress import awaited
from grpo_megatron.parallel.exchange import exchange, gather_groups
from grpo_megatron.parallel.heartbeat import Heartbeat
from grpo_megatron.parallel.mesh import Mesh, build_mesh, destroy_mesh
from grpo_megatron.sampling.collector import numbered_samples
from grpo_megatron.sampling.generator import Generator, build_generator
from grpo_megatron.sampling.wrappers import build_collector
from grpo_megatron.storage.run_files import on_disk, steps_of
from grpo_megatron.training.beside.build import (
    build_critic,
    build_export,
    build_policy,
    build_reward_model,
)
from grpo_megatron.training.beside.references import References
from grpo_megatron.training.checkpoint import Checkpoints, checkpoint_bytes, run_state
from grpo_megatron.training.colocation import Colocation, build_colocation
from grpo_megatron.training.correction_step import CorrectionStep, build_loss
from grpo_megatron.training.guards import Guards, GuardStop
from grpo_megatron.training.output_folder import OutputFolder, record_config
from grpo_megatron.training.profiler import Profiler
from grpo_megatron.training.report import build_report, record_update
from grpo_megatron.training.stopping import Cadence, Stopping
from grpo_megatron.training.validation import Validator, build_validation_loss
from grpo_megatron.training.warm_up import warm_up
from grpo_megatron.types import Batch, GroupTable, Plan, Sample


class Trainer:
    """`checked`: what `validate` read for this config; `profiled`: steps to profile. Build on every rank, `run` once."""

    def __init__(self, config: Config, checked: Checked | None = None, profiled: range | None = None) -> None:
        checked = checked or check_alone(config)
        self.config = config = checked.resolved(config)  # whole: every checkpoint records it
        self.algorithm, self.actor, self.data = config.algorithm, config.actor, config.data
        self.output_dir, self.num_steps = config.trainer.output_dir, config.trainer.total_training_steps
        self.tokenizer_path = config.model.tokenizer_path or config.model.path
        with contextlib.ExitStack() as opened:
            self._build(config, checked, opened)
            self.profiler = Profiler(
                profiled, self.metrics, self.mesh, output_dir=config.trainer.output_dir, note=self.sinks.note
            )
            self.opened = opened.pop_all()  # reward workers and sinks, which `run` closes

    # -- construction --------------------------------------------------------------------------------------------------

    def _build(self, config: Config, checked: Checked, opened: contextlib.ExitStack) -> None:
        """Build every part once, after the parts that it needs. `opened` closes what is open if a later part fails."""
        trainer, rollout = config.trainer, config.rollout
        self.device = Device(trainer.device)
        self.mesh = join_world(config, self.device)

        # Where the run continues: every later part may depend on it.
        inputs = (config.model.path, self.tokenizer_path, config.ref.path, config.critic.path, *config.reward_paths)
        self.folder = opened.enter_context(OutputFolder(trainer, self.mesh, inputs))
        self.heartbeat = opened.enter_context(Heartbeat(self.output_dir, self.mesh, trainer.stall_timeout_s))
        if trainer.save_freq != -1:
            self.folder.check_space(checkpoint_bytes(checked.arch, config.model.dtype))
        keep, verify = trainer.max_actor_ckpt_to_keep, trainer.verify_checkpoints
        self.checkpoints = Checkpoints(self.output_dir, self.mesh, keep, verify, in_background=trainer.async_save)
        checkpoint = self.checkpoints.newest() if trainer.resume_mode == "auto" else None
        changed = [] if checkpoint is None else check_resume(checkpoint, config)
        self.first_step = 0 if checkpoint is None else steps_of(checkpoint)
        self.cadence = Cadence(trainer, self.algorithm.iteration_steps)

        # The engine is built while the device holds only the policy's weights, then sleeps. Everything else that needs
        # device memory comes after it: gradient buffers, optimizer, reward model, reference (see memory/phases.py).
        with awaited(f"loading the weights of {config.model.path}", self.mesh.rank == 0):
            self.policy = build_policy(config, checked, self.mesh, self.device)
        self._save_hf = build_export(config, checked, self.policy)
        self.colocation = build_colocation(config, checked, self.policy)
        generator = self._build_generator(config, checked, opened)

        # The models in their state before the first step: warmed up, or restored.
        raw = config.model_dump(mode="json")
        record_config(self.output_dir, self.mesh, raw, resumed=checkpoint is not None)
        self.sinks = build_sinks(trainer, rank=self.mesh.rank, first_step=self.first_step, run_config=raw)
        opened.enter_context(self.sinks)
        self.heartbeat.listener = self.sinks.enter
        self.sinks.note(f"kernels: {choose_kernels(self.actor.megatron, self.device, config.model.dtype).describe()}")
        if self.folder.moved_to is not None:
            self.sinks.note(f"an earlier run's files are now in {self.folder.moved_to}")
        if checkpoint is None and config.sft.steps:
            warm_up(config, checked, self.policy, self.heartbeat, self.sinks.note, self._save_hf)
        num_updates, period = (self.actor.num_updates(n, self.data.train_batch_size) for n in (config.policy_steps, 1))
        self.policy.set_optimizer(self.actor.optim, max(1, num_updates), period=period)
        self.reward_model = build_reward_model(config, checked, self.mesh, self.device)
        self.critic = build_critic(config, checked, self.mesh, self.device)
        if checkpoint is not None:
            self.checkpoints.load(checkpoint, self.policy, [self.reward_model, self.critic])
            self.sinks.note(f"resumed from {checkpoint}: {self.first_step} steps done")
            if changed:
                self.sinks.note(announcement(changed, self.policy.num_updates, num_updates))
        self.references = References(config, checked.arch, self.mesh, self.device, self.cadence, self.first_step)

        # The parts of the step that use these models.
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
        self.validator = Validator(generator, checked.val_prompts, self.data, rollout, self.mesh, trainer)
        self.validation_loss = build_validation_loss(config, checked, self.policy, self.references, self.cadence)
        self.correction_step = CorrectionStep(self.algorithm, self.actor, self.mesh, self.data)
        self.loss = self.correction_step.corrected(build_loss(self.actor))
        self.guards = Guards(config, self.mesh, self._save_hf, self.heartbeat.phase)
        self.metrics = Metrics(self.device.synchronize, percentile_limit(self.mesh.world_size))
        self.metrics.within = self.heartbeat.phase
        self.report = build_report(config, checked, self.policy, self.sinks, self.guards)
        self.summary = Summary(self.output_dir, config if checked.scored_folder is None else None)
        self.stopping = Stopping(trainer, self.mesh)
        if checkpoint is not None:
            self._restore_run(checkpoint)

    def _build_generator(self, config: Config, checked: Checked, opened: contextlib.ExitStack) -> Generator | None:
        """The generator of samples and rewards; None in a run that draws nothing. `opened` will close its worker processes."""
        colocation, environment = self.colocation, checked.environment
        if not isinstance(colocation, Colocation):
            return None
        return build_generator(
            colocation.engine,
            lambda: colocation.weights_digest,
            self.mesh,
            checked.tokenizer,
            (config.rollout, config.reward, config.data),
            opened,
            renderer=None if environment is None else environment.renderer,
            gives_rewards=environment is not None and environment.gives_rewards,
            prompts=(checked.train_prompts, checked.val_prompts),
            components=resolved_components(config),
        )

    def _restore_run(self, checkpoint: Path) -> None:
        """Restore what a checkpoint holds besides models and optimizers."""
        run = run_state(checkpoint)
        if run.get("collector"):
            self.collector.load_state(run["collector"])
        if run.get("kl"):
            self.correction_step.kl.load_state(run["kl"])
        self.colocation.provenance.load_state(run.get("weights_digests", {}))
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
            self.finish()
        self.close()  # not after a failure: it is collective, and other ranks may not get here

    def train(self) -> None:
        for step in self.profiler.over(range(self.first_step, self.num_steps)):
            self.heartbeat.step = step
            with self.metrics.phase("step"):
                self.begin_iteration(step)  # the reference becomes the policy, where the run is iterative
                self.validation_loss.before(step, self.metrics, self.summary)  # of held-out rows, when due
                with self.colocation.rollout(step, self.metrics):  # weights into the engine, checked; engine awake
                    self.validate(step)
                    samples = self.collect(step)  # prompts -> samples -> rewards
                table = self.rewards(step, samples)  # every sample's reward, on every rank
                plan = self.plan(table)  # advantages, token weights, who trains on what
                batch = exchange(samples, table, plan, self.mesh)  # this replica's share, balanced by tokens
                batch.old_logprobs = self.old_logprobs(batch)  # None: the update's own
                batch.ref_logprobs = self.ref_logprobs(batch)
                table, plan = self.correction_step.apply(batch, table, plan, self.metrics)  # mismatch, KL in the reward
                plan = self.critic.estimate(step, batch, table, plan, self.metrics)  # PPO: values, GAE
                self.critic.update(batch, table, plan, self.metrics)
                self.update(step, batch)  # mini-batches, clipping, optimizer
                self.end_iteration(step)  # the reward model learns from the iteration's samples
            self.log(step, samples, table, plan, batch)  # before the save: no checkpoint has a step that was not logged
            self.save(step + 1)
            self.folder.check()
            self.stopping.after(step + 1, lambda done: self.checkpoints.waited_for(self.save_now(done)))

    def begin_iteration(self, step: int) -> None:
        if self.references.is_due(step):
            with self.metrics.phase("renew_reference"):
                oldest = next(map(steps_of, on_disk(self.output_dir)), 0)
                self.references.renew(step, self.policy, self._save_hf, oldest)

    def validate(self, step: int) -> None:
        """Held-out problems before step `step`, when due. The result is logged with that step."""
        if not self.validator.prompts or not self.cadence.validates_before(step):
            return
        results = self.validator.run(step, self.metrics)
        self.summary.add(step, results)
        for name, value in results.items():
            self.metrics.constant(name, value)

    def collect(self, step: int) -> list[Sample]:
        samples = numbered_samples(self.collector.groups(step, self.data.train_batch_size, self.metrics))
        self.colocation.provenance.check(step, samples)
        return samples

    def rewards(self, step: int, samples: list[Sample]) -> GroupTable:
        table = gather_groups(samples, self.mesh)
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
            )

    def old_logprobs(self, batch: Batch) -> torch.Tensor | None:
        if not reasons_for_old_pass(self.algorithm, self.actor, self.data.train_batch_size):
            return None
        with self.metrics.phase("old_log_prob"):
            return self.policy.logprobs(batch)

    def ref_logprobs(self, batch: Batch) -> torch.Tensor | None:
        with self.metrics.phase("ref"):
            return self.references.logprobs(batch)

    def update(self, step: int, batch: Batch) -> None:
        if not self.critic.trains_policy(step):
            return
        with self.metrics.phase("update_actor"):
            complete = self.correction_step.complete(self.metrics)
            sums, constants = self.policy.update(
                batch, self.loss, epochs=self.actor.ppo_epochs, guard=self.guards, complete=complete
            )
        record_update(self.metrics, sums, constants, self.mesh.is_first_replica_rank)

    def end_iteration(self, step: int) -> None:
        if self.cadence.reward_model_learns_after(step):
            self.reward_model.learn(step, self.metrics)

    def save(self, steps_done: int) -> None:
        if self.cadence.saves_after(steps_done):
            with self.metrics.phase("save_checkpoint"):
                self.save_now(steps_done)
        else:
            self.checkpoints.poll(self.metrics.phase)

    def save_now(self, steps_done: int) -> Path:
        run = {"collector": self.collector.state(), "kl": self.correction_step.kl.state()}
        run["weights_digests"] = self.colocation.provenance.state()
        return self.checkpoints.save(steps_done, self.policy, self.config, run, [self.reward_model, self.critic])

    def log(self, step: int, samples: list[Sample], table: GroupTable, plan: Plan, batch: Batch) -> None:
        self.report.log(step, self.metrics, samples, table, plan, batch, epoch=self.collector.epoch())

    # -- after the last step -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Validate and export the final weights, draw the curves, print the first and the last validation."""
        self.checkpoints.wait()
        if self.cadence.validates_at_end():
            results = self.validation_loss.run(self.metrics)
            if self.validator.prompts:
                with self.colocation.rollout(self.num_steps, self.metrics):
                    results |= self.validator.run(self.num_steps, self.metrics)
            self.summary.add(self.num_steps, results)
            self.metrics.reduce(self.mesh.all_gather)  # clears the timings of this validation, which belong to no step
            self.sinks.log(self.num_steps, results)
        if self.config.trainer.save_hf_at_end:
            self._save_hf(self.output_dir / "hf")
            self.reward_model.save_hf(self.output_dir / "reward_model", self.tokenizer_path)
            self.critic.save_hf(self.output_dir / "critic", self.tokenizer_path)
        if self.mesh.rank == 0:
            self.summary.show(self.sinks)
        self.stopping.finished(self.num_steps, self.checkpoints.last)

    def close(self) -> None:
        """Release the engine and leave the process groups. Collective."""
        self.colocation.close()
        destroy_mesh()

    def _sync_initial_model(self, step: int, metrics: Metrics) -> None:
        """The engine draws from the model that the run, or its outer iteration, started from. Collective."""
        self.colocation.sync_weights_from(self.references.weight_source(), step, metrics)


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
