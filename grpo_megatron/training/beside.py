"""The models beside the policy in training: the reference of the KL term or of the samples, and the critic.

A reference starts as `ref.path`, or as the policy after the warm-up. Iterative GRPO (DeepSeekMath, arXiv:2402.03300,
algorithm 1) replaces it with the current policy every `algorithm.iteration_steps` steps, and keeps a copy in
`output_dir/iterations/step_000040/`, so that a run resumed within an iteration has the same reference. A policy with LoRA
that starts from the reference's weights shares one model with it: its base, or the adapters of an earlier time.
A teacher that is the policy of an earlier time (teachers.NAME.self=start) is such a model, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from grpo_megatron.algo.losses import reads_reference
from grpo_megatron.algo.plan import critic_plan, kept_mini_batches
from grpo_megatron.algo.ppo import explained_variance, length_adaptive_lams, value_targets
from grpo_megatron.checks.models import has_critic
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.device import Device
from grpo_megatron.models.heads.reward_folder import read_reward_folder
from grpo_megatron.models.heads.scalar import ValueModel
from grpo_megatron.models.policy import AdapterReference, Policy, Reference
from grpo_megatron.parallel.exchange import apply_plan, gather_rows
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.step import record_update
from grpo_megatron.storage.files import remove_folder
from grpo_megatron.storage.run_files import CRITIC_FILE, CRITIC_FOLDER, on_disk, steps_of
from grpo_megatron.training.checkpoint import TrainedModel
from grpo_megatron.training.stopping import Cadence
from grpo_megatron.types import Batch, GroupTable, Plan, rows_of_mini_batch

WARMUP_FOLDER = "warmup"  # in the output folder: the model after the warm-up, which GRPO and its reference start from


def policy_start(config: Config) -> Path:
    """Returns the model that the policy starts from: the warm-up's result, if there is one."""
    return config.trainer.output_dir / WARMUP_FOLDER if config.sft.steps else config.model.path


class References:
    """The reference of a run. Build it on every rank after the warm-up. Raises ConfigError if a resumed run lacks its copy.

    The reference of step 0 is `ref.path`, or what the policy starts from. Copies of renewed ones are in `iterations`.
    `teacher`: it is this teacher of the config instead, which starts as the policy does.
    """

    def __init__(self, config: Config, policy: Policy, first_step: int, teacher: str | None = None) -> None:
        actor, steps, path, self.prefix = config.actor, config.algorithm.iteration_steps, config.ref.path, "step_"
        self.is_read = reads_reference(config.algorithm, actor)
        self.lag = 0  # steps between the policy that is copied and the one that is the reference
        if teacher is not None:
            of_teacher = config.teachers[teacher]
            self.lag = of_teacher.lag_steps or 0
            actor, steps, path = of_teacher.layout(actor), 1 if self.lag else of_teacher.renew_steps, None
            self.prefix, self.is_read = f"{teacher}.step_", True
        self.config, self.actor, self.path = config, actor, path
        self.policy, self.cadence = policy, Cadence(config.trainer, steps)
        self.folder = config.trainer.output_dir / "iterations"
        self.reference: Reference | AdapterReference = self._load(self._copy_for(first_step))

    def logprobs(self, batch: Batch) -> Tensor | None:
        """Returns None where nothing reads them: the run only samples from the reference. Collective."""
        return self.reference.logprobs(batch) if self.is_read else None

    def renew(self, step: int, save_hf: Callable[..., None]) -> None:
        """Keep a copy of the policy's weights before step `step`, and take them, or those of `lag` steps ago. Collective."""
        save_hf(self._copy_of(step), adapters=True)
        if self.lag:
            self.reference = self._load(self._copy_of(step - self.lag)) if step > self.lag else self.reference
        else:
            if self.policy.lora is not None and isinstance(self.reference, Reference):
                self.reference = AdapterReference(self.policy, {})
            self.reference.copy_from(self.policy)
        if self.policy.mesh.rank == 0:
            oldest_checkpoint = next(map(steps_of, on_disk(self.folder.parent)), 0)  # a run may still resume from it
            oldest_needed = self.cadence.iteration_start(oldest_checkpoint) - self.lag
            for copy in self.folder.glob(f"{self.prefix}*"):
                if int(copy.name.removeprefix(self.prefix)) < oldest_needed:
                    remove_folder(copy)

    def _copy_for(self, first_step: int) -> Path | None:
        """Returns the copy to load when a run begins at `first_step`.

        None: it is the start's, or renewed before that step.
        """
        start = self.cadence.iteration_start(first_step)
        needed = [start] if start not in (0, first_step) else range(max(1, first_step - self.lag), first_step)
        for copy in map(self._copy_of, needed):
            if not copy.is_dir():
                raise ConfigError(
                    f"step {first_step} needs the policy before step {copy.name.removeprefix(self.prefix)}, and its copy"
                    f" {str(copy)!r} is gone; put it back, or set trainer.resume_mode=disable"
                )
        return None if self.lag or not needed else copy

    def _load(self, copy: Path | None) -> Reference | AdapterReference:
        """Build the model from a copy; None: from what the run started with. Collective."""
        config, policy = self.config, self.policy
        start = copy or self.path or policy_start(config)
        if policy.lora is not None and (copy is not None or start == config.model.path):
            adapters = copy or (config.actor.lora.path if self.path is None else None)
            stored = policy.lora.stored(adapters, policy.arch, policy.mesh) if adapters is not None else {}
            return AdapterReference(policy, stored)
        parts = (start, config.model.dtype, policy.arch, self.actor, policy.mesh, policy.device)
        return Reference.load(*parts, temperature=config.rollout.temperature, exact=config.model.exact)

    def _copy_of(self, step: int) -> Path:
        return self.folder / f"{self.prefix}{step:06d}"


