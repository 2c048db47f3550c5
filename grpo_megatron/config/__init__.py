"""The configuration: frozen pydantic sections, read from one YAML file plus `section.key=value` overrides.

Names follow verl where the meaning is the same (without its `actor_rollout_ref` prefix). Lengths count tokens, batch
sizes count prompts, and steps are training steps, unless the key's text says otherwise. `null` is YAML's None. Each
section checks its own values here; checks that need two sections, the world size or a file are in `checks/`. Sections:
model.py, actor.py (also ref, critic), data.py (also sft), algorithm.py, reward.py (also the reward models), teachers.py,
rollout.py, trainer.py (also guards), service.py. section.py: their base. methods.py: named blocks of defaults. options.py:
command lines. tables.py: YAML files, also by name. passthrough.py: tables for other packages. problems.py: mistakes with their
keys.
"""

# ruff: noqa: F401 - the names of all sections are imported from here
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import field_validator, model_validator
from pydantic_core import PydanticCustomError

from grpo_megatron.config.actor import HAS_CRITIC, ActorConfig, CriticConfig, RefConfig
from grpo_megatron.config.algorithm import AlgorithmConfig, FilterGroups, KlCtrl, ReplayConfig, RolloutCorrection
from grpo_megatron.config.data import (
    CurriculumConfig,
    CurriculumPiece,
    DataConfig,
    DataSource,
    SamplingConfig,
    SftConfig,
)
from grpo_megatron.config.methods import methods, unknown_method, with_method
from grpo_megatron.config.model import (
    Fp8Config,
    LoraConfig,
    MegatronConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    VisionConfig,
)
from grpo_megatron.config.problems import ConfigError, Problem
from grpo_megatron.config.reward import (
    BudgetConfig,
    Gate,
    LengthReward,
    OverlongBuffer,
    RewardComponent,
    RewardConfig,
    RewardModelConfig,
    ScoringModel,
)
from grpo_megatron.config.rollout import ENGINE_TEMPERATURES, MultiTurnConfig, PartialConfig, RolloutConfig, ValKwargs
from grpo_megatron.config.section import Needs, Section
from grpo_megatron.config.service import ServiceConfig
from grpo_megatron.config.teachers import HAS_TEACHERS, DistillationConfig, TeacherConfig
from grpo_megatron.config.trainer import Band, DeviceName, GuardsConfig, HealingConfig, TrainerConfig
from grpo_megatron.untrusted import redacted


class Config(Section):
    """The whole config of a run: one section per topic."""

    method: str | None = None
    """the defaults of the keys that make a paper's method, a name of algo/methods.yaml; null: those of this program"""
    model: ModelConfig
    data: DataConfig = DataConfig()
    sft: SftConfig = SftConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    critic: Annotated[CriticConfig, HAS_CRITIC] = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    reward_model: Annotated[RewardModelConfig, Needs("reward_model.path")] = RewardModelConfig()
    reward_models: dict[str, ScoringModel] = {}
    """further frozen models: name -> model"""
    teachers: dict[str, TeacherConfig] = {}
    """models that the policy learns from: name -> teacher"""
    distillation: Annotated[DistillationConfig, HAS_TEACHERS] = DistillationConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    guards: GuardsConfig = GuardsConfig()
    trainer: TrainerConfig = TrainerConfig()
    service: ServiceConfig = ServiceConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_keys_of_the_method(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping) or raw.get("method") is None:
            return raw
        raw = {
            name: value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
            for name, value in raw.items()
        }

        def value_of(key: str) -> Any:
            name, leaf = key.split(".")
            section = raw.get(name, {})
            default = getattr(cls.model_fields[name].default, leaf)
            return section.get(leaf, default) if isinstance(section, Mapping) else default

        return with_method(raw, value_of)

    @field_validator("method")
    @classmethod
    def _method_exists(cls, name: str | None) -> str | None:
        if name is not None and name not in methods():
            raise PydanticCustomError("method", "{problem}", {"problem": unknown_method(name)})
        return name

    def record(self) -> dict[str, Any]:
        """Returns all values as plain JSON for a file or a tracker, without secrets."""
        content: dict[str, Any] = redacted(self.model_dump(mode="json"))
        return content

    @property
    def method_keys(self) -> dict[str, Any]:
        """Returns the keys that `method` sets, with their values there."""
        return methods()[self.method].values(self.at) if self.method is not None else {}

    @property
    def critic_only_steps(self) -> int:
        """Counts the first training steps, which leave the policy as it is."""
        return max(self.trainer.critic_warmup, self.critic.pretrain_steps)

    @property
    def policy_steps(self) -> int:
        """Counts the training steps that update the policy."""
        return max(0, self.trainer.total_training_steps - self.critic_only_steps)

    @property
    def shares_reference(self) -> bool:
        """Says if the reference is the policy without its adapters, and needs no memory of its own."""
        return self.actor.lora.rank is not None and self.ref.path in (None, self.model.path) and not self.sft.steps

    @property
    def reward_paths(self) -> list[Path]:
        """Returns the folders of all reward models."""
        return [model.path for model in (self.reward_model, *self.reward_models.values()) if model.path is not None]

    @property
    def local_teachers(self) -> dict[str, TeacherConfig]:
        """Returns the teachers that are not behind a server."""
        return {name: teacher for name, teacher in self.teachers.items() if teacher.url is None}

    @property
    def teacher_paths(self) -> list[Path]:
        """Returns the folders of all teachers."""
        return [teacher.path for teacher in self.teachers.values() if teacher.path is not None]

    @property
    def has_rule(self) -> bool:
        """Says if a reward function scores the samples to train on.

        Frozen models that replace its reward need none, nor does the estimator `zero`.
        """
        learns = self.reward_model.path is not None and self.algorithm.iteration_steps is not None
        is_replaced = bool(self.reward_paths) and self.reward_model.combine == "replace" and not learns
        is_replaced |= self.algorithm.adv_estimator == "zero"
        return self.reward.function is not None or bool(self.reward.components) or not is_replaced

    @property
    def max_staleness(self) -> int:
        """Steps that a sample may be older than the step that trains on it, whatever keeps it."""
        algorithm, rollout = self.algorithm, self.rollout
        ages = (algorithm.filter_groups.max_staleness, algorithm.replay.max_staleness, rollout.partial.max_staleness)
        return rollout.lag + max(ages)

    @property
    def colocates(self) -> bool:
        """Says if a rank that trains has an engine on its device."""
        return self.has_rollouts and self.rollout.placement == "colocated"

    @property
    def num_rollout_ranks(self) -> int:
        """Counts the last ranks of the run, which only sample. 0: every rank samples and trains."""
        rollout = self.rollout
        if rollout.placement == "colocated":
            return 0
        return rollout.num_ranks or (rollout.num_nodes or 0) * self.trainer.n_gpus_per_node

    @property
    def replaces_rollout_ranks(self) -> bool:
        """Says if ranks that only sample may be lost while the others go on, which our launcher must have started."""
        return self.trainer.healing.is_on and self.trainer.nnodes == 1 and self.num_rollout_ranks > 0

    @property
    def has_rollouts(self) -> bool:
        """Says if the run samples responses, to train on them or to validate. Otherwise it has no engine."""
        data, trainer = self.data, self.trainer
        validates = trainer.val_before_train or trainer.test_freq > 0
        trains_on_drawn = trainer.total_training_steps > 0 and self.algorithm.source != "file"
        return trains_on_drawn or (validates and data.has_prompts_to_validate)
