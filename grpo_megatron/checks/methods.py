"""Which algorithms go together: one message for every combination in the config that cannot work as it is written.

A method (docs/algorithms.md) is a data source, an estimator, a loss and an aggregation. Each is chosen by its
own key. What an estimator or a loss needs is a fact that it declares where it is defined (registry.py). So a user's own
`package.module:function` is checked like the registered ones.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import loss_facts, needs_reference, policy_losses, selected_by
from grpo_megatron.checks.components import reward_name
from grpo_megatron.checks.models import has_critic
from grpo_megatron.config import Config, OptimConfig, TeacherConfig
from grpo_megatron.config.problems import Problems, keys_of, marked, written
from grpo_megatron.config.section import config_keys
from grpo_megatron.data.task import get_task
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.lora.peft_folder import PeftFolder
from grpo_megatron.processes.endpoint import check_url, key_of
from grpo_megatron.registry import FactRegistry
from grpo_megatron.rewards.reward import rewards
from grpo_megatron.rewards.services import exceeded
from grpo_megatron.storage.run_files import owner_problem, rollout_files

# -- Keys without effect: the conditions stand where the keys are declared (config.section.Needs) ----------------------

CONDITION = re.compile(r"([\w.]+)(?::(\w+))?(?:(!=|=|>)(.*))?")
FACTS: dict[str, FactRegistry[Any, Any]] = {
    "algorithm.adv_estimator": advantage_estimators,
    "actor.loss_mode": policy_losses,
}


OWN_FUNCTIONS = (*FACTS, "actor.loss_agg_mode", "critic.loss_agg_mode")


def effect_problems(config: Config) -> Problems:
    """Yields keys that are set, and have no effect without a fitting value of another key."""
    defaults = config.method_keys
    for key in config_keys(Config):
        value = config.at(key.name)
        for needed in key.needs if value != defaults.get(key.name, key.default) else ():
            unmet = [_unmet(config, condition) for condition in needed.split(" or ")]
            if all(unmet):
                now, remedies = zip(*filter(None, unmet), strict=True)
                others = dict.fromkeys(text for text in now if not text.startswith(f"{marked(key.name)}="))
                yield (
                    f"{marked(key.name)}={written(value)} has no effect with {' and '.join(others)}; set"
                    f" {' or '.join(remedies)}, or leave it out"
                )
                break


def _unmet(config: Config, condition: str) -> tuple[str, str] | None:
    """Returns (the other key with its value, what to set instead) of a condition; None: it is true."""
    match = CONDITION.fullmatch(condition)
    assert match is not None, condition
    key, fact, sign, wanted = match.groups()
    value = config.at(key)
    if fact:
        wanted, registry = wanted or "true", FACTS[key]
        fits = [name for name in registry.names() if written(getattr(registry.facts(name), fact)) == wanted]
        holds, remedy = written(getattr(registry.facts(value), fact)) == wanted, f"{key}={' or '.join(fits)}"
    elif sign == ">":
        holds, remedy = value > float(wanted), f"{key} above {wanted}"
    elif sign == "!=":
        holds, remedy = written(value) != wanted, f"another {key}"
    elif sign == "=":
        may_read = key in OWN_FUNCTIONS and ":" in str(value)  # a function of the user's own may read any key
        holds, remedy = may_read or written(value) == wanted, f"{key}={wanted}"
    else:
        holds, remedy = bool(value), key
    now = marked(key) if isinstance(value, list) and value else f"{marked(key)}={written(value)}"
    return None if holds else (now, remedy)


RARELY_ABOVE = {  # ends of keys -> values up to which a run can be meant so, and what a larger one does
    "optim.lr": (0.05, "an update of AdamW moves each weight by about this much, and most weights are smaller"),
    "kl_loss_coef": (10.0, "the loss is the KL alone, and the policy stays the reference"),
    "entropy_coeff": (1.0, "the entropy outweighs the rewards, and the responses become random"),
    "ppo_epochs": (50, "most updates are far from the policy that sampled"),
}


def suspicions(config: Config) -> Iterator[str]:
    """Yields warnings about settings that work and are rarely meant, for the plan and a run's start."""
    data, val = config.data, config.rollout.val_kwargs
    for key in ("actor.optim.lr", *(["critic.optim.lr"] if has_critic(config.algorithm) else [])):
        if config.at(key) == 0:
            yield f"{key}=0: this model learns nothing"
    for name, (end, (bound, why)) in itertools.product((key.name for key in config_keys(Config)), RARELY_ABOVE.items()):
        if name.endswith(end) and (config.at(name) or 0) > bound:
            yield f"{name}={config.at(name):g} is above {bound:g}, which is rarely meant: {why}"
    if val.n > 1 and val.temperature == 0 and data.has_prompts_to_validate:
        yield (
            f"rollout.val_kwargs.n={val.n} with temperature=0: the {val.n} answers to a prompt are the same; set"
            " rollout.val_kwargs.temperature, or n=1"
        )
    for key, value in {"chat_template": data.chat_template, "chat_template_kwargs": data.chat_template_kwargs}.items():
        if value and not data.apply_chat_template:
            yield f"data.{key}={str(value)!r} is not applied to prompts: apply_chat_template=false"
    if val.top_p < 1 and val.temperature == 0:
        yield f"rollout.val_kwargs.top_p={val.top_p:g} has no effect with temperature=0, which takes the likeliest token"
    actor, total = config.actor, config.trainer.total_training_steps
    is_known = config.trainer.total_epochs is None or "total_training_steps" in config.trainer.model_fields_set
    for key in ("save_freq", "test_freq"):
        every, default = getattr(config.trainer, key), type(config.trainer).model_fields[key].default
        if every > total and every != default and is_known:
            before = key == "test_freq" and config.trainer.val_before_train
            when = "the start and the end" if before else "the end"
            yield f"trainer.{key}={every} is beyond trainer.total_training_steps={total}: only at {when}"
    if actor.entropy_coeff < 0:
        yield f"actor.entropy_coeff={actor.entropy_coeff:g} lowers the entropy; a bonus for entropy is positive"
    if actor.clip_ratio_low == actor.clip_ratio_high == 0:
        yield "actor.clip_ratio_low=0 and clip_ratio_high=0 clip every ratio but 1: later updates of a batch learn nothing"
    if (adapters := actor.lora.path) is not None and (base := PeftFolder(adapters).base):
        folder = config.model.path.resolve()
        ends = {part.split("--")[-1] for part in folder.parts}  # a model of the Hub is in models--ORGANISATION--NAME
        if Path(base).resolve() != folder if Path(base).is_dir() else Path(base).name not in ends:
            yield (
                f"actor.lora.path={str(adapters)!r} has adapters of {base!r} (base_model_name_or_path), and model.path is"
                f" {str(config.model.path)!r}; on another base they have no meaning"
            )
    owners: dict[Path, list[str]] = {}
    for name, files in (("data.train_files", data.train_files), *((f"source {s.name}", s.files) for s in data.sources)):
        for path in files:
            owners.setdefault(path.absolute(), []).append(name)
    for path, names in owners.items():
        if len(names) > 1:
            yield f"{path.name} is in {' and in '.join(names)}: its rows are sampled as rows of each"
    for path in (*data.val_files, *(path for source in data.sources for path in source.val_files)):
        if trained_in := owners.get(path.absolute()):
            yield f"{path.name}, which is validated on, is trained on, too (in {trained_in[0]})"


