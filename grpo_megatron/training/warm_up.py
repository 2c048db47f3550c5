"""The supervised warm-up before GRPO (section `sft`): a supervised stage of its own, with the parts of any training step.

It is the run that `stage_config` describes: `algorithm.source=file` with the rows of `sft.train_files` in file order. Its
steps, metrics and checkpoints are in output_dir/sft/, and its result is output_dir/warmup/, a Hugging Face folder. A run
that ends within the warm-up goes on from the warm-up's newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from grpo_megatron.algo.plan import make_plan
from grpo_megatron.checks.resume import InputDigests, check_resume
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import AlgorithmConfig, Config, GuardsConfig
from grpo_megatron.data.responses import OfflineGroup
from grpo_megatron.data.sampler import LazySequence, Sampler
from grpo_megatron.models.policy import Policy
from grpo_megatron.parallel.exchange import exchange, gather_groups
from grpo_megatron.parallel.heartbeat import Heartbeat
from grpo_megatron.report.loggers import build_sinks
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.step import StepReport, record_update
from grpo_megatron.sampling.collector import FileCollector, numbered_samples
from grpo_megatron.storage.run_files import WARM_UP_FOLDER, add_event, steps_of
from grpo_megatron.training.beside import WARMUP_FOLDER
from grpo_megatron.training.checkpoint import Checkpoints, run_state
from grpo_megatron.training.correction import build_loss
from grpo_megatron.training.guards import Guards
from grpo_megatron.training.stopping import Cadence, Stopping
from grpo_megatron.training.trace import Trace

NUM_NOTES = 10  # lines of progress per warm-up
STAGE_NAME = "warm-up"  # on the console


def stage_config(config: Config) -> Config:
    """Returns the warm-up as a run from a file: the token-mean of the negative log-likelihood, one update per step.

    The guards' bands are those of GRPO, so they are off here.
    """
    sft, guards, trainer = config.sft, config.guards, config.trainer
    data = {"train_files": sft.train_files, "train_batch_size": sft.train_batch_size, "shuffle": False}
    data |= {"val_files": [], "val_tasks": [], "val_loss_files": []}
    actor = {"loss_mode": "sft", "loss_agg_mode": "token-mean", "use_kl_loss": False, "entropy_coeff": 0.0}
    run = {
        "output_dir": trainer.output_dir / WARM_UP_FOLDER,
        "total_training_steps": sft.steps,
        "total_epochs": None,
        "rollout_data_dir": None,
        "save_freq": -1 if trainer.save_freq == -1 else sft.save_freq,
        "logger": [name for name in trainer.logger if name in ("jsonl", "tensorboard")],  # W&B has the run itself
    }
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "actor": config.actor.model_copy(
                update={**actor, "ppo_mini_batch_size": None, "ppo_epochs": 1, "optim": sft.optim}
            ),
            "algorithm": AlgorithmConfig(source="file", adv_estimator="constant"),
            "guards": GuardsConfig(**{name: getattr(guards, name) for name in ("logprobs", "gradients", "weights")}),
            "trainer": trainer.model_copy(update=run),
        }
    )


def warm_up(
    config: Config,
    checked: Checked,
    policy: Policy,
    heartbeat: Heartbeat,
    note: Callable[[str], None],
    save_hf: Callable[[Path], None],
    inputs: InputDigests | None,
) -> None:
    """Make `sft.steps` supervised updates, rows in file order; then save the model. Sets its own optimizer. Collective.

    `note(text)` shows progress, about ten times. Raises Stopped when a stop was requested, after a checkpoint.
    """
    stage, mesh = stage_config(config), policy.mesh
    trainer, batch_size = stage.trainer, stage.data.train_batch_size
    policy.set_optimizer(stage.actor.optim, config.sft.steps)
    collector = FileCollector(Sampler(_rows(checked), batch_size, shuffle=False), mesh)
    checkpoints = Checkpoints(trainer.output_dir, mesh, 1, trainer.verify_checkpoints)
    first_step, checkpoint = 0, checkpoints.newest()
    if checkpoint is not None:
        check_resume(checkpoint, stage)
        checkpoints.load(checkpoint, policy)
        collector.load_state(run_state(checkpoint)["collector"])
        first_step = steps_of(checkpoint)
        note(f"the warm-up resumed from {checkpoint}")
    cadence, stopping, loss = (
        Cadence(trainer, None),
        Stopping(config.trainer, mesh, steps=f"{STAGE_NAME} steps"),
        build_loss(stage.actor),
    )
    guards = Guards(stage, mesh, save_hf, heartbeat.phase)
    metrics = Metrics(policy.device.synchronize)
    metrics.within = heartbeat.phase
    follow = heartbeat.listener  # the console of the whole run, whose steps are others

    trace = Trace(stage, policy, None, None, first_step) if trainer.trace != "off" else None

    def save(steps_done: int) -> Path:
        if trace is not None:
            trace.saved(steps_done)
        run = {"collector": collector.state(), "inputs": inputs.state() if inputs else {}}
        return checkpoints.save(steps_done, policy, stage, run)

    heartbeat.listener = lambda step, phases: follow(step, [STAGE_NAME, *phases] if phases else [])
    with build_sinks(trainer, rank=mesh.rank, first_step=first_step) as sinks, heartbeat.naming_timeouts():
        report = StepReport(stage, checked.tokenizer, policy, sinks, guards)
        for step in range(first_step, config.sft.steps):
            heartbeat.step = step
            with metrics.phase("step"):
                samples = numbered_samples(collector.groups(step, batch_size, metrics))
                table = gather_groups(samples, mesh)
                guards.begin(step, table)
                plan = make_plan(
                    table,
                    stage.algorithm,
                    stage.actor,
                    dp=mesh.dp,
                    train_batch_size=batch_size,
                    max_response_length=stage.data.max_response_length,
                    exact=config.model.exact,
                )
                batch = exchange(samples, table, plan, mesh)
                with metrics.phase("update_actor"):
                    sums, constants = policy.update(batch, loss, guard=guards)
                record_update(metrics, sums, constants, mesh.is_replica_reporter)
            batch.table = table
            if trace is not None:
                trace.write(step, samples, batch)
            reduced = report.log(step, metrics, samples, table, plan, batch, epoch=collector.epoch())
            if (step + 1) % max(1, config.sft.steps // NUM_NOTES) == 0 or step + 1 == config.sft.steps:
                note(
                    f"warm-up {step + 1:5d}/{config.sft.steps}  loss {reduced['actor/pg_loss']:.4f}  "
                    f"lr {reduced['actor/lr']:.2e}  {reduced['timing_s/step']:.2f} s/step"
                )
            if cadence.saves_after(step + 1):
                save(step + 1)
            stopping.after(step + 1, save)
        if mesh.rank == 0:
            add_event(trainer.output_dir, "done", config.sft.steps)
    if trace is not None:
        trace.close()
    heartbeat.listener = follow
    save_hf(config.trainer.output_dir / WARMUP_FOLDER)


def _rows(checked: Checked) -> Sequence[OfflineGroup]:
    """Returns the rows of the warm-up as rows of a file source."""

    def row(number: int) -> OfflineGroup:
        prompt, responses, rewards = checked.supervised_rows[number]
        named = replace(prompt, uid=f"{WARM_UP_FOLDER}/{number}", text="", source=WARM_UP_FOLDER)
        return named, responses, rewards

    return LazySequence(len(checked.supervised_rows), row)
