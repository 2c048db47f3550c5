"""Checks of the critic: the section `critic` and `trainer.critic_warmup` against the method, and its folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.checks.layout import expert_problems, layout_problems
from grpo_megatron.checks.model_folders import CRITIC_PATH, MAIN, OTHERS, has_critic, scoring_models, trains_scores
from grpo_megatron.config import AlgorithmConfig, Config, CriticConfig, RewardModelConfig, ScoringModel
from grpo_megatron.config.problems import Problems
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.heads.folder import RewardFolder
from grpo_megatron.reading import read_json
from grpo_megatron.rewards.reward import rewards

# -- A model with a scalar head: how its folder is read. One beside the policy (a reward model, the critic) reads the sa
# tokens: its length, layout and vocabulary.


def second_model_problems(
    config: Config, world_size: int, arch: Architecture | None, folder: RewardFolder, key: str
) -> Problems:
    """The folder that the config's `key` names, against the policy's layout, lengths and tokens.

    `arch`, the policy's, is None if it cannot be read.
    """
    yield from _second_length_problems(config, folder, key)
    yield from _second_layout_problems(config, world_size, arch, folder, key)
    if arch is not None:
        yield from _vocabulary_problems(config.model.tokenizer_path or config.model.path, arch, folder, key)


def _second_length_problems(config: Config, folder: RewardFolder, key: str) -> Problems:
    total = config.data.max_prompt_length + config.data.max_response_length
    both = f"data.max_prompt_length + data.max_response_length = {total}"
    for what in ("max_position_embeddings", "sliding_window"):
        limit = getattr(folder.arch, what)
        if limit is not None and total > limit:
            yield f"{both} exceed the {what} {limit} of {key}={str(folder.path)!r}; lower one of them"


def _second_layout_problems(
    config: Config, world_size: int, arch: Architecture | None, folder: RewardFolder, key: str
) -> Problems:
    """The model has the policy's layout. A problem that the policy has too is reported for the policy."""

    def problems_of(model: Architecture | None) -> Problems:
        yield from layout_problems(config, world_size, model)
        yield from expert_problems(config.actor.megatron, world_size, model, on_cpu=config.trainer.device == "cpu")

    reported = set(problems_of(arch))
    for problem in problems_of(folder.arch):
        if problem not in reported and not str(problem).startswith("rollout."):
            yield f"{key}={str(folder.path)!r} is cut in the policy's layout: {problem}"


def _vocabulary_problems(policy_folder: Path, arch: Architecture, folder: RewardFolder, key: str) -> Problems:
    """The model reads the policy's token ids unchanged, so both must have the same vocabulary."""
    policy, other = _vocabulary(policy_folder), _vocabulary(folder.path)
    if policy is None or other is None:
        if folder.arch.vocab_size != arch.vocab_size:
            yield (
                f"{key}={str(folder.path)!r} has {folder.arch.vocab_size} tokens and the policy {arch.vocab_size}, and one"
                " of them has no tokenizer.json to tell whether they are the same; put the tokenizer into both folders"
            )
        return
    for token, token_id in policy.items():
        if other.get(token) != token_id:
            yield (
                f"{key}={str(folder.path)!r} has another tokenizer than the policy: token {token!r} is {token_id} to the"
                f" policy and {other.get(token, 'unknown')} to it; take a model of the policy's family"
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


_DEFAULT_CRITIC: dict[str, Any] = CriticConfig().model_dump() | {"optim": CriticConfig().optim}


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
    changed = [
        f"critic.{key}" for key in CriticConfig.model_fields if getattr(config.critic, key) != _DEFAULT_CRITIC[key]
    ]
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
    parts.append(f"gamma {config.algorithm.gamma:g}, lambda {_shown_lambda(config)}")
    updates = section.num_updates(1, config.actor, config.data.train_batch_size)
    parts.append(f"{updates} updates per step")
    if only:
        parts.append(f"trained alone before step {only}")
    yield ", ".join(parts)


def _shown_lambda(config: Config) -> str:
    """Of the policy's advantages, and of the value's targets where that differs."""
    alpha, lam = config.critic.lam_alpha, config.algorithm.lam
    of_policy = f"{lam:g}" if alpha is None else f"1 - 1 / ({alpha:g} x length)"
    targets = lam if config.critic.lam is None else config.critic.lam
    return of_policy if alpha is None and targets == lam else f"{of_policy} (targets {targets:g})"


# -- Checks of `reward_model` and `reward_models`: the folders, their layout and tokens, and when they give rewards ----

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


# -- Checks of a run that trains a scalar head: a reward model from pairs, or a process reward model from step labels --


def score_head_problems(config: Config) -> Problems:
    """The loss of a scalar head against the rest of the config."""
    actor, algorithm, data = config.actor, config.algorithm, config.data
    facts, estimator = policy_losses.facts(actor.loss_mode), advantage_estimators.facts(algorithm.adv_estimator)
    if estimator.scores and estimator.scores != facts.scores:
        losses = " or ".join(policy_losses.names_with(scores=estimator.scores))
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} labels what a scalar head scores, and actor.loss_mode="
            f"{actor.loss_mode} does not read it; set loss_mode={losses}, or another estimator"
        )
    if not trains_scores(config):
        return
    key = f"actor.loss_mode={actor.loss_mode} trains a model that scores, without a head over the vocabulary"
    if estimator.scores != facts.scores:
        estimators = " or ".join(advantage_estimators.names_with(scores=facts.scores))
        yield f"{key}: algorithm.adv_estimator={algorithm.adv_estimator} has no labels for it; set {estimators}"
    if algorithm.source != "file":
        yield f"{key}: it draws no responses; set algorithm.source=file, with rows in data.train_files"
    if data.val_files or data.val_tasks:
        yield (
            f"{key}: it cannot answer data.val_files or data.val_tasks; leave them out, and set data.val_loss_files to"
            " held-out rows"
        )
    if config.sft.steps:
        yield f"{key}: it cannot learn from sft.steps={config.sft.steps}; set sft.steps=0"
    if actor.use_kl_loss or algorithm.use_kl_in_reward:
        yield f"{key}: there is no KL to a reference; set actor.use_kl_loss=false and algorithm.use_kl_in_reward=false"
    if actor.entropy_coeff:
        yield f"{key}: it has no entropy; set actor.entropy_coeff=0"
    if config.reward_paths:
        yield f"{key}, and reward_model.path or reward_models give rewards to drawn responses; leave them out"
    if actor.megatron.context_parallel_size > 1:
        yield f"{key}: it reads whole sequences on each rank; set actor.megatron.context_parallel_size=1"
    if facts.scores == "step" and config.rollout.multi_turn.environment is not None:
        yield f"{key}: steps are of one answer, not of several turns; leave rollout.multi_turn.environment out"