# -- Combinations ------------------------------------------------------------------------------------------------------


def method_problems(config: Config) -> Problems:
    """Yields every combination that is wrong, by topic. components.py reports names that cannot be found."""
    topics = (
        *(effect_problems, _groups, _losses, _sources, _sampling, _partial, _placement, _iterations, _guards),
        _distillation,
    )
    for topic in topics:
        yield from topic(config)


def _names(registry: FactRegistry[Any, Any], **facts: Any) -> str:
    """Lists registered names for a message, of losses or estimators over the vocabulary."""
    return " or ".join(registry.names_with(**facts, scores=""))


def _groups(config: Config) -> Problems:
    """Checks estimators that compare samples against the samples and rewards that the config provides."""
    k, facts = keys_of(config), advantage_estimators.facts(config.algorithm.adv_estimator)
    key, is_sampled = f"{k.algorithm.adv_estimator!r}", config.algorithm.source != "file"
    if config.rollout.n == 1 and facts.compares_group and is_sampled:
        yield (
            f"{k.rollout.n}: {key} compares the samples of a prompt with each other, and one alone has advantage 0; set"
            " rollout.n=2 or more (8 is usual)"
        )
    if facts.needs_greedy_reward and not is_sampled:
        yield f"{key} needs a greedy response to every prompt, and {k.algorithm.source} samples none; set source=policy"
    names, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if facts.needs_reward_parts and not names:
        parts = ", ".join(part.name for part in config.reward.components) or "NAME, ..."
        yield (
            f"{key} needs parts of the reward, and the config gives one for the whole response; set"
            f" {k.algorithm.gdpo_reward_keys:key}=[{parts}], names that the reward function reports"
        )
    if weights is not None and len(weights) != len(names):
        yield (
            f"{k.algorithm.gdpo_reward_weights} has {len(weights)} numbers for {len(names)} names of"
            f" {k.algorithm.gdpo_reward_keys:key}; give one for each"
        )
    # An environment may give rewards for single turns, which only a run can tell. Reward models: models.py.
    if facts.needs_step_rewards and config.rollout.multi_turn.environment is None and not config.reward_paths:
        name = reward_name(config.reward) or _task_reward(config)
        # Nothing is known about a module:function before it runs: the estimator raises if it returns no steps.
        if name in rewards.names() and not rewards.facts(name).gives_steps:
            yield (
                f"{key} needs rewards of single steps, and the reward {name!r} gives one for the whole response; set"
                f" {k.reward.function:key} to a module:function that returns"
                ' {"score": ..., "steps": [(end, value), ...]} (examples/methods/sum_steps.py), or'
                " reward_model.kind=process with a model of steps"
            )


