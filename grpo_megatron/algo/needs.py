"""What a method needs computed: properties of the config that the trainer and the checks must agree on."""

from __future__ import annotations

from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.config import ActorConfig, AlgorithmConfig


def is_corrected(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a rollout correction applies: to samples of the policy, under a loss with a ratio."""
    correction = algorithm.rollout_correction
    configured = correction.rollout_is is not None or correction.rollout_rs is not None
    return configured and algorithm.source == "policy" and not policy_losses.facts(actor.loss_mode).is_likelihood


def needs_old_logprobs(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether the update reads log-probabilities computed before it. Likelihood losses do not, which saves a forward pass."""
    return not policy_losses.facts(actor.loss_mode).is_likelihood or algorithm.use_kl_in_reward


def reads_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a loss or a reward reads the reference's log-probabilities."""
    return actor.use_kl_loss or policy_losses.facts(actor.loss_mode).needs_reference or algorithm.use_kl_in_reward


def needs_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a reference is built: its log-probabilities are read, or responses are drawn from it."""
    return reads_reference(algorithm, actor) or algorithm.source == "initial"
