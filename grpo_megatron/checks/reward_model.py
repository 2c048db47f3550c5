"""Checks of `reward_model` and `reward_models`: the folders, their layout and tokens, and when they give rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.checks.problems import Problems
from grpo_megatron.checks.second_model import read_head_folder, second_model_problems
from grpo_megatron.config import Config, ConfigError, RewardModelConfig, ScoringModel
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.heads.folder import RewardFolder, check_reward_weights
from grpo_megatron.rewards.reward import rewards

MAIN, OTHERS = "reward_model", "reward_models."  # keys of the config
KEY = f"{MAIN}.path"
DRAWN_GROUPS = ("filter_groups.enable", "replay.ratio")  # options that compare the rewards of drawn groups
METRIC_NAMES = (
    "score",
    "step_score",
    "steps",
    "agreement",
    "pairs",
    "loss",
    "accuracy",
    "margin",
    "grad_norm",
    "rule_reward",
)


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


def reward_model_problems(
    config: Config, world_size: int, arch: Architecture | None, folders: Mapping[str, RewardFolder]
) -> Problems:
    """The sections against the rest of the config. `arch`, the policy's, is None if it cannot be read.

    `folders`: those of `scoring_models` that can be read, by key.
    """
    section = config.reward_model
    yield from _name_problems(config)
    if section.path is None:
        changed = [key for key in RewardModelConfig.model_fields if getattr(section, key) != _DEFAULT[key]]
        used = {"combine"} if config.reward_models else set()
        if policy_losses.facts(config.actor.loss_mode).scores == "step":
            used |= {"step_separator", "kind"}
        changed = [key for key in changed if key not in used]
        if changed:
            yield f"reward_model.{changed[0]} has no effect without a reward model; set {KEY}, or leave it out"
    if not scoring_models(config):
        return
    yield from _estimator_problems(config)
    yield from _rule_problems(config)
    if MAIN in folders:
        yield from _iteration_problems(config, folders[MAIN])
    for key, folder in folders.items():
        if key != MAIN and not folder.has_head:
            yield f"{_untrained(f'{key}.path', folder)}; set it to a folder with a trained head"
        if key == MAIN:
            yield from _pair_problems(config)
        yield from second_model_problems(config, world_size, arch, folder, f"{key}.path")


_DEFAULT: dict[str, Any] = RewardModelConfig().model_dump() | {"optim": RewardModelConfig().optim}


def _name_problems(config: Config) -> Problems:
    for name, model in config.reward_models.items():
        key = f"{OTHERS}{name}"
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or name in METRIC_NAMES:
            yield (
                f"{key}: the name is part of metric names (reward_model/{name}/score/mean); use letters, digits, - and _,"
                f" beginning with a letter, and none of {', '.join(METRIC_NAMES)}"
            )
        if model.path is None:
            yield f"{key}.path is not set; set it to the folder of a reward model, or leave the model out"


def _estimator_problems(config: Config) -> Problems:
    """The rest of the algorithm against models that give one reward per response, or per step."""
    estimator, models = config.algorithm.adv_estimator, scoring_models(config)
    has_steps = any(model.kind == "process" for model in models.values())
    if estimator == "remax":
        yield (
            "algorithm.adv_estimator='remax' needs the reward of a greedy response, and a reward model scores only the"
            " drawn responses; set another estimator, or leave the reward models out"
        )
    function = config.reward.function or ""
    rule_steps = config.reward_model.combine == "add" and (":" in function or rewards.facts(function).gives_steps)
    if estimator == "grpo_process" and not has_steps and not rule_steps:
        yield (
            "algorithm.adv_estimator='grpo_process' needs rewards of single steps, and an outcome reward model scores each"
            " response as a whole; set reward_model.kind=process with such a model, or another estimator"
        )
    if has_steps and config.rollout.multi_turn.environment is not None:
        yield (
            f"rollout.multi_turn.environment={config.rollout.multi_turn.environment!r}: a process reward model scores the steps"
            " of one answer, and here observations are between them; use kind=outcome"
        )
    learns = config.algorithm.iteration_steps is not None and MAIN in models
    if learns and config.rollout.n == 1:
        yield f"rollout.n=1: {KEY} learns from pairs of one prompt's samples; set rollout.n=2 or more"
    if learns and models[MAIN].kind == "process":
        yield (
            "reward_model.kind=process with algorithm.iteration_steps: it would learn from pairs of whole responses, which is"
            " for kind=outcome; leave iteration_steps out, or put it into reward_models, where it is frozen"
        )


def _rule_problems(config: Config) -> Problems:
    """Without a reward function, nothing is known of a group when it is drawn."""
    if config.has_rule:
        return
    for name in DRAWN_GROUPS:
        section, _, leaf = name.partition(".")
        if getattr(getattr(config.algorithm, section), leaf):
            yield (
                f"algorithm.{name} compares rewards while responses are drawn, and the reward models score them later; set"
                " reward.function, whose reward is then compared, or switch it off"
            )


def _untrained(key: str, folder: RewardFolder) -> str:
    return f"{key}={str(folder.path)!r} is a language model, whose new head scores every response 0 until trained"


def _iteration_problems(config: Config, folder: RewardFolder) -> Problems:
    """A new head must be trained before it gives rewards, and some step must use it."""
    start, steps = config.reward_model.start_iteration, config.algorithm.iteration_steps
    total = config.trainer.total_training_steps
    untrained = _untrained(KEY, folder)
    if steps is None:
        if not folder.has_head:
            yield f"{untrained}; set algorithm.iteration_steps, or a folder with a trained head"
        if start:
            yield f"reward_model.start_iteration={start} counts outer iterations; set algorithm.iteration_steps"
        return
    if not folder.has_head and start == 0:
        yield f"{untrained}; set reward_model.start_iteration=1 (the reward function alone rewards the first iteration)"
    if total and start * steps >= total:
        yield (
            f"reward_model.start_iteration={start} x algorithm.iteration_steps={steps} = {start * steps} steps leave"
            f" none of trainer.total_training_steps={total} to the reward model; lower one, or train longer"
        )


def _pair_problems(config: Config) -> Problems:
    cap, total = config.actor.ppo_max_token_len_per_gpu, config.data.max_prompt_length + config.data.max_response_length
    if config.algorithm.iteration_steps is not None and cap < 2 * total:
        yield (
            f"actor.ppo_max_token_len_per_gpu={cap} is less than a pair of full sequences, 2 x {total} (a pair is never"
            f" split); set it to {2 * total} or more"
        )


def reward_model_lines(config: Config, main: RewardFolder | None, others: Mapping[str, RewardFolder]) -> Iterator[str]:
    """One line of the plan per model."""
    if main is not None:
        learns = config.algorithm.iteration_steps is not None
        yield _description(main, config.reward_model, learns=learns)
    for name, folder in others.items():
        yield f"{name}: {_description(folder, config.reward_models[name], learns=False)}"


def _description(folder: RewardFolder, model: ScoringModel, *, learns: bool) -> str:
    parts = [f"{folder.path}: {folder.arch.num_parameters():,} parameters", "learns" if learns else "frozen"]
    if folder.kind == "process":
        parts.append(f"scores steps, which end with {model.step_separator!r}")
    if model.coefficient != 1:
        parts.append(f"x {model.coefficient:g}")
    return ", ".join(parts)