def _task_reward(config: Config) -> str | None:
    try:
        return get_task(config.data.task).reward
    except Exception:  # noqa: BLE001 - whatever is wrong with the task is reported by another check
        return None


def _losses(config: Config) -> Problems:
    """Checks losses against their aggregation and their estimator."""
    k, actor = keys_of(config), config.actor
    facts = policy_losses.facts(actor.loss_mode)
    if facts.aggregation and actor.loss_agg_mode not in facts.aggregation:
        yield (
            f"{k.actor.loss_mode} is a mean over responses, and {k.actor.loss_agg_mode} would weigh it otherwise; set"
            f" loss_agg_mode={' or '.join(facts.aggregation)}"
        )
    if actor.use_unbiased_kl and actor.kl_loss_type not in ("k1", "kl", "k3", "low_var_kl"):
        yield (
            f"{k.actor.use_unbiased_kl} is unbiased for the values of k1 and k3 alone, and {k.actor.kl_loss_type}; set"
            " kl_loss_type=k3, or use_unbiased_kl=false"
        )
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode and correction.rollout_is is not None:
        yield (
            f"{k.algorithm.rollout_correction.bypass_mode} has the engine's log-probabilities in the ratio, and"
            f" {k.algorithm.rollout_correction.rollout_is} would count them again; set rollout_is=null, or bypass_mode=false"
        )
    if correction.prox_logp_method == "loglinear":
        for used, other in (
            (correction.bypass_mode, f"{k.algorithm.rollout_correction.bypass_mode}"),
            (correction.rollout_rs, f"{k.algorithm.rollout_correction.rollout_rs}"),
            (config.algorithm.use_kl_in_reward, f"{k.algorithm.use_kl_in_reward}"),
            (selected_by(actor), f"{k.actor.loss_mode}, {k.actor.top_entropy_quantile}"),
        ):
            if used:
                yield (
                    f"{k.algorithm.rollout_correction.prox_logp_method} has no pass for old log-probabilities, which {other}"
                    " reads or replaces; set prox_logp_method=recompute"
                )
    if (size := config.algorithm.chord.batch_size) and config.teachers:
        yield f"{k.algorithm.chord.batch_size} mixes rows of an expert into the batch, which teachers do not score; leave one out"
    if 0 < size < (updates := actor.num_mini_batches(config.data.train_batch_size)):
        yield (
            f"{k.algorithm.chord.batch_size} rows in {updates} optimizer steps of {k.actor.ppo_mini_batch_size} prompts: some"
            f" would have none; set batch_size={updates} or more"
        )
    if not facts.paired:
        return
    if not advantage_estimators.facts(config.algorithm.adv_estimator).makes_pairs:
        pairing = _names(advantage_estimators, makes_pairs=True)
        yield (
            f"{k.actor.loss_mode} needs pairs, and {k.algorithm.adv_estimator!r} makes none; set adv_estimator={pairing}"
        )
    if actor.ppo_micro_batch_size_per_gpu == 1:
        yield (
            f"{k.actor.ppo_micro_batch_size_per_gpu} has no room for a pair, and {k.actor.loss_mode} needs both of its"
            " responses in one micro-batch; set 2 or more, or leave it out"
        )
    pair = 2 * (config.data.max_prompt_length + config.data.max_response_length)
    if actor.ppo_max_token_len_per_gpu < pair:
        yield (
            f"{k.actor.ppo_max_token_len_per_gpu} is less than a pair of full sequences, 2 x"
            f" ({k.data.max_prompt_length:key} + {k.data.max_response_length:key}) = {pair}; set it to {pair} or more"
        )


