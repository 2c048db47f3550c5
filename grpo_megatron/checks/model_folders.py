"""ModelFolders: what the config.json of every model folder of a run describes, and whether the folders are complete."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import policy_losses, reads_reference
from grpo_megatron.config import AlgorithmConfig, Config, ConfigError, ScoringModel
from grpo_megatron.config.problems import ProblemList
from grpo_megatron.memory.parameters import RunModels
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.heads.folder import HeadKind, RewardFolder, check_reward_weights, read_reward_folder
from grpo_megatron.models.weights.folder import check_hf
from grpo_megatron.reading import ReadError, special_file_in

CRITIC_PATH = "critic.path"
MAIN, OTHERS = "reward_model", "reward_models."  # keys of the config
HEAD_KINDS: dict[str, HeadKind] = {"response": "outcome", "step": "process"}  # LossFacts.scores -> kind of the folder


def trains_scores(config: Config) -> bool:
    """Whether the model that is trained has a scalar head."""
    return bool(policy_losses.facts(config.actor.loss_mode).scores)


def read_model(path: Path, key: str = "model.path", family: str | None = None) -> Architecture:
    """The architecture that `path`/config.json describes, of a folder of regular files. `family`: `model.family`."""
    if not path.is_dir():
        name = str(path)
        hub = f"; fetch one with: hf download {name} --local-dir DIR" if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else ""
        raise ConfigError(
            f"{key}={name!r} is not a folder; it must be a local Hugging Face folder (config.json, *.safetensors,"
            f" tokenizer){hub}"
        )
    try:
        if problem := special_file_in(path):
            raise ReadError(f"it holds {problem}; remove it")
        return read_architecture(path, family)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}={str(path)!r}: {error}; set it to a folder of a supported model") from error


def check_weights(path: Path, arch: Architecture, key: str = "model.path") -> None:
    """The folder holds exactly the tensors of `arch`, by name and shape."""
    try:
        check_hf(path, arch)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise ConfigError(f"{key}: {error}\n  (fetch the folder again, or set {key} to a complete one)") from error


def has_weights(path: Path) -> bool:
    """Whether the folder has weight files, complete or not."""
    return (path / "model.safetensors.index.json").exists() or any(path.glob("*.safetensors"))


def check_reference(config: Config, arch: Architecture) -> None:
    """`ref.path` holds a model of the policy's architecture: the same computation with other weights."""
    path = config.ref.path
    assert path is not None
    reference = dataclasses.asdict(read_model(path, "ref.path", config.model.family))
    policy = dataclasses.asdict(arch)
    different = [
        f"{name} {reference[name]} against {policy[name]}"
        for name in policy
        if name not in ("family", "max_position_embeddings", "sliding_window") and reference[name] != policy[name]
    ]
    if different:
        raise ConfigError(
            f"ref.path={str(path)!r} is another architecture than model.path ({', '.join(different)}); the reference"
            " must be of the policy's: leave ref.path out, or set actor.use_kl_loss=false"
        )
    check_weights(path, arch, "ref.path")


def read_head_folder(path: Path, kind: HeadKind, key: str, context: str = "") -> RewardFolder:
    """What the folder that `key` names is, as a model with a scalar head of this kind. Raises ConfigError.

    `context`: why such a folder is asked for, if the key alone does not say so.
    """
    read_model(path, key)  # the checks of every model folder
    try:
        return read_reward_folder(path, kind)
    except ValueError as error:
        raise ConfigError(f"{key}={str(path)!r}{context}: {error}; set it to such a folder") from error


def has_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether the estimator reads values."""
    return advantage_estimators.facts(algorithm.adv_estimator).needs_values


def read_critic(path: Path) -> RewardFolder:
    """What the folder's config.json describes. Raises ConfigError for a folder that cannot be a value model."""
    return read_head_folder(path, "value", CRITIC_PATH)


