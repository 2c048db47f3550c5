"""Trainer: the loop. It is written with the parts and verbs of `Run`; every rank runs the same program, without a controller.

GRPO, arXiv:2402.03300: generate a group of responses for each prompt, reward them, and take each response's advantage over
its group. Then raise the probability of the better ones by a clipped policy gradient, with a KL term to a reference.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config
from grpo_megatron.models.policy import TooManySkippedSteps
from grpo_megatron.report.console import Summary
from grpo_megatron.report.step import StepReport
from grpo_megatron.run import Run
from grpo_megatron.sampling.collector import numbered_samples
from grpo_megatron.training.checkpoint import Checkpoints
from grpo_megatron.training.guards import GuardStop
from grpo_megatron.training.healing import Recovery
from grpo_megatron.training.profiler import Profiler
from grpo_megatron.training.stopping import Stopped, Stopping
from grpo_megatron.training.trace import Trace
from grpo_megatron.training.validation import build_validation_loss
from grpo_megatron.types import Batch, Sample


class Trainer:
    """`checked`: what `validate` read for this config; `profiled`: steps to profile. Build on every rank, `run` once.

    `last_step`: the run ends after it, with the schedules of the full run.
    """

    def __init__(
        self,
        config: Config,
        checked: Checked | None = None,
        profiled: range | None = None,
        last_step: int | None = None,
    ) -> None:
        with contextlib.ExitStack() as opened:
            self.parts = run = opened.enter_context(Run(config, checked))
            self.config, self.metrics, self.cadence = run.config, run.metrics, run.cadence
            self.output_dir, self.num_steps = run.config.trainer.output_dir, run.config.trainer.total_training_steps
            if last_step is not None:
                self.num_steps = last_step + 1
            self.collector = run.placement.build_collector(run.checked, run.references, run.num_steps_ahead > 0)
            self.validation = run.placement.build_validation(run.checked)
            self.validation_loss = build_validation_loss(run.effective, run.checked, run.policy, run.references)
            self.report = StepReport(run.effective, run.checked.tokenizer, run.policy, run.sinks, run.guards)
            self.summary = Summary(self.output_dir, run.effective if run.checked.scored_folder is None else None)
            self.recovery = Recovery.of_restart()
            self.stopping = Stopping(run.config.trainer, run.mesh, run.folder.lock, budget=run.config.reward.budget)
            self.profiler = None
            if profiled is not None:
                self.profiler = Profiler(profiled, self.metrics, run.mesh, self.output_dir, run.sinks.note)
            if run.config.trainer.trace != "off":
                parts = (run.effective, run.policy, run.placement.provenance, run.inputs, run.first_step, run.trained)
                run.trace = opened.enter_context(contextlib.closing(Trace(*parts)))
            if run.resumed.get("collector"):
                self.collector.load_state(run.resumed["collector"])
            if run.resumed_from is not None:
                self.summary.recall()
            run.placement.begin(run.first_step, self.num_steps)
            self.opened = opened.pop_all()  # what `run` closes

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the last step, validate and save the result, and release everything."""
        with self.opened:
            try:
                self.train()
            except (GuardStop, TooManySkippedSteps):  # on every rank, at one point: a save under way can be completed
                self.parts.checkpoints.wait()
                raise
            except Stopped as stopped:
                self.parts.placement.close(stopped.exit_code)
                raise
            self.finish()

    def train(self) -> None:
        """Make the steps that are left."""
        run, steps = self.parts, range(self.parts.first_step, self.num_steps)
        for step in steps if self.profiler is None else self.profiler.over(steps):
            run.heartbeat.step = step
            with self.metrics.phase("step"):
                self.begin_iteration(step)  # the reference becomes the policy, where the run is iterative
                self.validate_loss(step)  # of held-out rows, when due
                with run.rollout(step):  # weights into the engine, checked; engine awake
                    self.validate(step)  # held-out problems, when due
                    samples = self.collect(step)  # prompts -> samples -> rewards
                run.mirror.poll()  # the state after the step before is written by now
                batch = run.batch(samples)  # rewards on every rank, who trains on what, log-probabilities, advantages
                self.update(step, batch)  # forward_backward and optim_step for every mini-batch; the critic
                self.end_iteration(step)  # the reward model learns from the iteration's samples
            self.log(step, samples, batch)  # before the save: no checkpoint has a step that was not logged
            self.save(step + 1)
            self.remember(step + 1)
            self.stopping.after(step + 1, self.save_at_once)

    def begin_iteration(self, step: int) -> None:
        """Renew the reference, if an outer iteration begins, and teachers that are earlier policies."""
        for references in self.parts.renewed:
            if references.cadence.renews_reference_before(step):
                with self.metrics.phase("renew_reference"):
                    references.renew(step, self.parts.save_hf)

    def validate_loss(self, step: int) -> None:
        """Compute the loss of held-out rows, when due."""
        if self.validation_loss is not None and self.cadence.validates_before(step):
            self._log_validation(step, self.validation_loss.run(self.metrics))

    def validate(self, step: int) -> None:
        """Validate on held-out prompts when due, and take the results that other ranks have made."""
        results = [*self.collector.validations(step, self.metrics), *self.validation.before(step, self.metrics)]
        for version, numbers in results:
            self._log_validation(version, numbers)
        if results and results[-1][0] != step:
            self.metrics.constant("rollout/validated_version", results[-1][0])

    def _log_validation(self, step: int, results: dict[str, float]) -> None:
        """Log results of the weights before step `step` with this step: with a lag, a later one."""
        self.summary.add(step, results)
        for name, value in results.items():
            self.metrics.constant(name, value)

    def collect(self, step: int) -> list[Sample]:
        """Returns this rank's samples of the step, of weights that were attested."""
        if self.recovery is not None:
            run = self.parts
            self.recovery.end(step, self.output_dir, self.metrics, run.sinks, is_first=run.mesh.rank == 0)
            self.recovery = None
        groups = self.collector.groups(step, self.config.data.train_batch_size, self.metrics)
        samples = numbered_samples(groups)
        if self.config.algorithm.source != "file":
            self.parts.placement.provenance.check(step, samples)
        return samples

    def update(self, step: int, batch: Batch) -> None:
        """Train the critic, and the policy after the critic's own steps."""
        critic = self.parts.critic
        if critic is not None:
            critic.update(batch, self.metrics)
        if critic is None or critic.trains_policy(step):
            self.parts.update(batch)

    def end_iteration(self, step: int) -> None:
        """Train the reward model, if an outer iteration ends."""
        reward_model = self.parts.reward_model
        if reward_model is not None and self.cadence.reward_model_learns_after(step):
            reward_model.learn(step, self.metrics)

    def log(self, step: int, samples: list[Sample], batch: Batch) -> None:
        """Write the step's trace; reduce, write and show its metrics and samples."""
        assert batch.table is not None and batch.plan is not None
        if self.parts.trace is not None:  # before the metrics: every logged step has a trace
            with self.metrics.phase("trace"):
                self.parts.trace.write(step, [*samples, *self.parts.expert_samples], batch)
        table = batch.table.of_policy()
        self.report.log(step, self.metrics, samples, table, batch.plan, batch, epoch=self.collector.epoch())

    def save(self, steps_done: int) -> None:
        """Save a checkpoint when due; complete one that is written in the background."""
        checkpoints = self.parts.checkpoints
        if self.cadence.saves_after(steps_done):
            with self.metrics.phase("save_checkpoint"):
                self.save_now(steps_done)
        elif checkpoints.pending is not None:
            with self.metrics.phase("save_checkpoint"):
                checkpoints.poll()

    def remember(self, steps_done: int) -> None:
        """Copy the state for the memory that outlives the ranks, where there is one."""
        if self.parts.mirror.checkpoints is not None:
            with self.metrics.phase("mirror"):
                self._save_in(self.parts.mirror.checkpoints, steps_done)

    def save_now(self, steps_done: int) -> Path:
        """Save the state after `steps_done` steps; returns its folder. Collective."""
        if self.parts.trace is not None:
            self.parts.trace.saved(steps_done)
        return self._save_in(self.parts.checkpoints, steps_done)

    def _save_in(self, checkpoints: Checkpoints, steps_done: int) -> Path:
        run = self.parts
        state = {"collector": self.collector.state(), **run.state()}
        return checkpoints.save(steps_done, run.policy, self.config, state, run.trained)

    def save_at_once(self, steps_done: int) -> Path:
        """Save, and wait until the checkpoint is complete."""
        with self.parts.heartbeat.phase("save_checkpoint"):
            checkpoint = self.save_now(steps_done)
            self.parts.checkpoints.wait()
        return checkpoint

    # -- after the last step -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Validate and export the final weights, sample the curves, print the first and the last validation."""
        run, trainer = self.parts, self.config.trainer
        run.checkpoints.wait()
        if self.cadence.validates_at_end():
            results = {} if self.validation_loss is None else self.validation_loss.run(self.metrics)
            if self.validation.is_on:
                with run.rollout(self.num_steps):
                    results |= self.validation.run(self.num_steps, self.metrics)
            self.summary.add(self.num_steps, results)
            self.metrics.reduce(run.mesh.all_gather)  # clears the timings of this validation, which belong to no step
            run.sinks.log(self.num_steps, results)
        if trainer.save_hf_at_end:
            run.save_hf(self.output_dir / "hf", adapters=trainer.save_hf_at_end != "merged")
            for model in run.trained:
                model.save_hf(self.output_dir / model.folder_name, run.tokenizer_path)
        if run.mesh.rank == 0:
            self.summary.show(run.sinks)
        self.stopping.finished(self.num_steps, run.checkpoints.last)