def _sources(config: Config) -> Problems:
    """Checks the source of responses against what is done with them."""
    k, algorithm = keys_of(config), config.algorithm
    key, loss = f"{k.algorithm.source}", policy_losses.facts(config.actor.loss_mode)
    if algorithm.source == "policy":
        return
    if not loss.is_likelihood:
        yield (
            f"{key}: the responses are not the policy's, and {k.actor.loss_mode} is only for those; set"
            f" loss_mode={_names(policy_losses, is_likelihood=True)}, or source=policy"
        )
    if algorithm.replay.ratio:
        yield f"{key}: {k.algorithm.replay.ratio} keeps samples of the policy; set it to 0"
    if algorithm.source == "initial" and config.ref.path is not None:
        yield f"{key} samples from the run's first model, and {k.ref.path:key} names another; leave ref.path out"
    if algorithm.source != "file":
        return
    facts = advantage_estimators.facts(algorithm.adv_estimator)
    without, paired = "constant", _names(policy_losses, paired=True)
    # an estimator that needs a greedy response has been reported by `_groups`
    if facts.needs_rewards and not facts.makes_pairs and not facts.needs_greedy_reward:
        yield (
            f"{key} reads responses without rewards, and {k.algorithm.adv_estimator!r} needs rewards; set"
            f" adv_estimator={without} (SFT), or {_names(advantage_estimators, makes_pairs=True)} with"
            f" actor.loss_mode={paired}"
        )
    if config.rollout.temperature != 1.0:
        yield (
            f"{key}: {k.rollout.temperature} would also divide the logits of the training, and nothing is sampled at it; leave"
            " it out (rollout.val_kwargs.temperature is that of validation)"
        )
    if facts.makes_pairs and not loss.paired:
        yield (
            f"{key} with {k.algorithm.adv_estimator} reads pairs, and {k.actor.loss_mode} takes none; set loss_mode={paired},"
            f" or adv_estimator={without}"
        )
    for name, enabled in (
        (k.algorithm.filter_groups.enable, algorithm.filter_groups.enable),
        (k.algorithm.dupo, algorithm.dupo),
    ):
        if enabled:
            yield f"{key}: {name} chooses among sampled groups, and none is sampled; set it to false"


def _sampling(config: Config) -> Problems:
    """Checks filters, buffers and pass rates against each other and the batch."""
    k, algorithm, sampling = keys_of(config), config.algorithm, config.data.sampling
    filters = {
        k.algorithm.filter_groups.enable: algorithm.filter_groups.enable,
        k.algorithm.dupo: algorithm.dupo,
    }
    if all(filters.values()):
        yield (
            f"{k.algorithm.filter_groups.enable} and {k.algorithm.dupo} fill the same places, one with new prompts and one"
            " with copies; set one of them to false"
        )
    for key, enabled in filters.items():
        if enabled and config.rollout.n == 1:
            yield f"{key} compares the samples of a prompt, and {k.rollout.n}; set rollout.n=2 or more"
    yield from _truncation(config)
    size, ratio = config.data.train_batch_size, algorithm.replay.ratio
    if ratio and int(size * ratio) == 0:
        yield (
            f"{k.algorithm.replay.ratio} of {k.data.train_batch_size} prompts is less than one; set it to {1 / size:g} or"
            " more, or to 0"
        )
    if config.reward.length.kind == "target" and config.reward.length.target_len is None:
        yield f"{k.reward.length.kind} needs {k.reward.length.target_len:key}; set it to a number of tokens"
    buffer, longest = config.reward.overlong_buffer.len, config.data.max_response_length
    if buffer is not None and buffer > longest:
        yield (
            f"{k.reward.overlong_buffer.len} is more than {k.data.max_response_length}, so that every response would be"
            f" penalised; set it to {longest // 4 or 1}, say"
        )
    if sampling.pass_rates is None:
        return
    if algorithm.source == "file":
        yield (
            f"{k.data.sampling.pass_rates:key} chooses among prompts, and {k.algorithm.source} reads prompts with responses;"
            " filter the file with `grpo-megatron curate`, or leave it out"
        )
    if sampling.min_pass_rate > sampling.max_pass_rate:
        yield f"{k.data.sampling.min_pass_rate} is above max_pass_rate={sampling.max_pass_rate:g}; swap them"
    if sampling.weight != "uniform" and not config.data.shuffle:
        yield (
            f"{k.data.sampling.weight} samples prompts at random, and {k.data.shuffle} takes them in the file's order; set"
            " shuffle=true, or weight=uniform"
        )


def _truncation(config: Config) -> Problems:
    """Checks rollout.top_p, top_k and min_p of training samples."""
    k, rollout = keys_of(config), config.rollout
    if rollout.top_k < 1:
        for key in [k.rollout.top_p] * (rollout.top_p < 1) + [k.rollout.min_p] * (rollout.min_p > 0):
            yield (
                f"{key} leaves any number of tokens, and their ids are recorded for the policy, 4 bytes each; set"
                " rollout.top_k=64, say, which bounds them (2 to 4096), or leave it out (rollout.val_kwargs may differ)"
            )
    elif rollout.top_k == 1:
        yield f"{k.rollout.top_k} leaves one token, whose log-probability and gradient are 0; set rollout.top_k=2 or more"
    elif config.teachers:
        yield (
            f"{k.rollout.top_k} cuts the policy's distribution, and teachers score the full vocabulary; leave it out, or leave"
            " teachers out"
        )