def critic_arch(config: Config, arch: Architecture, folder: RewardFolder | None) -> Architecture | None:
    """That of `critic.path`, or the policy's without its output head. None: no critic."""
    if not has_critic(config.algorithm):
        return None
    return replace(arch, tied=True) if folder is None else folder.arch


def scoring_models(config: Config) -> dict[str, ScoringModel]:
    """Every model with a folder, by its key."""
    models = {MAIN: config.reward_model, **{f"{OTHERS}{name}": model for name, model in config.reward_models.items()}}
    return {key: model for key, model in models.items() if model.path is not None}


def read_reward_model(model: ScoringModel, key: str = MAIN) -> RewardFolder:
    """What the folder's config.json describes. Raises ConfigError for a folder that is no reward model of its kind."""
    assert model.path is not None
    return read_head_folder(model.path, model.kind, f"{key}.path")


def check_reward_folder(folder: RewardFolder, key: str = MAIN) -> None:
    """The folder holds exactly the model's tensors, by name and shape. Raises ConfigError."""
    try:
        check_reward_weights(folder)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise ConfigError(
            f"{key}.path: {error}\n  (fetch the folder again, or set {key}.path to a complete one)"
        ) from error


def read_scored_model(config: Config) -> RewardFolder:
    """What model.path has, as a model with a scalar head of the loss's kind. Raises ConfigError."""
    mode = config.actor.loss_mode
    kind = HEAD_KINDS[policy_losses.facts(mode).scores]
    return read_head_folder(config.model.path, kind, "model.path", f" with actor.loss_mode={mode}")


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
            scored = problems.attempt("model.path", read_scored_model, config)
            arch = scored.arch if scored is not None else None
        else:
            arch = problems.attempt(
                "model.path model.family", read_model, config.model.path, "model.path", config.model.family
            )
        rewards = {}
        for key, model in scoring_models(config).items():
            if (folder := problems.attempt(f"{key}.path", read_reward_model, model, key)) is not None:
                rewards[key] = folder
        critic = None
        if config.critic.path is not None:
            critic = problems.attempt("critic.path", read_critic, config.critic.path)
        return cls(arch, scored, rewards, critic)

    @property
    def other_archs(self) -> list[Architecture]:
        """Those of the models beside the policy."""
        folders = [*self.rewards.values(), *filter(None, [self.critic])]
        return [folder.arch for folder in folders]

    def models(self, config: Config) -> RunModels:
        """What the folders describe. All of them could be read."""
        assert self.arch is not None
        rewards = tuple(folder.arch for folder in self.rewards.values())
        return RunModels(self.arch, rewards, critic_arch(config, self.arch, self.critic), has_head=self.scored is None)

    def are_complete(self, config: Config) -> bool:
        """Whether every folder that the config names could be read."""
        has_critic = self.critic is not None or config.critic.path is None
        return self.arch is not None and has_critic and len(self.rewards) == len(scoring_models(config))

    def check_weights(self, config: Config, problems: ProblemList, *, policy: bool) -> None:
        """Names and shapes of all tensors. `policy`: those of `model.path`, too."""
        if self.arch is not None:
            if policy and self.scored is not None:
                problems.attempt("model.path", check_reward_folder, self.scored, "model")
            elif policy:
                problems.attempt("model.path", check_weights, config.model.path, self.arch)
            if reads_reference(config.algorithm, config.actor) and config.ref.path is not None:
                problems.attempt("ref.path model.path", check_reference, config, self.arch)
        for key, folder in self.rewards.items():
            problems.attempt(f"{key}.path", check_reward_folder, folder, key)
        if self.critic is not None:
            problems.attempt("critic.path", check_reward_folder, self.critic, "critic")


def read_models(config: Config) -> RunModels:
    """The models of a run, from each folder's config.json. Raises ConfigError."""
    problems = ProblemList()
    folders = ModelFolders.read(config, problems)
    problems.raise_if_any()
    return folders.models(config)
