"""Learning-rate schedules against the number of optimizer steps that they run over."""

from __future__ import annotations

from grpo_megatron.checks.critic import has_critic
from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import Config, OptimConfig


def schedule_problems(config: Config) -> Problems:
    """The schedules of the policy, the critic, the reward model and the supervised warmup."""
    steps = config.trainer.total_training_steps
    if steps:
        batch = config.data.train_batch_size
        updates = config.actor.num_updates(config.policy_steps, batch)
        counted = f"trainer.total_training_steps={steps}"
        if config.critic_only_steps:
            counted += f" - {config.critic_only_steps} that train the critic alone"
        if updates > steps:
            mini_batches, epochs = config.actor.num_mini_batches(batch), config.actor.ppo_epochs
            counted += f" x {mini_batches} mini-batches x {epochs} epochs = {updates} updates"
        yield from _schedule("actor.optim", config.actor.optim, updates, counted)
        if has_critic(config.algorithm):
            updates = config.critic.num_updates(steps, config.actor, batch)
            yield from _schedule("critic.optim", config.critic.optim, updates, f"the critic's {updates} updates")
    length, model = config.algorithm.iteration_steps, config.reward_model
    if model.path is not None and length is not None and steps // length:
        counted = f"{steps // length} outer iterations x reward_model.steps={model.steps}"
        yield from _schedule("reward_model.optim", model.optim, model.num_updates(steps, length), counted)
    if config.sft.steps:
        yield from _schedule("sft.optim", config.sft.optim, config.sft.steps, f"sft.steps={config.sft.steps}")


def _schedule(key: str, optim: OptimConfig, total: int, counted: str) -> Problems:
    """`total` optimizer steps; `counted` says in words where they come from."""
    if optim.min_lr > optim.lr:
        yield f"{key}.min_lr={optim.min_lr:g} is above {key}.lr={optim.lr:g}; set it to {optim.lr:g} or less"
    if optim.lr_warmup_steps >= total:
        yield (
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps} leaves no step at the full rate: {counted};"
            f" set it to {total - 1} or less"
        )
    decay = optim.lr_wsd_decay_steps
    if optim.lr_decay_style == "WSD":
        if decay is None:
            yield f"{key}.lr_decay_style=WSD needs {key}.lr_wsd_decay_steps; set it to {max(1, total // 10)}, say"
        elif decay > total:
            yield f"{key}.lr_wsd_decay_steps={decay} is more than {counted}; set it to {total} or less"
    elif decay is not None:
        yield (
            f"{key}.lr_wsd_decay_steps={decay} has no effect with {key}.lr_decay_style={optim.lr_decay_style}; set"
            " lr_decay_style=WSD, or leave it out"
        )
