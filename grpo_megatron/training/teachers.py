"""Teachers in the loop: models beside the policy, or the policy itself, that score its responses (algo/distillation.py)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grpo_megatron.algo.advantages import copies_of
from grpo_megatron.algo.plan import pack_units, row_weights
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import ActorConfig, Config, MoeConfig
from grpo_megatron.models.policy import AdapterReference, Policy, Reference
from grpo_megatron.training.beside import policy_start
from grpo_megatron.types import Batch, TeacherScores


class Teachers:
    """The teachers of a run, in the policy's layout. They sleep as the reference does. Build it on every rank."""

    def __init__(self, config: Config, checked: Checked, policy: Policy) -> None:
        self.config, self.mesh, self.num_ids, objective = (
            config,
            policy.mesh,
            policy.arch.vocab_size,
            config.distillation,
        )
        self.actor = config.actor.model_copy(update={"moe": MoeConfig()})  # their experts are not the policy's
        self.models = [_build(config, checked, policy, name, self.actor) for name in config.teachers]
        self.heads: list[Tensor | None] = []  # of the distributions over the whole vocabulary
        if objective.kl != "sampled" and objective.top_k == 0:
            for name, teacher in config.teachers.items():
                dtype, path = getattr(torch, teacher.dtype or config.model.dtype), teacher.path or policy_start(config)
                self.heads.append(policy.teacher_head(path, checked.teachers[name], dtype))

    def score(self, batch: Batch) -> TeacherScores:
        """Compute what the objective reads of the responses. Collective."""
        objective, index = self.config.distillation, self._index(batch)
        rows: list[Tensor | None] = [None] * len(batch) if self.mesh.is_last_stage else []  # their distributions
        logprobs = torch.zeros(batch.response_mask.shape)
        for number, model in enumerate(self.models):
            part = self._part(batch, index, number)
            if objective.kl == "sampled":
                logprobs += model.logprobs(part)  # 0 in the rows of others
                continue
            of_part, distributions = model.distribution(part, objective.top_k, self.num_ids)
            logprobs += of_part
            for row, distribution in enumerate(distributions):
                rows[row] = distribution if distribution is not None else rows[row]
        scores = TeacherScores(index, torch.zeros_like(logprobs), logprobs, kl=objective.kl, beta=objective.beta)
        if objective.kl == "sampled":
            return scores
        return replace(scores, top=rows) if objective.top_k else replace(scores, states=rows, heads=self.heads)

    def _index(self, batch: Batch) -> list[int]:
        """The number of each row's teacher; -1: none, of prompts that no data file has."""
        names = list(self.config.teachers)
        if self.config.distillation.key is None:
            return [0] * len(batch)
        return [names.index(name) if name else -1 for name, _ in batch.teacher_prompts]

    def _part(self, batch: Batch, index: list[int], number: int) -> Batch:
        """The rows of one teacher, in the micro-batches of the update; with prompts of its own, in others.

        The other rows stay in the columns, so that each row has its place. Collective.
        """
        teacher = list(self.config.teachers.values())[number]
        if teacher.prompt_column is None:
            minis = [[[row for row in micro if index[row] == number] for micro in mini] for mini in batch.mini_batches]
            return replace(batch, mini_batches=minis, routes=None, recorded_routes=None)
        tokens, lengths = list(batch.tokens), list(batch.prompt_lengths)
        rows = [row for mini in batch.mini_batches for micro in mini for row in micro if index[row] == number]
        for row in rows:
            if ids := batch.teacher_prompts[row][1]:
                tokens[row], lengths[row] = torch.cat([torch.tensor(ids), tokens[row][lengths[row] :]]), len(ids)
        [packed] = pack_units([[[row] for row in rows]], [len(one) for one in tokens], self.actor)
        count = max(self.mesh.all_gather(len(packed)))  # experts need equal counts
        packed += [[] for _ in range(count - len(packed))]
        return replace(
            batch,
            tokens=tokens,
            prompt_lengths=lengths,
            mini_batches=[packed],
            shares_prompts=False,
            routes=None,
            recorded_routes=None,
        )

    def weigh(self, batch: Batch) -> None:
        """Set the weights of the scores, when the plan has its token weights. Counts are of the whole mini-batch."""
        assert batch.teacher is not None and batch.plan is not None and batch.table is not None
        config, weights = self.config, batch.token_weights
        if (mode := config.distillation.loss_agg_mode) is not None:
            actor = config.actor.model_copy(update={"loss_agg_mode": mode})
            copies = copies_of(batch.table, config.algorithm)
            limit = config.data.max_response_length
            of_rows = row_weights(batch.plan.mini_batches, batch.table, copies, actor, limit)
            weights = torch.tensor([of_rows[row] for row in batch.rows])[:, None] * batch.loss_mask
        coefficients = torch.tensor([*(teacher.coefficient for teacher in config.teachers.values()), 0.0])  # -1: none
        weights = coefficients[batch.teacher.index][:, None] * weights
        assert not bool(((weights != 0) & (batch.token_weights == 0)).any()), "a token of a teacher is not in the loss"
        batch.teacher = replace(batch.teacher, weights=weights)


def _build(
    config: Config, checked: Checked, policy: Policy, name: str, actor: ActorConfig
) -> Policy | Reference | AdapterReference:
    """Build one teacher. The policy as it is needs no memory, and with LoRA nor does the policy as it started. Collective."""
    teacher = config.teachers[name]
    if teacher.self == "current":
        return policy
    if teacher.self == "start" and policy.lora is not None and not config.sft.steps:
        adapters = config.actor.lora.path
        stored = policy.lora.stored(adapters, policy.arch, policy.mesh) if adapters is not None else {}
        return AdapterReference(policy, stored)
    path, dtype = teacher.path or policy_start(config), teacher.dtype or config.model.dtype
    parts = (path, dtype, checked.teachers[name], actor, policy.mesh, policy.device)
    return Reference.load(*parts, temperature=config.rollout.temperature)


def build_teachers(config: Config, checked: Checked, policy: Policy) -> Teachers | None:
    """Build the teachers of the config; None without. Collective."""
    return Teachers(config, checked, policy) if config.teachers else None
