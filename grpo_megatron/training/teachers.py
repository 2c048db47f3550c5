"""Teachers in the loop: frozen models beside the policy that score its responses (algo/distillation.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.algo.advantages import copies_of
from grpo_megatron.algo.plan import row_weights
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config, MoeConfig
from grpo_megatron.models.forward import LanguageModel
from grpo_megatron.models.policy import Reference
from grpo_megatron.types import Batch, TeacherScores


class Teachers:
    """The teachers of a run, in the policy's layout. They sleep as the reference does. Build it on every rank."""

    def __init__(self, config: Config, checked: Checked, policy: LanguageModel) -> None:
        self.config, self.num_ids = config, policy.arch.vocab_size
        mesh, device, objective = policy.mesh, policy.device, config.distillation
        actor = config.actor.model_copy(update={"moe": MoeConfig()})  # its experts are not the policy's
        self.models = [
            Reference.load(
                teacher.path,
                teacher.dtype or config.model.dtype,
                checked.teachers[name],
                actor,
                mesh,
                device,
                temperature=config.rollout.temperature,
            )
            for name, teacher in config.teachers.items()
        ]
        self.heads: list[Tensor | None] = []  # of the distributions over the whole vocabulary
        if objective.kl != "sampled" and objective.top_k == 0:
            for name, teacher in config.teachers.items():
                dtype = getattr(torch, teacher.dtype or config.model.dtype)
                self.heads.append(policy.teacher_head(teacher.path, checked.teachers[name], dtype))

    def score(self, batch: Batch) -> TeacherScores:
        """Compute what the objective reads of the responses, in the micro-batches of the update. Collective."""
        objective, [model] = self.config.distillation, self.models
        parts: dict[str, Any] = {"index": [0] * len(batch), "weights": torch.zeros_like(batch.token_weights)}
        parts |= {"kl": objective.kl, "beta": objective.beta, "heads": self.heads}
        if objective.kl == "sampled":
            return TeacherScores(logprobs=model.logprobs(batch), **parts)
        logprobs, distributions = model.distribution(batch, objective.top_k, self.num_ids)
        parts["top" if objective.top_k else "states"] = distributions
        return TeacherScores(logprobs=logprobs, **parts)

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
        coefficients = torch.tensor([teacher.coefficient for teacher in config.teachers.values()])
        weights = coefficients[batch.teacher.index][:, None] * weights
        assert not bool(((weights != 0) & (batch.token_weights == 0)).any()), "a token of a teacher is not in the loss"
        batch.teacher = replace(batch.teacher, weights=weights)


def build_teachers(config: Config, checked: Checked, policy: LanguageModel) -> Teachers | None:
    """Build the teachers of the config; None without. Collective."""
    return Teachers(config, checked, policy) if config.teachers else None
