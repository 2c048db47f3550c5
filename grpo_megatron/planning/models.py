"""PlannedModels: the architectures of a run, and the parameters of their pipeline stages in any layout."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_megatron.checks.model_folders import (
    critic_arch,
    read_critic,
    read_model,
    read_reward_model,
    read_scored_model,
    scoring_models,
    trains_scores,
)
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config
from grpo_megatron.memory.parameters import StageParameters, parameters_from_table
from grpo_megatron.models.architecture import Architecture

Stages = list[StageParameters]


@dataclass(frozen=True)
class PlannedModels:
    """The policy, all reward models (that of `reward_model.path` first), and the critic if there is one.

    `has_head`: the policy has an output head; a model that learns to score has none.
    """

    arch: Architecture
    reward_archs: tuple[Architecture, ...] = ()
    critic: Architecture | None = None
    has_head: bool = True
    _known: dict[tuple[object, ...], Stages] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, config: Config, checked: Checked) -> PlannedModels:
        rewards = tuple(folder.arch for folder in checked.all_reward_folders)
        critic = critic_arch(config, checked.arch, checked.critic_folder)
        return cls(checked.arch, rewards, critic, has_head=checked.scored_folder is None)

    @classmethod
    def read(cls, config: Config) -> PlannedModels:
        """From each folder's config.json. Raises ConfigError."""
        is_scored = trains_scores(config)
        path, family = config.model.path, config.model.family
        arch = read_scored_model(config).arch if is_scored else read_model(path, "model.path", family)
        rewards = tuple(read_reward_model(model, key).arch for key, model in scoring_models(config).items())
        folder = read_critic(config.critic.path) if config.critic.path is not None else None
        return cls(arch, rewards, critic_arch(config, arch, folder), has_head=not is_scored)

    def stages(self, config: Config) -> tuple[Stages, list[Stages], Stages | None]:
        """Parameters of every stage of the policy, of each reward model, of the critic. The layout must be valid."""
        critic = None if self.critic is None else self._stages(self.critic, config, has_head=False)
        rewards = [self._stages(arch, config, has_head=False) for arch in self.reward_archs]
        return self._stages(self.arch, config, has_head=self.has_head), rewards, critic

    def _stages(self, arch: Architecture, config: Config, *, has_head: bool) -> Stages:
        megatron = config.actor.megatron
        layers = str(sorted(megatron.override_transformer_config.items()))
        sizes = (
            megatron.tensor_model_parallel_size,
            megatron.pipeline_model_parallel_size,
            megatron.expert_model_parallel_size,
        )
        key = (id(arch), has_head, layers, *sizes)
        if key not in self._known:
            self._known[key] = parameters_from_table(arch, megatron, has_output_head=has_head)
        return self._known[key]
