"""Builds the models of a run: the policy and its export, reward models, the critic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from grpo_megatron.checks.models import has_critic
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config, ScoringModel
from grpo_megatron.device import Device
from grpo_megatron.models.heads.folder import RewardFolder, read_reward_folder
from grpo_megatron.models.heads.scalar import FrozenScalar, ScalarPolicy, ValueModel, last_token, response_tokens
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.folder import Serving, save_hf
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.training.beside.critic import Critic, NoCritic
from grpo_megatron.training.beside.references import policy_start
from grpo_megatron.training.beside.reward_model import (
    FrozenReward,
    LearningReward,
    NoRewardModel,
    ProcessScorer,
    Scorer,
)


def build_reward_model(config: Config, checked: Checked, mesh: Mesh, device: Device) -> NoRewardModel:
    """No reward model, frozen ones, or one that is trained after each outer iteration beside frozen ones. Collective."""
    section, actor = config.reward_model, config.actor

    def frozen(name: str, model: ScoringModel, folder: RewardFolder) -> Scorer:
        parts = (folder, config.model.dtype, actor, mesh, device)
        if folder.kind == "process":
            return ProcessScorer(name, model, FrozenScalar(*parts), actor, checked.decode)
        return Scorer(name, model, FrozenScalar(*parts), actor)

    others = [frozen(name, config.reward_models[name], folder) for name, folder in checked.reward_folders.items()]
    main = checked.reward_folder
    if main is None:
        return FrozenReward(section, others) if others else NoRewardModel()
    if config.algorithm.iteration_steps is None:
        return FrozenReward(section, [frozen("", section, main), *others])
    return LearningReward(
        section,
        ScalarPolicy(main, config.model.dtype, actor, mesh, device, places=last_token(main), optim=section.optim),
        actor,
        others,
        iteration_steps=config.algorithm.iteration_steps,
        total_steps=config.trainer.total_training_steps,
        seed=config.trainer.seed,
    )


def build_critic(config: Config, checked: Checked, mesh: Mesh, device: Device) -> NoCritic:
    """The value model, if the estimator reads values. Collective. Without `critic.path` it starts as the policy does."""
    section = config.critic
    if not has_critic(config.algorithm):
        return NoCritic()
    folder = checked.critic_folder or read_reward_folder(policy_start(config), "value")
    parts = (folder, config.model.dtype, config.actor, mesh, device)
    return Critic(config, ValueModel(*parts, optim=section.optim, offload=section.offload))


def build_policy(config: Config, checked: Checked, mesh: Mesh, device: Device) -> Policy:
    """The model that is trained: a language model, or one that scores (actor.loss_mode). Collective."""
    if checked.scored_folder is not None:
        folder = checked.scored_folder
        return ScalarPolicy(folder, config.model.dtype, config.actor, mesh, device, places=response_tokens)
    model, temperature = config.model, config.rollout.temperature
    return Policy.load(Path(model.path), model.dtype, checked.arch, config.actor, mesh, device, temperature=temperature)


def build_export(config: Config, checked: Checked, policy: Policy) -> Callable[[Path], None]:
    """The function that writes the policy as a Hugging Face folder. Calling it is collective.

    A server of the folder stops where rollouts stop: at every end token, and at `rollout.stop_token_ids`.
    """
    tokenizer_path = config.model.tokenizer_path or config.model.path
    ends = set(checked.end_tokens.ids if checked.end_tokens else []) | set(config.rollout.stop_token_ids)
    template = None if config.data.chat_template is None else checked.tokenizer.chat_template
    serving = Serving(template, sorted(ends))

    def export(target: Path) -> None:
        if isinstance(policy, ScalarPolicy):
            policy.save_hf(target, tokenizer_path)
            return
        stream = policy.hf_weights(config.rollout.update_weights_bucket_megabytes)
        save_hf(stream, config.model.path, tokenizer_path, target, policy.mesh, serving=serving)

    return export
