"""Which forward passes a step makes besides the update, and why: lines of the printed plan. Whether prompts can be shared."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.algo.needs import (
    folds_old_logprobs,
    forward_only_at_zero_advantage,
    has_kl_in_reward,
    has_kl_loss,
    needs_old_logprobs,
    needs_reference,
    reasons_for_old_pass,
)
from grpo_megatron.config import Config
from grpo_megatron.models.architecture import Architecture


def pass_lines(config: Config) -> Iterator[tuple[str, str]]:
    """(name, text) of each line: old log-probabilities, reference, what is left out of the update."""
    actor, algorithm, batch = config.actor, config.algorithm, config.data.train_batch_size
    name = "old log-probs"
    if folds_old_logprobs(algorithm, actor, batch):
        yield name, "of the update's own forward pass"
    elif not needs_old_logprobs(algorithm, actor):
        yield name, f"not read by {actor.loss_mode}"
    for reason in reasons_for_old_pass(algorithm, actor, batch):
        yield name, f"a pass before the update: {reason}"
    yield "reference", "; ".join(_uses_of_reference(config))
    if forward_only_at_zero_advantage(algorithm, actor):
        yield "backward pass", "left out for rows of advantage 0, where the plan finds this cheaper"
    if actor.share_prompts:
        yield "prompts", "one copy for the responses in a micro-batch, where the heaviest rank gets lighter"


def sharing_problems(config: Config, arch: Architecture | None) -> Iterator[str]:
    """What cannot be trained with shared prompts."""
    actor = config.actor
    if not actor.share_prompts:
        return
    key, megatron = "actor.share_prompts=true", actor.megatron
    if megatron.context_parallel_size > 1:
        yield (
            f"{key} packs a prompt with all of its responses, and actor.megatron.context_parallel_size="
            f"{megatron.context_parallel_size} cuts every sequence by itself; set it to 1, or share_prompts=false"
        )
    elif config.trainer.device != "cpu" and megatron.transformer_impl != "local":
        yield (
            f"{key} needs the attention of Megatron-Core's layers, and actor.megatron.transformer_impl="
            f"{megatron.transformer_impl} may take Transformer Engine's; set transformer_impl=local, or share_prompts=false"
        )
    if arch is not None and arch.latent is not None:
        yield f"{key} is not made for the latent attention of {arch.family}; set share_prompts=false"
    if policy_losses.facts(actor.loss_mode).paired:
        yield f"{key} has no place for the pairs of actor.loss_mode={actor.loss_mode}; set share_prompts=false"
    if advantage_estimators.facts(config.algorithm.adv_estimator).needs_values:
        yield (
            f"{key} is not made for the critic of algorithm.adv_estimator={config.algorithm.adv_estimator!r}, which packs"
            " the same rows; set share_prompts=false"
        )


def _uses_of_reference(config: Config) -> Iterator[str]:
    """What the reference model is used for."""
    actor, algorithm = config.actor, config.algorithm
    if not needs_reference(algorithm, actor):
        yield "no reference model" + (", as actor.kl_loss_coef=0" if actor.use_kl_loss else "")
        return
    if has_kl_loss(actor):
        yield f"{actor.kl_loss_coef:g} x {actor.kl_loss_type} in the loss"
    if has_kl_in_reward(algorithm):
        yield f"{algorithm.kl_ctrl.kl_coef:g} x {algorithm.kl_penalty} in the reward"
    if algorithm.source == "initial":
        yield "draws the responses"
    if not (has_kl_loss(actor) or has_kl_in_reward(algorithm) or algorithm.source == "initial"):
        yield f"read by {actor.loss_mode}"