def _partial(config: Config) -> Problems:
    """Yields settings that `rollout.partial` (responses of several steps) excludes."""
    k, partial, algorithm = keys_of(config), config.rollout.partial, config.algorithm
    if not partial.is_on:
        return
    key, longest = f"{k.rollout.partial.over_sample}", config.data.max_response_length
    if algorithm.source != "policy":
        yield f"{key} goes on under newer weights, and {k.algorithm.source} has none; leave rollout.partial out"
    if config.rollout.multi_turn.environment is not None:
        yield (
            f"{key}: a trajectory of several turns cannot wait for a later step; leave out {k.rollout.partial:key} or"
            " rollout.multi_turn"
        )
    if partial.chunk_tokens >= longest:
        yield (
            f"{k.rollout.partial.chunk_tokens} is not less than {k.data.max_response_length}, so that no response would be"
            f" cut; set it to {max(1, longest // 8)}, say"
        )
    if config.reward.function is not None and rewards.facts(config.reward.function).compares:
        yield (
            f"{key}: {k.reward.function} compares a prompt's samples, which finish in different steps; leave one out"
        )
    if is_uncorrected(config):
        yield (
            f"{key} trains on tokens of up to {partial.max_staleness} earlier steps, and {k.algorithm.rollout_correction:key}"
            " has neither rollout_is nor rollout_rs, so that they would count as the policy's own; set rollout_is=token"
        )


def is_uncorrected(config: Config) -> bool:
    """Says if samples of older weights would count as the policy's. A likelihood has no ratio to correct."""
    correction, is_likelihood = config.algorithm.rollout_correction, loss_facts(config.actor).is_likelihood
    return not (is_likelihood or correction.rollout_is or correction.rollout_rs or correction.bypass_mode)


def _placement(config: Config) -> Problems:
    """Yields settings that ranks of two roles (`rollout.placement: separate`) exclude."""
    k, rollout, algorithm = keys_of(config), config.rollout, config.algorithm
    if rollout.placement == "colocated":
        return
    key, remedy = f"{k.rollout.placement}", "set placement=colocated"
    if algorithm.source != "policy":
        yield f"{key} samples from the policy that is trained, and {k.algorithm.source} does not; {remedy}"
    elif not config.has_rollouts:
        yield f"{key}: this run samples nothing; {remedy}"
    if rollout.lag and is_uncorrected(config):
        yield (
            f"{k.rollout.lag} trains on samples of as many steps older weights, and {k.algorithm.rollout_correction:key} has"
            " neither rollout_is nor rollout_rs, so that they would count as the policy's own; set rollout_is=token, or lag=0"
        )


def _iterations(config: Config) -> Problems:
    """Checks that an outer iteration renews something, and that there is more than one."""
    k, steps, total = keys_of(config), config.algorithm.iteration_steps, config.trainer.total_training_steps
    if steps is None:
        return
    if not needs_reference(config.algorithm, config.actor) and config.reward_model.path is None:
        yield (
            f"{k.algorithm.iteration_steps} renews the reference and the reward model, and this run has neither; set"
            " actor.use_kl_loss=true or reward_model.path, or leave it out"
        )
    if steps >= total > 0:
        yield (
            f"{k.algorithm.iteration_steps} leaves one iteration in {k.trainer.total_training_steps}; set it to"
            f" {max(1, total // 2)} or less"
        )


def _distillation(config: Config) -> Problems:
    """Checks what is learnt from teachers against the loss and the rest of the config."""
    k, actor = keys_of(config), config.actor
    facts = policy_losses.facts(actor.loss_mode)
    if config.algorithm.adv_estimator == "zero" and not config.teachers:
        yield f"{k.algorithm.adv_estimator!r} leaves all that is learnt to teachers; set teachers, or another estimator"
    if not config.teachers:
        return
    for name in config.teachers:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or name.startswith("from_token_"):
            yield (
                f"{marked(f'teachers.{name}')}: the name is part of metric names (distillation/reverse_kl/{name}); use letters,"
                " digits, - and _, beginning with a letter, and not from_token_"
            )
    yield from _teachers(config)
    if facts.scores:
        yield f"{k.actor.loss_mode} trains a model that scores, without a head over the vocabulary; leave teachers out"
    elif facts.is_likelihood and config.distillation.kl == "sampled":
        yield (
            f"{k.distillation.kl} is part of the advantages of the policy's own samples, and {k.actor.loss_mode} has no ratio to"
            f" these; set distillation.kl=forward, or loss_mode={_names(policy_losses, is_likelihood=False)}"
        )
    elif facts.paired:
        yield f"{k.actor.loss_mode} compares pairs, whose weights are not those of single tokens; leave teachers out"
    if config.model.exact:
        yield f"{k.model.exact} is not made for teachers; set it to false, or leave teachers out"


