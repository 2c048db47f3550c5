"""Checks of the critic: the section `critic` and `trainer.critic_warmup` against the method, and its folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.checks.problems import Problems
from grpo_megatron.checks.second_model import read_head_folder, second_model_problems
from grpo_megatron.config import AlgorithmConfig, Config, CriticConfig
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.heads.folder import RewardFolder

CRITIC_PATH = "critic.path"
_DEFAULT: dict[str, Any] = CriticConfig().model_dump() | {"optim": CriticConfig().optim}


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


def critic_problems(
    config: Config, world_size: int, arch: Architecture | None, folder: RewardFolder | None
) -> Problems:
    """The keys of the critic against the rest of the config. `folder`: of `critic.path`, if it is set and can be read."""
    if not has_critic(config.algorithm):
        yield from _unused_keys(config)
        return
    if folder is not None:
        yield from second_model_problems(config, world_size, arch, folder, CRITIC_PATH)
    yield from _lambda_problems(config)
    yield from _schedule_problems(config)
    correction = config.algorithm.rollout_correction
    if correction.rollout_rs == "off_policy":
        yield (
            "algorithm.rollout_correction.rollout_rs=off_policy drops responses of negative advantage, and"
            f" algorithm.adv_estimator={config.algorithm.adv_estimator!r} computes advantages per token, after the"
            " correction; set rollout_rs=token, sequence or geometric"
        )


def _unused_keys(config: Config) -> Problems:
    estimator = config.algorithm.adv_estimator
    changed = [f"critic.{key}" for key in CriticConfig.model_fields if getattr(config.critic, key) != _DEFAULT[key]]
    if config.trainer.critic_warmup:
        changed.append("trainer.critic_warmup")
    if config.algorithm.lam != AlgorithmConfig().lam:
        changed.append("algorithm.lam")
    if changed:
        yield (
            f"{changed[0]} has no effect: algorithm.adv_estimator={estimator!r} needs no critic; set"
            f" adv_estimator={' or '.join(advantage_estimators.names_with(needs_values=True))}, or leave it out"
        )


def _lambda_problems(config: Config) -> Problems:
    alpha, lam = config.critic.lam_alpha, config.algorithm.lam
    if alpha is not None and lam != AlgorithmConfig().lam:
        yield (
            f"critic.lam_alpha={alpha:g} gives each response a lambda by its length, and algorithm.lam={lam:g} gives all"
            " the same; set one of them (critic.lam is that of the value's targets)"
        )


def _schedule_problems(config: Config) -> Problems:
    total = config.trainer.total_training_steps
    for key, steps in (
        ("trainer.critic_warmup", config.trainer.critic_warmup),
        ("critic.pretrain_steps", config.critic.pretrain_steps),
    ):
        if steps >= total > 0:
            yield (
                f"{key}={steps} leaves no step of trainer.total_training_steps={total} to train the policy; set it to"
                f" {total - 1} or less"
            )


def critic_lines(config: Config, folder: RewardFolder | None) -> Iterator[str]:
    """The plan's line about the critic; none without one."""
    if not has_critic(config.algorithm):
        return
    section, only = config.critic, config.critic_only_steps
    parts = ["the model that the policy starts from" if folder is None else str(folder.path)]
    if folder is None or not folder.has_head:
        parts.append("new head")
    parts.append(f"gamma {config.algorithm.gamma:g}, lambda {_lambda(config)}")
    updates = section.num_updates(1, config.actor, config.data.train_batch_size)
    parts.append(f"{updates} updates per step")
    if only:
        parts.append(f"trained alone before step {only}")
    yield ", ".join(parts)


def _lambda(config: Config) -> str:
    """Of the policy's advantages, and of the value's targets where that differs."""
    alpha, lam = config.critic.lam_alpha, config.algorithm.lam
    of_policy = f"{lam:g}" if alpha is None else f"1 - 1 / ({alpha:g} x length)"
    targets = lam if config.critic.lam is None else config.critic.lam
    return of_policy if alpha is None and targets == lam else f"{of_policy} (targets {targets:g})"