# -- Critic: the value model of PPO (arXiv 1707.06347): its column of the table, its targets and its update ------------
# Values are computed where the policy trains on the rows, after the correction: r_t needs the KL penalty. They are
# gathered, so that every rank computes the advantages of the whole step, whitened over all of it (algo/ppo.py).
# The first `trainer.critic_warmup` or `critic.pretrain_steps` steps, whichever are more, leave the policy as it is. In the
# pretraining (VC-PPO, arXiv 2503.01491) the critic learns returns, lambda 1, of this fixed policy.


class Critic(TrainedModel):
    """The value model in training. Its learning-rate schedule covers the whole run."""

    model: ValueModel
    folder_name, file_name = CRITIC_FOLDER, CRITIC_FILE

    def __init__(self, config: Config, model: ValueModel) -> None:
        self.config, self.model, self.mesh = config.critic, model, model.mesh
        self.algorithm, self.actor, self.critic_only_steps = config.algorithm, config.actor, config.critic_only_steps
        self.train_batch_size, self.max_response_length = config.data.train_batch_size, config.data.max_response_length
        per_step = self.config.num_updates(1, self.actor, self.train_batch_size)
        total_steps = config.trainer.total_training_steps
        with model.in_use():
            model.set_optimizer(self.config.optim, max(1, total_steps * per_step), period=per_step)

    def trains_policy(self, step: int) -> bool:
        """Returns whether step `step` updates the policy too."""
        return step >= self.critic_only_steps

    def with_columns(self, batch: Batch, table: GroupTable, plan: Plan, metrics: Metrics) -> GroupTable:
        """Set the values of `batch`; return the table with the values of every row, and lambdas. Collective.

        `table` has the columns of the correction: penalties and numbers of kept tokens.
        """
        with metrics.phase("values"):
            batch.values = self.model.numbers(batch)
        alpha = self.config.lam_alpha
        lams = [] if alpha is None else length_adaptive_lams(table, alpha)
        return replace(table, values=self._gathered(batch, batch.values, table, plan), lams=lams)

    def _gathered(self, batch: Batch, values: torch.Tensor, table: GroupTable, plan: Plan) -> list[list[float]]:
        """Gathers the values of every row's response tokens; [] for rows that no rank trains on. Collective."""
        lengths = batch.response_mask.sum(1).tolist()
        planned = [i for mini in kept_mini_batches(plan, table) for i in rows_of_mini_batch(batch.mini_batches[mini])]
        local = {batch.rows[i]: values[i, : lengths[i]].numpy() for i in planned}
        gathered = gather_rows(local, self.mesh)
        return [gathered[row].tolist() if row in gathered else [] for row in range(len(table))]

    def set_returns(self, step: int, batch: Batch, table: GroupTable, metrics: Metrics) -> None:
        """Set the targets of the values, from the table with their column."""
        assert batch.values is not None
        lam = self.algorithm.lam if self.config.lam is None else self.config.lam
        lam = 1.0 if step < self.config.pretrain_steps else lam
        targets = value_targets(table, self.algorithm.gamma, lam)
        batch.returns = torch.zeros_like(batch.values)
        for i, row in enumerate(batch.rows):
            target = targets.get(row, [])
            batch.returns[i, : len(target)] = torch.tensor(target)
        explained = explained_variance(table, targets)
        if explained is not None:
            metrics.constant("critic/vf_explained_var", explained)
        local = metrics.when(self.mesh.is_replica_reporter)
        local.mean_of("critic/returns/mean", batch.returns[batch.loss_mask])
        local.mean_of("critic/values/mean", batch.values[batch.loss_mask])

    def update(self, batch: Batch, metrics: Metrics) -> None:
        """Train on the rows of `batch`, in mini-batches of the critic's own on the same ranks. Collective."""
        assert batch.plan is not None and batch.table is not None
        plan = critic_plan(
            batch.plan,
            batch.table,
            self.algorithm,
            self.actor,
            self.config,
            train_batch_size=self.train_batch_size,
            max_response_length=self.max_response_length,
        )
        batch = replace(batch)
        apply_plan(batch, plan, self.mesh.dp_rank)
        with metrics.phase("update_critic"), self.model.in_use():
            sums, constants = self.model.update_values(
                batch, self.config.cliprange_value, epochs=self.config.num_epochs(self.actor)
            )
        record_update(metrics, sums, constants, self.mesh.is_replica_reporter)


def build_critic(config: Config, checked: Checked, mesh: Mesh, device: Device) -> Critic | None:
    """Returns the value model, if the estimator reads values.

    Collective. Without `critic.path` it starts as the policy does.
    """
    if not has_critic(config.algorithm):
        return None
    folder = checked.critic_folder or read_reward_folder(policy_start(config), "value")
    parts = (folder, config.model.dtype, config.actor, mesh, device)
    critic = config.critic
    return Critic(config, ValueModel(*parts, optim=critic.optim, lora=critic.lora, offload=critic.offload))
