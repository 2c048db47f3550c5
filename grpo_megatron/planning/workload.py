"""Workload: what one training step computes, whatever the layout. Lengths are means; only the longest response is a maximum."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.algo.needs import needs_old_logprobs, reads_reference, reasons_for_old_pass
from grpo_megatron.checks.memory import DTYPE_BYTES
from grpo_megatron.config import Config
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.planning.models import PlannedModels


@dataclass(frozen=True)
class Workload:
    """`scoring_passes`: forward passes over all samples before the update, in passes of the policy's size."""

    arch: Architecture
    samples: int
    samples_per_prompt: int
    prompt_tokens: float
    response_tokens: float
    longest_response: int
    scoring_passes: float = 0.0
    epochs: int = 1
    updates: int = 1  # optimizer steps, of all epochs together
    critic_share: float = 0.0  # parameters of the critic / the policy's
    draws: bool = True
    itemsize: int = 2
    max_num_seqs: int = 256
    is_fp8: bool = False
    overlaps_gradients: bool = False

    @property
    def sample_tokens(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> float:
        """Of all samples of a step: each counts its prompt."""
        return self.samples * self.sample_tokens

    @classmethod
    def of(cls, config: Config, models: PlannedModels, response_tokens: float | None = None) -> Workload:
        """Of a step of `config`. Unknown lengths: the prompt is half of its maximum, and the response too by default."""
        actor, algorithm, data = config.actor, config.algorithm, config.data
        n = config.rollout.n
        if algorithm.source == "file":
            n = 2 if policy_losses.facts(actor.loss_mode).paired else 1
        size = models.arch.num_parameters()
        passes = float(needs_old_logprobs(algorithm, actor) and bool(_old_pass(config)))
        passes += reads_reference(algorithm, actor)
        passes += sum(arch.num_parameters() for arch in models.reward_archs) / size
        return cls(
            arch=models.arch,
            samples=data.train_batch_size * n,
            samples_per_prompt=n,
            prompt_tokens=data.max_prompt_length / 2,
            response_tokens=data.max_response_length / 2 if response_tokens is None else response_tokens,
            longest_response=data.max_response_length,
            scoring_passes=passes,
            epochs=actor.ppo_epochs,
            updates=actor.num_updates(1, data.train_batch_size),
            critic_share=models.critic.num_parameters() / size if models.critic is not None else 0.0,
            draws=config.draws and algorithm.source != "file",
            itemsize=DTYPE_BYTES[config.model.dtype],
            max_num_seqs=config.rollout.max_num_seqs,
            is_fp8=actor.megatron.fp8.recipe is not None,
            overlaps_gradients=actor.megatron.overlap_grad_reduce,
        )


def _old_pass(config: Config) -> list[str]:
    return reasons_for_old_pass(config.algorithm, config.actor, config.data.train_batch_size)
