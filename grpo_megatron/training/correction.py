"""Correction: what the policy's own log-probabilities change in a batch.

The rollout correction (algo/corrections.py) weighs or rejects tokens; a KL penalty may be part of the reward. Rejections
and penalties are columns of the table, from which `algo.plan.weigh` makes weights and advantages. Factors of the policy
loss are in the batch. Where one optimizer step follows each rollout, the log-probabilities are those of its own forward
pass (`is_folded`): then the loss computes the factors, and `measure` is called after the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.algo.chord import expert_loss
from grpo_megatron.algo.corrections import correction_weights, importance_weights, mixed_old_logprobs, rejection_mask
from grpo_megatron.algo.distillation import with_teachers
from grpo_megatron.algo.kl import KlController, kl_penalties, reward_penalty, sequence_kl
from grpo_megatron.algo.losses import (
    LossInputs,
    MetricSum,
    PolicyLoss,
    folds_old_logprobs,
    has_kl_in_reward,
    has_kl_loss,
    is_corrected,
    policy_losses,
    selected_by,
    total_loss,
)
from grpo_megatron.algo.selection import select_tokens
from grpo_megatron.config import ActorConfig, AlgorithmConfig, DataConfig
from grpo_megatron.models.forward import LossFunction, MetricSums
from grpo_megatron.parallel.exchange import gather_rows
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.report.metrics import Metrics, rollout_mismatch
from grpo_megatron.types import Batch, GroupTable


def score_norms(logprobs: Tensor, squares: Tensor) -> Tensor:
    """Computes 1 - 2 p + sum_v p_v^2 of tokens [...], float64: the squared norm of the gradient of log p by the logits.

    It is at least 2^-23. Near p = 1 the rounding of the inputs is larger than the norm, and a negative weight could put the
    baseline outside the rewards.
    """
    norms = 1 - 2 * logprobs.double().exp() + squares.double()
    return norms.clamp(min=torch.finfo(torch.float32).eps)


class Correction:
    """The correction of batches for the rollout mismatch and for the KL in the reward, whose coefficient `kl` has."""

    def __init__(self, algorithm: AlgorithmConfig, actor: ActorConfig, mesh: Mesh, data: DataConfig) -> None:
        self.algorithm, self.mesh = algorithm, mesh
        self.is_corrected = is_corrected(algorithm, actor)
        self.is_folded = folds_old_logprobs(algorithm, actor, data.train_batch_size)
        self.kl = KlController(algorithm.kl_ctrl)

    def with_columns(self, batch: Batch, table: GroupTable, metrics: Metrics) -> GroupTable:
        """Set correction and loss mask of `batch`. Returns the table with the columns that change its plan. Collective.

        Changes nothing if the batch has no old log-probabilities.
        """
        if batch.old_logprobs is None:
            return table
        num_kept_tokens = self.measure(batch, metrics)
        columns: dict[str, list[Any]] = {}
        if num_kept_tokens is not None:  # not `if num_kept_tokens`: a rank without a row must join the collective
            columns["num_kept_tokens"] = self._column(num_kept_tokens, [0] * len(table))
        if batch.squares is not None:
            norms = score_norms(batch.old_logprobs, batch.squares)
            rows = (row[mask].tolist() for row, mask in zip(norms, batch.response_mask, strict=True))
            nothing = [[0.0] * length for length in table.response_length]
            columns["score_norms"] = self._column(dict(zip(batch.rows, rows, strict=True)), nothing)
        if has_kl_in_reward(self.algorithm):
            no_penalties = [[0.0] * length for length in table.response_length]
            columns["token_penalties"] = self._column(self._penalise(batch, len(table), metrics), no_penalties)
        return replace(table, **columns)

    def measure(self, batch: Batch, metrics: Metrics) -> dict[int, int] | None:
        """Record the mismatch, and set the correction. Returns the kept tokens of each row; None: nothing is rejected."""
        assert batch.old_logprobs is not None
        replica_metrics = metrics.when(self.mesh.is_replica_reporter)
        if self.algorithm.source == "policy":
            rollout_mismatch(replica_metrics, batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)
        return self._correct(batch, replica_metrics) if self.is_corrected else None

    def select(self, batch: Batch, actor: ActorConfig) -> None:
        """Set the tokens that algo/selection.py chooses of the whole step; nothing without such a rule. Collective."""
        if not (kind := selected_by(actor)):
            return
        assert batch.old_logprobs is not None
        read = [batch.old_entropy] if kind == "entropy" else [batch.advantages, batch.old_logprobs]
        values = torch.stack([tensor for tensor in read if tensor is not None]).float()  # [k, B, R]
        mask = batch.loss_mask & (batch.token_weights != 0)
        of_row = gather_rows({row: values[:, i, mask[i]] for i, row in enumerate(batch.rows)}, self.mesh)
        rows = sorted(of_row)
        batch.selected = torch.zeros_like(batch.advantages)
        if not any(of_row[row].shape[1] for row in rows):
            return
        chosen = select_tokens(kind, torch.cat([of_row[row] for row in rows], 1).double(), actor)
        parts = dict(zip(rows, chosen.split([of_row[row].shape[1] for row in rows]), strict=True))
        for i, row in enumerate(batch.rows):
            batch.selected[i, mask[i]] = parts[row].float()

    def _column(self, local_values: dict[int, Any], defaults: list[Any]) -> list[Any]:
        """Returns a table column from every rank's {row: value}; rows that no rank trains on get their default.

        Collective.
        """
        values = gather_rows(local_values, self.mesh)
        return [values.get(row, default) for row, default in enumerate(defaults)]

    def _correct(self, batch: Batch, metrics: Metrics) -> dict[int, int] | None:
        """Set this rank's correction weights and loss mask.

        Returns the number of tokens that each row keeps, or None where the config rejects nothing.
        """
        assert batch.old_logprobs is not None
        config, old, rollout = self.algorithm.rollout_correction, batch.old_logprobs, batch.rollout_logprobs
        kept, rejected = rejection_mask(old, rollout, batch.loss_mask, batch.advantages, config)
        if kept is not None:
            batch.loss_mask = kept
        batch.correction, weighted = correction_weights(old, rollout, batch.loss_mask, config)
        for name, (method, values) in (*rejected.items(), *weighted.items()):
            getattr(metrics, method)(name, values)
        if kept is None:
            return None
        return dict(zip(batch.rows, kept.sum(1).tolist(), strict=True))

    def _penalise(self, batch: Batch, num_samples: int, metrics: Metrics) -> dict[int, list[float]]:
        """Returns coefficient * KL at every response token of this rank's rows, 0 outside the loss.

        Collective. Updates the coefficient for the next step.
        """
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        mask = batch.loss_mask
        kl = reward_penalty(kl_penalties.get(self.algorithm.kl_penalty), batch.old_logprobs, batch.ref_logprobs, mask)
        coefficient = self.kl.kl_coef
        rows_with_tokens = [row for row, count in zip(batch.rows, mask.sum(1).tolist(), strict=True) if count]
        kl_of_row = gather_rows(dict(zip(rows_with_tokens, sequence_kl(kl, mask).tolist(), strict=True)), self.mesh)
        # In row order, so that no layout changes a bit.
        mean = sum(kl_of_row[row] for row in sorted(kl_of_row)) / len(kl_of_row) if kl_of_row else 0.0
        metrics.constant("actor/reward_kl_penalty", mean)
        metrics.constant("actor/reward_kl_penalty_coeff", coefficient)
        self.kl.update(mean, num_samples)
        lengths = [len(t) - p for t, p in zip(batch.tokens, batch.prompt_lengths, strict=True)]
        return {row: (coefficient * kl[i, : lengths[i]]).tolist() for i, row in enumerate(batch.rows)}


def build_loss(
    actor: ActorConfig,
    algorithm: AlgorithmConfig | None = None,
    policy_loss: PolicyLoss | None = None,
    *,
    teachers: Sequence[str] = (),
    discount: float = 0.0,
) -> LossFunction:
    """Build the total loss of one micro-batch from the config: policy loss, KL penalty and entropy.

    `algorithm`: with its rollout correction. `bypass_mode` takes the ratio to the engine's log-probabilities. Inputs
    without factors of the policy loss get them here, from the log-probabilities of this pass. `policy_loss`: in place
    of `actor.loss_mode`. `teachers`: their names; `discount` is that of the sampled objective (algo/distillation.py).
    """
    policy_loss = policy_loss or policy_losses.get(actor.loss_mode)
    penalty = kl_penalties.get(actor.kl_loss_type) if has_kl_loss(actor) else None
    correction = None if algorithm is None else algorithm.rollout_correction
    weighs = algorithm is not None and is_corrected(algorithm, actor)

    def loss(inputs: LossInputs) -> tuple[Tensor, MetricSums]:
        distilled: MetricSums = {}
        if inputs.teacher_logprobs is not None:
            inputs, distilled = with_teachers(inputs, teachers, discount)
        if correction is not None and correction.bypass_mode:
            inputs = replace(inputs, old_logprobs=inputs.rollout_logprobs)
        elif inputs.ages is not None:
            old = mixed_old_logprobs(inputs.logprobs.detach(), inputs.rollout_logprobs, inputs.ages)
            inputs = replace(inputs, old_logprobs=old)
        if correction is not None and weighs and inputs.correction is None:
            factors = importance_weights(inputs.old_logprobs, inputs.rollout_logprobs, inputs.mask, correction)
            inputs = replace(inputs, correction=factors)
        total, metrics = total_loss(inputs, actor, policy_loss, penalty)
        if inputs.expert_weights is not None and inputs.all_logprobs is not None and algorithm is not None:
            expert = expert_loss(inputs.all_logprobs, inputs.expert_weights, algorithm.chord)
            total, metrics["actor/expert_loss"] = total + expert, MetricSum(expert.detach(), None)
        return total, {**metrics, **distilled}

    return loss