def _teachers(config: Config) -> Problems:
    """Checks each teacher: what it is, which rows it scores, what it reads of them."""
    k, objective, owners = keys_of(config), config.distillation, dict[str, str]()
    if len(config.teachers) > 1 and objective.key is None:
        yield (
            f"{marked('teachers')} has {len(config.teachers)}, and nothing says which of them scores a row; set"
            f" {k.distillation.key:key} to a column"
        )
    if config.algorithm.source == "file" and objective.key is not None:
        yield f"{k.distillation.key} chooses by a column of prompts, and {k.algorithm.source} has responses; leave it out"
    for name, teacher in config.teachers.items():
        key = marked(f"teachers.{name}")
        if sum(one is not None for one in (teacher.path, teacher.self, teacher.url)) != 1:
            yield f"{key} needs either path, or self=start or current, or url; set exactly one of them"
        yield from _server_problems(config, name, teacher)
        if teacher.adapters is not None and teacher.path is None:
            yield f"{key}.adapters={str(teacher.adapters)!r} need the model that they adapt; set {key}.path to it"
        if teacher.self is not None and teacher.dtype is not None:
            yield f"{key}.dtype={teacher.dtype}: it is the policy, in model.dtype; leave dtype out"
        if teacher.tensor_model_parallel_size is None:
            for size in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
                if getattr(teacher, size) > 1:
                    yield f"{key}.{size} has no effect without tensor_model_parallel_size; set it, to 1 say"
        elif teacher.self is not None:
            yield f"{key}.tensor_model_parallel_size: it is the policy, in the policy's layout; leave it out"
        learns_alone = config.algorithm.adv_estimator == "zero"  # then it never differs from its start
        if teacher.prompt_column is None and (teacher.self == "current" or (learns_alone and teacher.self is not None)):
            yield f"{key}.self={teacher.self} is the policy itself, which teaches nothing without a prompt_column; set one"
        steps = {name: getattr(teacher, name) for name in ("renew_steps", "lag_steps") if getattr(teacher, name)}
        for name, number in steps.items():
            if teacher.self != "start":
                yield f"{key}.{name}={number} is of the policy as it was; set self=start, or leave it out"
            elif number >= config.trainer.total_training_steps > 0:
                yield f"{key}.{name}={number} is never reached in {k.trainer.total_training_steps}; set it lower, or leave it out"
        if len(steps) > 1:
            yield f"{key} has renew_steps and lag_steps, two times of one policy; leave one of them out"
        if objective.reads_states and (teacher.self == "current" or steps):
            yield f"{key} changes, and its output head with it, which is read once; set {k.distillation.top_k:key}=64, say"
        if teacher.key is not None and objective.key is None:
            yield f"{key}.key={teacher.key!r} has no effect without a column; set {k.distillation.key:key}, or leave it out"
        if (other := owners.setdefault(teacher.key or name, name)) != name:
            yield f"{key} and teachers.{other} have the key {teacher.key or name!r}; a row has one teacher: change one"
        if teacher.max_prompt_length is not None and teacher.prompt_column is None:
            yield f"{key}.max_prompt_length has no effect without prompt_column; leave it out"
        if teacher.prompt_column is not None and config.algorithm.source == "file":
            yield f"{key}.prompt_column is for responses that are sampled, and {k.algorithm.source}; leave it out"


def _server_problems(config: Config, name: str, teacher: TeacherConfig) -> Problems:
    """Checks a teacher behind a server against what servers compute."""
    k, key = keys_of(config), marked(f"teachers.{name}")
    if teacher.url is None:
        if teacher.model is not None or teacher.api_key_env is not None:
            yield f"{key}.model and api_key_env are of a server; set url, or leave them out"
        return
    try:
        check_url(teacher.url, f"{key}.url")
        key_of(teacher.api_key_env, f"{key}.api_key_env")
    except ValueError as error:
        yield f"{error}; set it to the server's address, or give the teacher a path"
    if teacher.model is None:
        yield f"{key}.url needs the teacher's name at the server; set model to it"
    if teacher.dtype is not None or teacher.tensor_model_parallel_size is not None:
        yield f"{key}.dtype and its layout are the server's; leave them out"
    if config.rollout.temperature != 1.0:
        yield (
            f"{key}.url with {k.rollout.temperature}: a server's prompt log-probabilities are of temperature 1, whatever the"
            " request says, and those of the policy must be, too; set it to 1, or give the teacher a path"
        )
    if config.distillation.reads_states:
        yield f"{key}.url with {k.distillation.top_k}: a server returns its best tokens only; set it to 20, say"


