"""Checks of the section `reward_model`: the folder, its layout, its tokens, and when it gives rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_megatron.checks import inputs
from grpo_megatron.checks.experts import expert_problems
from grpo_megatron.checks.layout import layout_problems
from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import Config, ConfigError, RewardModelConfig
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.reward_folder import RewardFolder, check_reward_weights, read_reward_folder
from grpo_megatron.reading.json_text import read_json

KEY = "reward_model.path"
OTHER_REWARDS = {  # estimators that also need rewards of another kind, which the model does not give
    "remax": "the reward of a greedy response",
    "grpo_process": "rewards of single steps",
}


def read_reward_model(path: Path) -> RewardFolder:
    """What the folder's config.json describes. Raises ConfigError for a folder that is no reward model."""
    inputs.read_model(path, KEY)  # the checks of every model folder
    try:
        return read_reward_folder(path)
    except ValueError as error:
        raise ConfigError(f"{KEY}={str(path)!r}: {error}; set it to such a folder") from error


def check_reward_folder(folder: RewardFolder) -> None:
    """The folder holds exactly the model's tensors, by name and shape. Raises ConfigError."""
    try:
        check_reward_weights(folder)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise ConfigError(f"{KEY}: {error}\n  (fetch the folder again, or set {KEY} to a complete one)") from error


def reward_model_problems(
    config: Config, world_size: int, arch: Architecture | None, folder: RewardFolder | None
) -> Problems:
    """The section against the rest of the config. `arch`, the policy's, and `folder` are None if they cannot be read."""
    section = config.reward_model
    if section.path is None:
        changed = [key for key in RewardModelConfig.model_fields if getattr(section, key) != _DEFAULT[key]]
        if changed:
            yield f"reward_model.{changed[0]} has no effect without a reward model; set {KEY}, or leave it out"
        return
    yield from _estimator_problems(config)
    if folder is None:
        return
    yield from _iteration_problems(config, folder)
    yield from _length_problems(config, folder)
    yield from _layout_problems(config, world_size, arch, folder)
    if arch is not None:
        yield from _vocabulary_problems(config.model.tokenizer_path or config.model.path, arch, folder)


_DEFAULT: dict[str, Any] = RewardModelConfig().model_dump() | {"optim": RewardModelConfig().optim}


def _estimator_problems(config: Config) -> Problems:
    """The rest of the algorithm against a model that gives one reward per response."""
    estimator = config.algorithm.adv_estimator
    if estimator in OTHER_REWARDS:
        yield (
            f"algorithm.adv_estimator={estimator!r} needs {OTHER_REWARDS[estimator]}, and a reward model scores"
            f" each drawn response as a whole; set another estimator, or leave {KEY} out"
        )
    if config.algorithm.iteration_steps is not None and config.rollout.n == 1:
        yield f"rollout.n=1: {KEY} learns from pairs of one prompt's samples; set rollout.n=2 or more"


def _iteration_problems(config: Config, folder: RewardFolder) -> Problems:
    """A new head must be trained before it gives rewards, and some step must use it."""
    start, steps = config.reward_model.start_iteration, config.algorithm.iteration_steps
    total = config.trainer.total_training_steps
    untrained = f"{KEY}={str(folder.path)!r} is a language model, whose new head scores every response 0 until trained"
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


def _length_problems(config: Config, folder: RewardFolder) -> Problems:
    total = config.data.max_prompt_length + config.data.max_response_length
    both = f"data.max_prompt_length + data.max_response_length = {total}"
    for what in ("max_position_embeddings", "sliding_window"):
        limit = getattr(folder.arch, what)
        if limit is not None and total > limit:
            yield f"{both} exceed the {what} {limit} of {KEY}={str(folder.path)!r}; lower one of them"
    cap = config.actor.ppo_max_token_len_per_gpu
    if config.algorithm.iteration_steps is not None and cap < 2 * total:
        yield (
            f"actor.ppo_max_token_len_per_gpu={cap} is less than a pair of full sequences, 2 x {total} (a pair is never"
            f" split); set it to {2 * total} or more"
        )


def _layout_problems(config: Config, world_size: int, arch: Architecture | None, folder: RewardFolder) -> Problems:
    """The reward model has the policy's layout. A problem that the policy has too is reported for the policy."""

    def problems_of(model: Architecture | None) -> Problems:
        yield from layout_problems(config, world_size, model)
        yield from expert_problems(config.actor.megatron, world_size, model, on_cpu=config.trainer.device == "cpu")

    reported = set(problems_of(arch))
    for problem in problems_of(folder.arch):
        if problem not in reported and not problem.startswith("rollout."):
            yield f"{KEY}={str(folder.path)!r} is cut in the policy's layout: {problem}"


def _vocabulary_problems(policy_folder: Path, arch: Architecture, folder: RewardFolder) -> Problems:
    """The reward model reads the policy's token ids unchanged, so both must have the same vocabulary."""
    policy, reward = _vocabulary(policy_folder), _vocabulary(folder.path)
    if policy is None or reward is None:
        if folder.arch.vocab_size != arch.vocab_size:
            yield (
                f"{KEY}={str(folder.path)!r} has {folder.arch.vocab_size} tokens and the policy {arch.vocab_size}, and one"
                " of them has no tokenizer.json to tell whether they are the same; put the tokenizer into both folders"
            )
        return
    for token, token_id in policy.items():
        if reward.get(token) != token_id:
            yield (
                f"{KEY}={str(folder.path)!r} has another tokenizer than the policy: token {token!r} is {token_id} to the"
                f" policy and {reward.get(token, 'unknown')} to it; take a reward model of the policy's family"
            )
            return


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token -> id of a folder's tokenizer.json; None without a readable one."""
    try:
        tokenizer = read_json(folder / "tokenizer.json")
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: [piece, score] in the order of ids
            vocabulary = {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
        return {**vocabulary, **{added["content"]: added["id"] for added in tokenizer.get("added_tokens", ())}}
    except (OSError, ValueError, KeyError, TypeError):
        return None
