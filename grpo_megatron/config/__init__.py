"""The configuration: frozen pydantic sections, read from one YAML file plus `section.key=value` overrides.

Names follow verl where the meaning is the same (without its `actor_rollout_ref` prefix). Lengths count tokens, batch
sizes count prompts, and steps are training steps, unless the comment says otherwise. `null` is YAML's None. Each section
checks its own values here; checks that need two sections, the world size or a file are in `checks/`.
"""

from __future__ import annotations

from grpo_megatron.config.algorithm import (
    AlgorithmConfig,
    FilterGroups,
    KlCtrl,
    OverlongBuffer,
    ReplayConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutCorrection,
)
from grpo_megatron.config.data import DataConfig, SamplingConfig, SftConfig
from grpo_megatron.config.model import ActorConfig, Fp8Config, MegatronConfig, ModelConfig, OptimConfig, RefConfig
from grpo_megatron.config.rollout import ENGINE_TEMPERATURES, MultiTurnConfig, RolloutConfig, ValKwargs
from grpo_megatron.config.section import (
    ConfigError,
    Section,
)
from grpo_megatron.config.trainer import Band, GuardsConfig, TrainerConfig

__all__ = [
    "ENGINE_TEMPERATURES",
    "ActorConfig",
    "AlgorithmConfig",
    "Band",
    "Config",
    "ConfigError",
    "DataConfig",
    "FilterGroups",
    "Fp8Config",
    "GuardsConfig",
    "KlCtrl",
    "MegatronConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "OverlongBuffer",
    "RefConfig",
    "ReplayConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrection",
    "SamplingConfig",
    "Section",
    "SftConfig",
    "TrainerConfig",
    "ValKwargs",
]


class Config(Section):
    model: ModelConfig
    data: DataConfig = DataConfig()
    sft: SftConfig = SftConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    guards: GuardsConfig = GuardsConfig()
    trainer: TrainerConfig = TrainerConfig()

    @property
    def draws(self) -> bool:
        """Whether the run draws responses, to train on them or to validate. Otherwise it has no engine."""
        data, trainer = self.data, self.trainer
        validates = trainer.val_before_train or trainer.test_freq > 0
        trains_on_drawn = trainer.total_training_steps > 0 and self.algorithm.source != "file"
        return trains_on_drawn or (validates and bool(data.val_files or data.val_tasks))