# -- The number of steps, and learning-rate schedules ------------------------------------------------------------------


def _guards(config: Config) -> Problems:
    """Bands that no value can be in; each number's least and greatest possible value."""
    most = {"response_length": config.data.max_response_length, "route_agreement": 1}
    for name in ("grad_norm", "entropy", "response_length", "rollout_gap", "route_agreement"):
        band, key = getattr(config.guards, name), f"guards.{name}"
        if band.high is not None and band.high <= 0:
            yield f"{marked(f'{key}.high')}={band.high:g} fires at every step: the number is positive; set it above 0"
        if band.low is not None and band.low > most.get(name, math.inf):
            yield f"{marked(f'{key}.low')}={band.low:g} fires at every step: the number is {most[name]} at most; lower it"


def schedule_problems(config: Config) -> Problems:
    """Checks the schedules of the policy, the critic, the reward model and the supervised warmup."""
    k, steps = keys_of(config), config.trainer.total_training_steps
    if steps:
        batch = config.data.train_batch_size
        updates = config.actor.num_updates(config.policy_steps, batch)
        counted = f"{k.trainer.total_training_steps}"
        if config.critic_only_steps:
            counted += f" - {config.critic_only_steps} that train the critic alone"
        if updates > steps:
            mini_batches, epochs = config.actor.num_mini_batches(batch), config.actor.ppo_epochs
            counted += f" x {mini_batches} mini-batches x {epochs} epochs = {updates} updates"
        yield from _schedule("actor.optim", config.actor.optim, updates, counted)
        if has_critic(config.algorithm):
            updates = config.critic.num_updates(steps, config.actor, batch)
            yield from _schedule("critic.optim", config.critic.optim, updates, f"the critic's {updates} updates")
    length, model = config.algorithm.iteration_steps, config.reward_model
    if model.path is not None and length is not None and steps // length:
        counted = f"{steps // length} outer iterations x {k.reward_model.steps}"
        yield from _schedule("reward_model.optim", model.optim, model.num_updates(steps, length), counted)
    if config.sft.steps:
        yield from _schedule("sft.optim", config.sft.optim, config.sft.steps, f"{k.sft.steps}")


def _schedule(section: str, optim: OptimConfig, total: int, counted: str) -> Problems:
    """Checks a schedule of `total` optimizer steps; `counted` says in words where they come from."""
    k, decay = keys_of(optim, section), optim.lr_wsd_decay_steps
    if optim.min_lr > optim.lr:
        yield f"{k.min_lr} is above {k.lr}; set it to {optim.lr:g} or less"
    if optim.lr_warmup_steps >= total:
        yield f"{k.lr_warmup_steps} leaves no step at the full rate: {counted}; set it to {total - 1} or less"
    if optim.lr_decay_style == "WSD" and decay is None:
        yield f"{k.lr_decay_style} needs {k.lr_wsd_decay_steps:key}; set it to {max(1, total // 10)}, say"
    elif optim.lr_decay_style == "WSD" and decay is not None and decay > total:
        yield f"{k.lr_wsd_decay_steps} is more than {counted}; set it to {total} or less"


