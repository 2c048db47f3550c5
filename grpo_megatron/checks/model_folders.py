"""ModelFolders: what the config.json of every model folder of a run describes, and whether the folders are complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_megatron.algo.needs import reads_reference
from grpo_megatron.checks import inputs
from grpo_megatron.checks.critic import read_critic
from grpo_megatron.checks.problems import ProblemList
from grpo_megatron.checks.reward_model import check_reward_folder, read_reward_model, scoring_models
from grpo_megatron.checks.score_head import read_scored_model
from grpo_megatron.checks.scored_rows import trains_scores
from grpo_megatron.config import Config
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.heads.folder import RewardFolder


@dataclass(frozen=True)
class ModelFolders:
    """A folder that cannot be read is None, or absent from `rewards`."""

    arch: Architecture | None  # of the policy
    scored: RewardFolder | None  # model.path, where a scalar head is trained
    rewards: Mapping[str, RewardFolder]  # by key
    critic: RewardFolder | None  # critic.path

    @classmethod
    def read(cls, config: Config, problems: ProblemList) -> ModelFolders:
        """From each folder's config.json."""
        scored = None
        if trains_scores(config):
            scored = problems.attempt(read_scored_model, config)
            arch = scored.arch if scored is not None else None
        else:
            arch = problems.attempt(inputs.read_model, config.model.path, "model.path", config.model.family)
        rewards = {}
        for key, model in scoring_models(config).items():
            if (folder := problems.attempt(read_reward_model, model, key)) is not None:
                rewards[key] = folder
        critic = None
        if config.critic.path is not None:
            critic = problems.attempt(read_critic, config.critic.path)
        return cls(arch, scored, rewards, critic)

    @property
    def other_archs(self) -> list[Architecture]:
        """Those of the models beside the policy."""
        folders = [*self.rewards.values(), *filter(None, [self.critic])]
        return [folder.arch for folder in folders]

    def are_complete(self, config: Config) -> bool:
        """Whether every folder that the config names could be read."""
        has_critic = self.critic is not None or config.critic.path is None
        return self.arch is not None and has_critic and len(self.rewards) == len(scoring_models(config))

    def check_weights(self, config: Config, problems: ProblemList, *, policy: bool) -> None:
        """Names and shapes of all tensors. `policy`: those of `model.path`, too."""
        if self.arch is not None:
            if policy and self.scored is not None:
                problems.attempt(check_reward_folder, self.scored, "model")
            elif policy:
                problems.attempt(inputs.check_weights, config.model.path, self.arch)
            if reads_reference(config.algorithm, config.actor) and config.ref.path is not None:
                problems.attempt(inputs.check_reference, config, self.arch)
        for key, folder in self.rewards.items():
            problems.attempt(check_reward_folder, folder, key)
        if self.critic is not None:
            problems.attempt(check_reward_folder, self.critic, "critic")
