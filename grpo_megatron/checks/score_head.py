"""Checks of a run that trains a scalar head: a reward model from pairs, or a process reward model from step labels."""

from __future__ import annotations

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.checks.problems import Problems
from grpo_megatron.checks.scored_rows import trains_scores
from grpo_megatron.checks.second_model import read_head_folder
from grpo_megatron.config import Config
from grpo_megatron.models.heads.folder import HeadKind, RewardFolder

HEAD_KINDS: dict[str, HeadKind] = {"response": "outcome", "step": "process"}  # LossFacts.scores -> kind of the folder


def read_scored_model(config: Config) -> RewardFolder:
    """What model.path has, as a model with a scalar head of the loss's kind. Raises ConfigError."""
    mode = config.actor.loss_mode
    kind = HEAD_KINDS[policy_losses.facts(mode).scores]
    return read_head_folder(config.model.path, kind, "model.path", f" with actor.loss_mode={mode}")


def score_head_problems(config: Config) -> Problems:
    """The loss of a scalar head against the rest of the config."""
    actor, algorithm, data = config.actor, config.algorithm, config.data
    facts, estimator = policy_losses.facts(actor.loss_mode), advantage_estimators.facts(algorithm.adv_estimator)
    if estimator.scores and estimator.scores != facts.scores:
        losses = " or ".join(policy_losses.names_with(scores=estimator.scores))
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} labels what a scalar head scores, and actor.loss_mode="
            f"{actor.loss_mode} does not read it; set loss_mode={losses}, or another estimator"
        )
    if not trains_scores(config):
        return
    key = f"actor.loss_mode={actor.loss_mode} trains a model that scores, without a head over the vocabulary"
    if estimator.scores != facts.scores:
        estimators = " or ".join(advantage_estimators.names_with(scores=facts.scores))
        yield f"{key}: algorithm.adv_estimator={algorithm.adv_estimator} has no labels for it; set {estimators}"
    if algorithm.source != "file":
        yield f"{key}: it draws no responses; set algorithm.source=file, with rows in data.train_files"
    if data.val_files or data.val_tasks:
        yield (
            f"{key}: it cannot answer data.val_files or data.val_tasks; leave them out, and set data.val_loss_files to"
            " held-out rows"
        )
    if config.sft.steps:
        yield f"{key}: it cannot learn from sft.steps={config.sft.steps}; set sft.steps=0"
    if actor.use_kl_loss or algorithm.use_kl_in_reward:
        yield f"{key}: there is no KL to a reference; set actor.use_kl_loss=false and algorithm.use_kl_in_reward=false"
    if actor.entropy_coeff:
        yield f"{key}: it has no entropy; set actor.entropy_coeff=0"
    if config.reward_paths:
        yield f"{key}, and reward_model.path or reward_models give rewards to drawn responses; leave them out"
    if actor.megatron.context_parallel_size > 1:
        yield f"{key}: it reads whole sequences on each rank; set actor.megatron.context_parallel_size=1"
    if facts.scores == "step" and config.rollout.multi_turn.environment is not None:
        yield f"{key}: steps are of one answer, not of several turns; leave rollout.multi_turn.environment out"
