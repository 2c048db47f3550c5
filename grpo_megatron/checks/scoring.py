"""Models that score: the critic, the reward models, and a policy that learns to score. Their keys against the rest of a config.

A model beside the policy reads the policy's tokens in its layout: lengths, layout and vocabulary must fit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.checks.layout import world_problems
from grpo_megatron.checks.model_folders import CRITIC_PATH, MAIN, OTHERS, has_critic, scoring_models, trains_scores
from grpo_megatron.config import AlgorithmConfig, Config, CriticConfig, RewardModelConfig, Section
from grpo_megatron.config.problems import Findings, check, keys_of, marked
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.heads.folder import RewardFolder
from grpo_megatron.reading import read_json
from grpo_megatron.rewards.reward import rewards

METRIC_NAMES = (
    *("score", "step_score", "steps", "agreement", "pairs", "loss", "accuracy", "margin", "grad_norm", "rule_reward"),
)
_DEFAULTS: dict[str, Section] = {"critic": CriticConfig(), MAIN: RewardModelConfig()}


def _changed(section: Section, name: str) -> list[str]:
    """The keys of `critic` or `reward_model` that do not have their defaults."""
    return [key for key in type(section).model_fields if getattr(section, key) != getattr(_DEFAULTS[name], key)]


@check
def _second_model_problems(
    config: Config, world_size: int, arch: Architecture | None, folder: RewardFolder, key: str
) -> Findings:
    """The folder that `key` names, against the policy's lengths, layout and tokens. `arch`, the policy's: None if unknown."""
    k, named = keys_of(config), f"{marked(key)}={str(folder.path)!r}"
    total = config.data.max_prompt_length + config.data.max_response_length
    for what in ("max_position_embeddings", "sliding_window"):
        limit = getattr(folder.arch, what)
        if limit is not None and total > limit:
            yield (
                f"{k.data.max_prompt_length:key} + {k.data.max_response_length:key} = {total} exceed the {what} {limit} of"
                f" {named}; lower one of them"
            )
    reported = {problem.text for problem in world_problems(config, world_size, arch)}  # for the policy
    for problem in world_problems(config, world_size, folder.arch):
        if problem.text not in reported and not problem.is_of("rollout"):
            yield f"{named} is cut in the policy's layout: {problem}"
    if arch is not None:
        yield from _vocabulary_problems(config.model.tokenizer_path or config.model.path, arch, folder, named)


@check
def _vocabulary_problems(policy_folder: Path, arch: Architecture, folder: RewardFolder, named: str) -> Findings:
    """The model reads the policy's token ids unchanged, so both must have the same vocabulary."""
    policy, other = _vocabulary(policy_folder), _vocabulary(folder.path)
    if policy is None or other is None:
        if folder.arch.vocab_size != arch.vocab_size:
            yield (
                f"{named} has {folder.arch.vocab_size} tokens and the policy {arch.vocab_size}, and one of them has no"
                " tokenizer.json to tell whether they are the same; put the tokenizer into both folders"
            )
        return
    for token, token_id in policy.items():
        if other.get(token) != token_id:
            yield (
                f"{named} has another tokenizer than the policy: token {token!r} is {token_id} to the policy and"
                f" {other.get(token, 'unknown')} to it; take a model of the policy's family"
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


# -- The critic --------------------------------------------------------------------------------------------------------


@check
def critic_problems(
    config: Config, world_size: int, arch: Architecture | None, folder: RewardFolder | None
) -> Findings:
    """The keys of the critic against the rest of the config. `folder`: of `critic.path`, if it is set and can be read."""
    k, algorithm, critic = keys_of(config), config.algorithm, config.critic
    has_lambda = algorithm.lam != AlgorithmConfig().lam
    if not has_critic(algorithm):
        unused = [f"critic.{key}" for key in _changed(critic, "critic")]
        unused += ["trainer.critic_warmup"] if config.trainer.critic_warmup else []
        unused += ["algorithm.lam"] if has_lambda else []
        if unused:
            yield (
                f"{marked(unused[0])} has no effect: {k.algorithm.adv_estimator!r} needs no critic; set"
                f" adv_estimator={' or '.join(advantage_estimators.names_with(needs_values=True))}, or leave it out"
            )
        return
    if folder is not None:
        yield from _second_model_problems(config, world_size, arch, folder, CRITIC_PATH)
    if critic.lam_alpha is not None and has_lambda:
        yield (
            f"{k.critic.lam_alpha} gives each response a lambda by its length, and {k.algorithm.lam} gives all the same;"
            " set one of them (critic.lam is that of the value's targets)"
        )
    total = config.trainer.total_training_steps
    for named, steps in (
        (f"{k.trainer.critic_warmup}", config.trainer.critic_warmup),
        (f"{k.critic.pretrain_steps}", critic.pretrain_steps),
    ):
        if steps >= total > 0:
            yield (
                f"{named} leaves no step of {k.trainer.total_training_steps} to train the policy; set it to"
                f" {total - 1} or less"
            )
    if algorithm.rollout_correction.rollout_rs == "off_policy":
        yield (
            f"{k.algorithm.rollout_correction.rollout_rs} drops responses of negative advantage, and"
            f" {k.algorithm.adv_estimator!r} computes advantages per token, after the correction; set"
            " rollout_rs=token, sequence or geometric"
        )


# -- Reward models -----------------------------------------------------------------------------------------------------


@check
def reward_model_problems(
    config: Config, world_size: int, arch: Architecture | None, folders: Mapping[str, RewardFolder]
) -> Findings:
    """The sections against the rest of the config. `arch`, the policy's, is None if it cannot be read.

    `folders`: those of `scoring_models` that can be read, by key.
    """
    k, section = keys_of(config), config.reward_model
    for name, model in config.reward_models.items():
        key = marked(f"{OTHERS}{name}")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or name in METRIC_NAMES:
            yield (
                f"{key}: the name is part of metric names (reward_model/{name}/score/mean); use letters, digits, - and _,"
                f" beginning with a letter, and none of {', '.join(METRIC_NAMES)}"
            )
        if model.path is None:
            yield f"{key}.path is not set; set it to the folder of a reward model, or leave the model out"
    if section.path is None:
        used = {"combine"} if config.reward_models else set()
        if policy_losses.facts(config.actor.loss_mode).scores == "step":
            used |= {"step_separator", "kind"}
        if unused := [key for key in _changed(section, MAIN) if key not in used]:
            yield (
                f"{marked(f'reward_model.{unused[0]}')} has no effect without a reward model; set"
                f" {k.reward_model.path:key}, or leave it out"
            )
    if not scoring_models(config):
        return
    yield from _estimator_problems(config)
    for name, is_on in (
        ("filter_groups.enable", config.algorithm.filter_groups.enable),
        ("replay.ratio", config.algorithm.replay.ratio > 0),
    ):
        if is_on and not config.has_rule:  # nothing is known of a group when it is drawn
            yield (
                f"{marked(f'algorithm.{name}')} compares rewards while responses are drawn, and the reward models score"
                f" them later; set {k.reward.function:key}, whose reward is then compared, or switch it off"
            )
    if MAIN in folders:
        yield from _iteration_problems(config, folders[MAIN])
    for key, folder in folders.items():
        if key != MAIN and not folder.has_head:
            yield f"{_untrained(f'{key}.path', folder)}; set it to a folder with a trained head"
        yield from _second_model_problems(config, world_size, arch, folder, f"{key}.path")


@check
def _estimator_problems(config: Config) -> Findings:
    """The rest of the algorithm against models that give one reward per response, or per step."""
    k = keys_of(config)
    estimator, models = config.algorithm.adv_estimator, scoring_models(config)
    has_steps = any(model.kind == "process" for model in models.values())
    if estimator == "remax":
        yield (
            f"{k.algorithm.adv_estimator!r} needs the reward of a greedy response, and a reward model scores only"
            " the drawn responses; set another estimator, or leave the reward models out"
        )
    function = config.reward.function or ""
    rule_steps = config.reward_model.combine == "add" and (":" in function or rewards.facts(function).gives_steps)
    if estimator == "grpo_process" and not has_steps and not rule_steps:
        yield (
            f"{k.algorithm.adv_estimator!r} needs rewards of single steps, and an outcome reward model scores"
            " each response as a whole; set reward_model.kind=process with such a model, or another estimator"
        )
    if has_steps and config.rollout.multi_turn.environment is not None:
        yield (
            f"{k.rollout.multi_turn.environment!r}: a process reward model scores the steps of one answer, and"
            " here observations are between them; use kind=outcome"
        )
    learns = config.algorithm.iteration_steps is not None and MAIN in models
    if learns and config.rollout.n == 1:
        yield (
            f"{k.rollout.n}: {k.reward_model.path:key} learns from pairs of one prompt's samples; set rollout.n=2"
            " or more"
        )
    if learns and models[MAIN].kind == "process":
        yield (
            f"{k.reward_model.kind} with {k.algorithm.iteration_steps:key}: it would learn from pairs of whole"
            " responses, which is for kind=outcome; leave iteration_steps out, or put it into reward_models,"
            " where it is frozen"
        )


def _untrained(key: str, folder: RewardFolder) -> str:
    return (
        f"{marked(key)}={str(folder.path)!r} is a language model, whose new head scores every response 0 until trained"
    )


@check
def _iteration_problems(config: Config, folder: RewardFolder) -> Findings:
    """A new head must be trained before it gives rewards, and some step must use it."""
    k = keys_of(config)
    start, steps = config.reward_model.start_iteration, config.algorithm.iteration_steps
    total = config.trainer.total_training_steps
    untrained = _untrained("reward_model.path", folder)
    if steps is None:
        if not folder.has_head:
            yield (f"{untrained}; set {k.algorithm.iteration_steps:key}, or a folder with a trained head")
        if start:
            yield (f"{k.reward_model.start_iteration} counts outer iterations; set algorithm.iteration_steps")
        return
    if not folder.has_head and start == 0:
        yield (
            f"{untrained}; set {k.reward_model.start_iteration:key}=1 (the reward function alone rewards the"
            " first iteration)"
        )
    if total and start * steps >= total:
        yield (
            f"{k.reward_model.start_iteration} x {k.algorithm.iteration_steps} = {start * steps} steps leave none"
            f" of {k.trainer.total_training_steps} to the reward model; lower one, or train longer"
        )
    length = config.data.max_prompt_length + config.data.max_response_length
    if config.actor.ppo_max_token_len_per_gpu < 2 * length:
        yield (
            f"{k.actor.ppo_max_token_len_per_gpu} is less than a pair of full sequences, 2 x {length} (a pair is"
            f" never split); set it to {2 * length} or more"
        )


# -- A policy that learns to score: a reward model from pairs, or a process reward model from step labels --------------


@check
def score_head_problems(config: Config) -> Findings:
    """The loss of a scalar head against the rest of the config."""
    k = keys_of(config)
    actor, algorithm, data = config.actor, config.algorithm, config.data
    facts, estimator = policy_losses.facts(actor.loss_mode), advantage_estimators.facts(algorithm.adv_estimator)
    if estimator.scores and estimator.scores != facts.scores:
        losses = " or ".join(policy_losses.names_with(scores=estimator.scores))
        yield (
            f"{k.algorithm.adv_estimator} labels what a scalar head scores, and {k.actor.loss_mode} does not read"
            f" it; set loss_mode={losses}, or another estimator"
        )
    if not trains_scores(config):
        return
    key = f"{k.actor.loss_mode} trains a model that scores, without a head over the vocabulary"
    if estimator.scores != facts.scores:
        estimators = " or ".join(advantage_estimators.names_with(scores=facts.scores))
        yield (f"{key}: {k.algorithm.adv_estimator} has no labels for it; set {estimators}")
    if algorithm.source != "file":
        yield (f"{key}: it draws no responses; set {k.algorithm.source:key}=file, with rows in data.train_files")
    if data.val_files or data.val_tasks:
        yield (
            f"{key}: it cannot answer {k.data.val_files:key} or {k.data.val_tasks:key}; leave them out, and set"
            " data.val_loss_files to held-out rows"
        )
    if config.sft.steps:
        yield (f"{key}: it cannot learn from {k.sft.steps}; set sft.steps=0")
    if actor.use_kl_loss or algorithm.use_kl_in_reward:
        yield (
            f"{key}: there is no KL to a reference; set {k.actor.use_kl_loss:key}=false and"
            " algorithm.use_kl_in_reward=false"
        )
    if actor.entropy_coeff:
        yield (f"{key}: it has no entropy; set {k.actor.entropy_coeff:key}=0")
    if config.reward_paths:
        yield (f"{key}, and {k.reward_model.path:key} or reward_models give rewards to drawn responses; leave them out")
    if actor.megatron.context_parallel_size > 1:
        yield (f"{key}: it reads whole sequences on each rank; set {k.actor.megatron.context_parallel_size:key}=1")
    if facts.scores == "step" and config.rollout.multi_turn.environment is not None:
        yield (
            f"{key}: steps are of one answer, not of several turns; leave {k.rollout.multi_turn.environment:key} out"
        )