def steps_of_epochs(config: Config, rows: int) -> int | None:
    """Counts the steps of the run: total_epochs x floor(rows / data.train_batch_size), as in verl.

    The sampler goes on from one epoch to the next without a gap (data/sampler.py), so the rows that a floor leaves over are
    the last ones of the run. None without `trainer.total_epochs`, or where the rows could not be read.
    """
    epochs = config.trainer.total_epochs
    return None if epochs is None or rows == 0 else epochs * (rows // config.data.train_batch_size)


def with_total_steps(config: Config, rows: int) -> Config:
    """Sets `trainer.total_training_steps` as `trainer.total_epochs` has it. `rows` are those of the training."""
    steps = steps_of_epochs(config, rows)
    if steps is None:
        return config
    return config.with_values({"trainer.total_training_steps": steps})


def epoch_problems(config: Config, rows: int) -> Problems:
    """Checks that `trainer.total_epochs` gives a step, and agrees with a given `trainer.total_training_steps`."""
    k, trainer, steps = keys_of(config), config.trainer, steps_of_epochs(config, rows)
    counted = (
        f"{k.trainer.total_epochs} x floor({rows} rows / {k.data.train_batch_size}) = {steps} step{'s' * (steps != 1)}"
    )
    if steps == 0:
        yield f"{counted}; set {k.data.train_batch_size:key}={rows} or less"
    elif steps and "total_training_steps" in trainer.model_fields_set and trainer.total_training_steps != steps:
        remedy = f"leave one of them out (on a command line: {k.trainer.total_epochs:key}=null)"
        yield f"{counted}, and {k.trainer.total_training_steps}; {remedy}"


# -- The folder of rollout files, and shared prompts -------------------------------------------------------------------


def budget_problems(config: Config) -> Problems:
    """Yields limits of `reward.budget` that are reached before the first step, so that no restart spends more."""
    k, budget = keys_of(config), config.reward.budget
    if budget.folder is None:
        return
    if not budget.limits:
        yield f"{k.reward.budget.folder} limits nothing; set {k.reward.budget.cost:key} or {k.reward.budget.tokens:key}"
    parts, own = config.reward.components, [source.reward for source in config.data.sources]
    tables = [config.reward.kwargs, *(part.kwargs for part in parts)]
    judges = [
        one for one in tables if "prompt" in one and Path(str(one.get("folder"))).resolve() == budget.folder.resolve()
    ]
    if not any(":" in str(name) for name in [config.reward.function, *(part.function for part in parts), *own]):
        if not judges:
            yield f"{k.reward.budget.folder}: no judge has this folder, so nothing is counted; set it in the judge's kwargs"
        elif budget.cost is not None and not any(
            "price" in pool for table in judges for pool in table.get("judges", ())
        ):
            yield f"{k.reward.budget.cost}: no judge of this folder has a price, so the cost stays 0; set it in judges"
    try:
        if over := exceeded(budget.folder, budget.limits):
            yield f"{k.reward.budget:key} has no room for a step: {over}; raise it, or name another folder"
    except (OSError, ValueError) as error:
        yield f"{k.reward.budget.folder}: its ledger.json cannot be read ({error}); move it away"


def rollout_file_problems(config: Config) -> Problems:
    """Checks the folder of rollout files."""
    k, folder, trainer = keys_of(config), config.trainer.rollout_data_dir, config.trainer
    if folder is None:
        return
    key = f"{k.trainer.rollout_data_dir}"
    if config.algorithm.source == "file":
        yield f"{key}: {k.algorithm.source} generates no responses, which could be written there; leave it out"
    if folder.resolve() == trainer.output_dir.resolve():
        yield f"{key} is {k.trainer.output_dir:key}; set a folder in it, such as {str(trainer.output_dir / 'rollouts')!r}"
    data = config.data
    rows = (*data.train_files, *data.val_files, *(one for s in data.sources for one in (*s.files, *s.val_files)))
    if beside := [str(path) for path in rows if path.suffix == ".jsonl" and folder.resolve() == path.resolve().parent]:
        yield f"{key} is the folder of {beside[0]!r}; a pattern of data files would read the rollouts; set another one"
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    is_kept = trainer.resume_mode == "disable"
    if not existing.is_dir():
        yield f"{key}: {str(existing)!r} is a file, not a folder; choose another"
    elif is_kept and folder.resolve().is_relative_to(trainer.output_dir.resolve()):
        return  # moved aside with the rest of the earlier run
    elif is_kept and rollout_files(folder):
        yield f"{key} holds an earlier run's rollouts, which {k.trainer.resume_mode} keeps; choose another folder"
    elif problem := owner_problem(folder, trainer.output_dir):
        yield f"{key}: {problem}"


def sharing_problems(config: Config, arch: Architecture | None) -> Problems:
    """Yields settings that shared prompts exclude."""
    k, actor, megatron = keys_of(config), config.actor, config.actor.megatron
    if not actor.share_prompts:
        return
    key, remedy = f"{k.actor.share_prompts}", "share_prompts=false"
    if megatron.context_parallel_size > 1:
        yield (
            f"{key} packs a prompt with all of its responses, and {k.actor.megatron.context_parallel_size} cuts every"
            f" sequence by itself; set it to 1, or {remedy}"
        )
    elif config.trainer.device != "cpu" and megatron.transformer_impl != "local":
        yield (
            f"{key} needs the attention of Megatron-Core's layers, and {k.actor.megatron.transformer_impl} may take"
            f" Transformer Engine's; set transformer_impl=local, or {remedy}"
        )
    if arch is not None and arch.latent is not None:
        yield f"{key} is not made for the latent attention of {arch.family}; set {remedy}"
    if arch is not None and arch.delta is not None:
        yield f"{key}: a gated delta net ({arch.family}) has one state per sequence, which no two rows can share; set {remedy}"
    if policy_losses.facts(actor.loss_mode).paired:
        yield f"{key} has no place for the pairs of {k.actor.loss_mode}; set {remedy}"
    if has_critic(config.algorithm):
        yield (
            f"{key} is not made for the critic of {k.algorithm.adv_estimator!r}, which packs the same rows; set {remedy}"
        )
