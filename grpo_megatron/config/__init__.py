"""The configuration: frozen pydantic sections, read from one YAML file plus `section.key=value` overrides.

Names follow verl where the meaning is the same (without its `actor_rollout_ref` prefix). Lengths count tokens, batch
sizes count prompts, and steps are training steps, unless the comment says otherwise. `null` is YAML's None. Each section
checks its own values here; checks that need two sections, the world size or a file are in `checks/`.
"""

from __future__ import annotations

from pathlib import Path

from grpo_megatron.config.algorithm import (
    AlgorithmConfig,
    FilterGroups,
    Gate,
    KlCtrl,
    OverlongBuffer,
    ReplayConfig,
    RewardComponent,
    RewardConfig,
    RewardModelConfig,
    RolloutCorrection,
    ScoringModel,
)
from grpo_megatron.config.data import DataConfig, DataSource, SamplingConfig, SftConfig
from grpo_megatron.config.model import (
    ActorConfig,
    CriticConfig,
    Fp8Config,
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    RefConfig,
)
from grpo_megatron.config.problems import ConfigError, Problem, ProblemList, Problems, check, keys_of
from grpo_megatron.config.rollout import ENGINE_TEMPERATURES, MultiTurnConfig, PartialConfig, RolloutConfig, ValKwargs
from grpo_megatron.config.section import Section
from grpo_megatron.config.trainer import Band, GuardsConfig, TrainerConfig

__all__ = [
    "ENGINE_TEMPERATURES",
    "ActorConfig",
    "AlgorithmConfig",
    "Band",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DataConfig",
    "DataSource",
    "FilterGroups",
    "Fp8Config",
    "Gate",
    "GuardsConfig",
    "KlCtrl",
    "MegatronConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "OverlongBuffer",
    "PartialConfig",
    "Problem",
    "ProblemList",
    "Problems",
    "RefConfig",
    "ReplayConfig",
    "RewardComponent",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrection",
    "SamplingConfig",
    "ScoringModel",
    "Section",
    "SftConfig",
    "TrainerConfig",
    "ValKwargs",
    "check",
    "keys_of",
]


class Config(Section):
    """The whole config of a run: one section per topic."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    sft: SftConfig = SftConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    critic: CriticConfig = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    reward_models: dict[str, ScoringModel] = {}  # further frozen models: name -> model
    algorithm: AlgorithmConfig = AlgorithmConfig()
    guards: GuardsConfig = GuardsConfig()
    trainer: TrainerConfig = TrainerConfig()

    @property
    def critic_only_steps(self) -> int:
        """The first training steps, which leave the policy as it is."""
        return max(self.trainer.critic_warmup, self.critic.pretrain_steps)

    @property
    def policy_steps(self) -> int:
        """Training steps that update the policy."""
        return max(0, self.trainer.total_training_steps - self.critic_only_steps)

    @property
    def reward_paths(self) -> list[Path]:
        """The folders of all reward models."""
        return [model.path for model in (self.reward_model, *self.reward_models.values()) if model.path is not None]

    @property
    def has_rule(self) -> bool:
        """Whether a reward function scores the samples to train on. Frozen models that replace its reward need none."""
        learns = self.reward_model.path is not None and self.algorithm.iteration_steps is not None
        is_replaced = bool(self.reward_paths) and self.reward_model.combine == "replace" and not learns
        return self.reward.function is not None or bool(self.reward.components) or not is_replaced

    @property
    def max_staleness(self) -> int:
        """Steps that a sample may be older than the step that trains on it, whatever keeps it."""
        algorithm = self.algorithm
        return max(
            algorithm.filter_groups.max_staleness, algorithm.replay.max_staleness, self.rollout.partial.max_staleness
        )

    @property
    def draws(self) -> bool:
        """Whether the run draws responses, to train on them or to validate. Otherwise it has no engine."""
        data, trainer = self.data, self.trainer
        validates = trainer.val_before_train or trainer.test_freq > 0
        trains_on_drawn = trainer.total_training_steps > 0 and self.algorithm.source != "file"
        return trains_on_drawn or (validates and data.has_prompts_to_validate)
