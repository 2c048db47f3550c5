"""Which forward passes a step makes besides the update, and why: lines of the printed plan."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_megatron.algo.needs import (
    folds_old_logprobs,
    has_kl_in_reward,
    has_kl_loss,
    needs_old_logprobs,
    needs_reference,
    reasons_for_old_pass,
)
from grpo_megatron.config import Config


def pass_lines(config: Config) -> Iterator[tuple[str, str]]:
    """(name, text) of each line: old log-probabilities, reference."""
    actor, algorithm, batch = config.actor, config.algorithm, config.data.train_batch_size
    name = "old log-probs"
    if folds_old_logprobs(algorithm, actor, batch):
        yield name, "of the update's own forward pass"
    elif not needs_old_logprobs(algorithm, actor):
        yield name, f"not read by {actor.loss_mode}"
    for reason in reasons_for_old_pass(algorithm, actor, batch):
        yield name, f"a pass before the update: {reason}"
    yield "reference", "; ".join(_uses_of_reference(config))


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
