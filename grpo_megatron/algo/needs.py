"""What a method needs computed: facts of the config that the trainer and the checks before it must agree on."""

from __future__ import annotations

from grpo_megatron.algo.losses import LIKELIHOOD_LOSSES
from grpo_megatron.algo.sequence_losses import NEEDS_REFERENCE
from grpo_megatron.config import ActorConfig, AlgorithmConfig


def is_corrected(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether the samples are draws of the policy whose loss takes a ratio: nothing else has a mismatch to correct."""
    asked = algorithm.rollout_correction.rollout_is or algorithm.rollout_correction.rollout_rs
    return bool(asked) and algorithm.source == "policy" and actor.loss_mode not in LIKELIHOOD_LOSSES


def needs_old_logprobs(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether the update reads log-probabilities from before it. Likelihoods do not: a forward pass is spared."""
    return actor.loss_mode not in LIKELIHOOD_LOSSES or algorithm.use_kl_in_reward


def reads_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a loss or a reward reads the reference's log-probabilities."""
    return actor.use_kl_loss or actor.loss_mode in NEEDS_REFERENCE or algorithm.use_kl_in_reward


def needs_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a reference is built: it is read, or drawn from."""
    return reads_reference(algorithm, actor) or algorithm.source == "initial"
