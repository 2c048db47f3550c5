"""What a method needs computed: properties of the config that the trainer and the checks must agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.config import ActorConfig, AlgorithmConfig

if TYPE_CHECKING:
    from grpo_megatron.algo.losses import LossFacts


def loss_facts(actor: ActorConfig) -> LossFacts:
    """The facts of `actor.loss_mode`. Raises ValueError on an unknown name."""
    from grpo_megatron.algo.losses import policy_losses  # it imports torch: only once a plan is made

    return policy_losses.facts(actor.loss_mode)


def is_corrected(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a rollout correction applies: to samples of the policy, under a loss with a ratio."""
    correction = algorithm.rollout_correction
    configured = correction.rollout_is is not None or correction.rollout_rs is not None
    return configured and algorithm.source == "policy" and not loss_facts(actor).is_likelihood


def needs_old_logprobs(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether the loss or the reward reads the policy's log-probabilities from before the update. Likelihood losses do not."""
    return not loss_facts(actor).is_likelihood or has_kl_in_reward(algorithm)


def reasons_for_old_pass(algorithm: AlgorithmConfig, actor: ActorConfig, train_batch_size: int) -> list[str]:
    """Why old log-probabilities need a forward pass before the update. Empty: they have none (`folds_old_logprobs`)."""
    if not needs_old_logprobs(algorithm, actor):
        return []
    reasons = []
    num_updates = actor.num_updates(1, train_batch_size)
    if num_updates > 1:
        reasons.append(f"{num_updates} optimizer steps per rollout read the first one's")
    if has_kl_in_reward(algorithm):
        reasons.append("the KL in the reward changes the advantages")
    rejection = algorithm.rollout_correction.rollout_rs
    if rejection is not None and is_corrected(algorithm, actor):
        reasons.append(f"rollout_rs={rejection} changes the token counts of the loss")
    return reasons


def folds_old_logprobs(algorithm: AlgorithmConfig, actor: ActorConfig, train_batch_size: int) -> bool:
    """Whether the old log-probabilities are those of the update's own forward pass.

    One optimizer step per rollout is made at the weights that they are defined by, so the pass before it is left out.
    """
    is_read = needs_old_logprobs(algorithm, actor)
    return is_read and not reasons_for_old_pass(algorithm, actor, train_batch_size)


def forward_only_at_zero_advantage(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a row whose advantage is 0 has no gradient, and the advantages of the plan are final.

    The loss is then weight x policy loss alone, and the policy loss is a multiple of the advantage.
    """
    is_proportional = loss_facts(actor).is_proportional
    is_final = not has_kl_in_reward(algorithm) and not advantage_estimators.facts(algorithm.adv_estimator).needs_values
    return is_proportional and is_final and not has_kl_loss(actor) and actor.entropy_coeff == 0.0


def has_kl_loss(actor: ActorConfig) -> bool:
    """Whether the loss has a KL to the reference. With a coefficient of 0 it is not computed either."""
    return actor.use_kl_loss and actor.kl_loss_coef != 0.0


def has_kl_in_reward(algorithm: AlgorithmConfig) -> bool:
    """Whether a KL is subtracted from the rewards. A coefficient of 0 stays 0, also if it is adaptive."""
    return algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef != 0.0


def reads_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a loss or a reward reads the reference's log-probabilities."""
    return has_kl_loss(actor) or loss_facts(actor).needs_reference or has_kl_in_reward(algorithm)


def needs_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a reference is built: its log-probabilities are read, or responses are drawn from it."""
    return reads_reference(algorithm, actor) or algorithm.source == "initial"
