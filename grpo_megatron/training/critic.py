"""Critic: the value model of PPO (arXiv 1707.06347) in the loop, its column of the table, its targets and its update.

Values are computed where the policy trains on the rows, after the correction: r_t needs the KL penalty. They are
gathered, so that every rank computes the advantages of the whole step, whitened over all of it (algo/ppo.py).
The first `trainer.critic_warmup` or `critic.pretrain_steps` steps, whichever are more, leave the policy as it is. In the
pretraining (VC-PPO, arXiv 2503.01491) the critic learns returns, lambda 1, of this fixed policy.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from grpo_megatron.algo.plan import critic_plan, kept_mini_batches
from grpo_megatron.algo.ppo import explained_variance, length_adaptive_lams, value_targets
from grpo_megatron.checks.models import has_critic
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config
from grpo_megatron.device import Device
from grpo_megatron.models.heads.reward_folder import read_reward_folder
from grpo_megatron.models.heads.scalar import ValueModel
from grpo_megatron.parallel.exchange import apply_plan, gather_rows
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.step import record_update
from grpo_megatron.storage.run_files import CRITIC_FILE, CRITIC_FOLDER
from grpo_megatron.training.checkpoint import TrainedModel
from grpo_megatron.training.references import policy_start
from grpo_megatron.types import Batch, GroupTable, Plan, rows_of_mini_batch


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

    def _target_lam(self, step: int) -> float:
        if step < self.config.pretrain_steps:
            return 1.0
        return self.algorithm.lam if self.config.lam is None else self.config.lam

    def set_returns(self, step: int, batch: Batch, table: GroupTable, metrics: Metrics) -> None:
        """Set the targets of the values, from the table with their column."""
        assert batch.values is not None
        targets = value_targets(table, self.algorithm.gamma, self._target_lam(step))
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
