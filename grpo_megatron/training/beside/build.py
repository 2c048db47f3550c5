"""Builds the models beside the policy: reward models, the critic, the reference."""

from __future__ import annotations

from grpo_megatron.checks.model_folders import has_critic
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config, ScoringModel
from grpo_megatron.device import Device
from grpo_megatron.models.heads.folder import RewardFolder, read_reward_folder
from grpo_megatron.models.heads.scalar import FrozenRewardModel, FrozenStepModel, RewardModel, ValueModel
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.training.beside.critic import Critic, NoCritic
from grpo_megatron.training.beside.references import References, policy_start
from grpo_megatron.training.beside.reward_model import (
    FrozenReward,
    LearningReward,
    NoRewardModel,
    OutcomeScorer,
    ProcessScorer,
    Scorer,
)
from grpo_megatron.training.stopping import Cadence


def build_reward_model(config: Config, checked: Checked, mesh: Mesh, device: Device) -> NoRewardModel:
    """No reward model, frozen ones, or one that is trained after each outer iteration beside frozen ones. Collective."""
    section, actor = config.reward_model, config.actor

    def frozen(name: str, model: ScoringModel, folder: RewardFolder) -> Scorer:
        parts = (folder, config.model.dtype, actor, mesh, device)
        if folder.kind == "process":
            return ProcessScorer(name, model, FrozenStepModel(*parts), actor, checked.decode)
        return OutcomeScorer(name, model, FrozenRewardModel(*parts), actor)

    others = [frozen(name, config.reward_models[name], folder) for name, folder in checked.reward_folders.items()]
    if checked.reward_folder is None:
        return FrozenReward(section, others) if others else NoRewardModel()
    if config.algorithm.iteration_steps is None:
        return FrozenReward(section, [frozen("", section, checked.reward_folder), *others])
    return LearningReward(
        section,
        RewardModel(section, config.model.dtype, actor, mesh, device),
        actor,
        others,
        iteration_steps=config.algorithm.iteration_steps,
        total_steps=config.trainer.total_training_steps,
        seed=config.trainer.seed,
    )


def build_critic(config: Config, checked: Checked, mesh: Mesh, device: Device) -> NoCritic:
    """The value model, if the estimator reads values. Collective. Without `critic.path` it starts as the policy does."""
    section, algorithm, data = config.critic, config.algorithm, config.data
    if not has_critic(algorithm):
        return NoCritic()
    folder = checked.critic_folder or read_reward_folder(policy_start(config), "value")
    return Critic(
        section,
        ValueModel(section, folder, config.model.dtype, config.actor, mesh, device),
        algorithm,
        config.actor,
        total_steps=config.trainer.total_training_steps,
        critic_only_steps=config.critic_only_steps,
        train_batch_size=data.train_batch_size,
        max_response_length=data.max_response_length,
    )


def build_references(
    config: Config, checked: Checked, mesh: Mesh, device: Device, cadence: Cadence, first_step: int
) -> References:
    """Collective. Without `ref.path` the reference starts as the policy does: from the warm-up's result, if any."""
    return References(
        config.model,
        config.actor,
        config.algorithm,
        checked.arch,
        mesh,
        device,
        cadence,
        start=config.ref.path or policy_start(config),
        folder=config.trainer.output_dir / "iterations",
        first_step=first_step,
        temperature=config.rollout.temperature,
    )
