"""Revision: what only the training engine's log-probabilities can tell, put into the batch before the update.

- The rollout correction (algo/correction.py): weights on the policy loss, or rejected tokens. Weights leave every count
  as it is; a rejected token counts nowhere, so the token weights are made anew over all ranks.
- A KL penalty in the reward, which moves the advantages of the whole group, wherever its samples are held.

Both end in a new plan with every row where it is. Where neither is asked for, nothing is sent and the plan stays. The
mismatch itself is measured first, over all tokens: `rollout_corr/*`, `training/rollout_*`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_megatron.algo.correction import MetricRecords, correction_weights, rejection_mask
from grpo_megatron.algo.kl import KlController, kl_penalties, reward_penalty, sequence_kl
from grpo_megatron.algo.needs import is_corrected
from grpo_megatron.algo.plan import revise_plan
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.observability.metrics import Metrics, rollout_mismatch
from grpo_megatron.parallel.exchange import follow, gather_rows
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import Batch, GroupTable, Plan


class Revision:
    def __init__(self, algorithm: AlgorithmConfig, actor: ActorConfig, mesh: Mesh, max_response_length: int) -> None:
        self.algorithm, self.actor, self.mesh = algorithm, actor, mesh
        self.max_response_length = max_response_length
        self.corrects = is_corrected(algorithm, actor)
        self.kl = KlController(algorithm.kl_ctrl)

    def apply(self, batch: Batch, table: GroupTable, plan: Plan, metrics: Metrics) -> Plan:
        """Set correction, masks, advantages and weights of `batch`; the plan that they follow. Collective."""
        mine = metrics.when(self.mesh.is_first_replica_rank)
        if batch.old_logprobs is not None and self.algorithm.source == "policy":
            rollout_mismatch(mine, batch.old_logprobs, batch.rollout_logprobs, batch.response_mask)
        facts: dict[str, dict[int, Any]] = {}
        if self.corrects:
            kept = self._correct(batch, mine)
            if kept:
                facts["num_kept_tokens"] = kept
        if self.algorithm.use_kl_in_reward:
            facts["token_penalties"] = self._penalise(batch, len(table), metrics)
        if not facts:
            return plan
        plan = self._revised(table, plan, facts)
        follow(batch, plan, self.mesh.dp_rank)
        return plan

    def _correct(self, batch: Batch, metrics: Metrics) -> dict[int, int]:
        """Weights and masks of this rank's rows. Returns the tokens that each row keeps, where any may be rejected."""
        assert batch.old_logprobs is not None
        correction, old, drawn = self.algorithm.rollout_correction, batch.old_logprobs, batch.rollout_logprobs
        kept, records = rejection_mask(old, drawn, batch.response_mask, batch.advantages, correction)
        _record(metrics, records)
        if kept is not None:
            batch.response_mask = kept
        batch.correction, records = correction_weights(old, drawn, batch.response_mask, correction)
        _record(metrics, records)
        if kept is None:
            return {}
        return dict(zip(batch.rows, kept.sum(1).tolist(), strict=True))

    def _penalise(self, batch: Batch, num_samples: int, metrics: Metrics) -> dict[int, list[float]]:
        """beta KL of every token of this rank's rows. Moves beta for the next step."""
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        mask = batch.response_mask
        kl = reward_penalty(kl_penalties.get(self.algorithm.kl_penalty), batch.old_logprobs, batch.ref_logprobs, mask)
        beta = self.kl.kl_coef
        said = [row for row, count in zip(batch.rows, mask.sum(1).tolist(), strict=True) if count]
        per_row = dict(zip(said, sequence_kl(kl, mask).tolist(), strict=True))
        mean = _mean(gather_rows(per_row, self.mesh))
        metrics.constant("actor/reward_kl_penalty", mean)
        metrics.constant("actor/reward_kl_penalty_coeff", beta)
        self.kl.update(mean, num_samples)
        lengths = [len(t) - p for t, p in zip(batch.tokens, batch.prompt_lengths, strict=True)]
        return {row: (beta * kl[i, : lengths[i]]).tolist() for i, row in enumerate(batch.rows)}

    def _revised(self, table: GroupTable, plan: Plan, facts: dict[str, dict[int, Any]]) -> Plan:
        if "num_kept_tokens" in facts:
            kept = gather_rows(facts["num_kept_tokens"], self.mesh)
            table = replace(table, num_kept_tokens=[kept.get(row, 0) for row in range(len(table))])
        if "token_penalties" in facts:
            penalties = gather_rows(facts["token_penalties"], self.mesh)
            nothing = [[0.0] * length for length in table.response_length]  # of rows that are not trained on
            table = replace(table, token_penalties=[penalties.get(row, none) for row, none in enumerate(nothing)])
        return revise_plan(plan, table, self.algorithm, self.actor, max_response_length=self.max_response_length)


def _record(metrics: Metrics, records: MetricRecords) -> None:
    for name, (method, values) in records.items():
        getattr(metrics, method)(name, values)


def _mean(values: dict[int, float]) -> float:
    return sum(values[row] for row in sorted(values)) / len(values) if values else 0.0
