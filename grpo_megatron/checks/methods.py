"""Which algorithms go together: one message for every combination in the config that cannot work as it is written.

A method (docs/algorithms.md) is a data source, an estimator, a loss and an aggregation. Each is chosen by its
own key. What an estimator or a loss needs is a fact that it declares where it is defined (registry.py). So a user's own
`package.module:function` is checked like the registered ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.algo.needs import (
    folds_old_logprobs,
    forward_only_at_zero_advantage,
    has_kl_in_reward,
    has_kl_loss,
    needs_old_logprobs,
    needs_reference,
    reasons_for_old_pass,
)
from grpo_megatron.checks.model_folders import has_critic
from grpo_megatron.checks.names import reward_name
from grpo_megatron.config import Config, FilterGroups, OptimConfig, PartialConfig, SamplingConfig
from grpo_megatron.config.problems import Problems
from grpo_megatron.data.tasks import get_task
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.rewards.reward import rewards
from grpo_megatron.storage.run_files import owner_problem, rollout_files

# -- Responses that take several steps (`rollout.partial`): what they cannot be combined with, and their lines of the pl


def partial_problems(config: Config) -> Problems:
    partial, algorithm, longest = config.rollout.partial, config.algorithm, config.data.max_response_length
    if not partial.is_on:
        if partial != PartialConfig():
            changed = min(partial.model_fields_set - {"over_sample"})
            yield (
                f"rollout.partial.{changed} has no effect with rollout.partial.over_sample=1, which waits for every response;"
                " set over_sample above 1 (1.25, say), or leave it out"
            )
        return
    key = f"rollout.partial.over_sample={partial.over_sample:g}"
    if algorithm.source != "policy":
        yield f"{key} goes on under newer weights, and algorithm.source={algorithm.source} has none; leave rollout.partial out"
    if config.rollout.multi_turn.environment is not None:
        yield (
            f"{key}: a trajectory of several turns cannot wait for a later step; leave out rollout.partial or"
            " rollout.multi_turn"
        )
    if partial.chunk_tokens >= longest:
        yield (
            f"rollout.partial.chunk_tokens={partial.chunk_tokens} is not less than data.max_response_length={longest}, so that"
            f" no response would be cut; set it to {max(1, longest // 8)}, say"
        )
    name = config.reward.function
    if name is not None and rewards.facts(name).compares:
        yield f"{key}: reward.function={name} compares the samples of a draw, which finish in different steps; leave one out"
    correction = algorithm.rollout_correction
    if correction.rollout_is is None and correction.rollout_rs is None:
        yield (
            f"{key} trains on tokens of up to {partial.max_staleness} earlier steps, and algorithm.rollout_correction has"
            " neither rollout_is nor rollout_rs, so that they would count as the policy's own; set rollout_is=token"
        )


def partial_lines(config: Config) -> Iterator[tuple[str, str]]:
    partial, batch = config.rollout.partial, config.data.train_batch_size
    if partial.is_on:
        yield (
            "partial rollouts",
            f"{ceil(batch * partial.over_sample)} prompts in progress for a batch of {batch}, in rounds of"
            f" {partial.chunk_tokens:,} tokens; none waits more than {partial.max_staleness} steps",
        )


def method_problems(config: Config) -> Problems:
    """Every combination that is wrong, by topic. `names.py` reports names that cannot be found."""
    for topic in (_groups, _losses, _sources, _sampling, partial_problems, _penalties, _iterations, _guards):
        yield from topic(config)


def _groups(config: Config) -> Problems:
    """Estimators that compare samples, against the samples and rewards that the config provides."""
    n, estimator = config.rollout.n, config.algorithm.adv_estimator
    facts = advantage_estimators.facts(estimator)
    key = f"algorithm.adv_estimator={estimator!r}"
    if n == 1 and facts.compares_group and config.algorithm.source != "file":
        yield (
            f"rollout.n=1: {key} compares the samples of a prompt with each other, and one alone has advantage 0; set"
            " rollout.n=2 or more (8 is usual)"
        )
    if facts.needs_greedy_reward and config.algorithm.source == "file":
        yield f"{key} needs a greedy response to every prompt, and algorithm.source=file draws none; set source=policy"
    # an environment may give rewards for single turns, which only a run can tell
    # those of reward models are checked with the models
    if facts.needs_step_rewards and config.rollout.multi_turn.environment is None and not config.reward_paths:
        name = reward_name(config.reward) or _task_reward(config)
        # nothing is known about a module:function before it runs: the estimator raises if it returns no steps
        if name in rewards.names() and not rewards.facts(name).gives_steps:
            yield (
                f"{key} needs rewards of single steps, and the reward {name!r} gives one for the whole response; set"
                f" reward.function to {' or '.join(rewards.names_with(gives_steps=True))}, or to a module:function that"
                ' returns {"score": ..., "steps": [(end, value), ...]}'
            )


def _task_reward(config: Config) -> str | None:
    try:
        return get_task(config.data.task).reward
    except Exception:  # noqa: BLE001 - whatever is wrong with the task is reported by another check
        return None


def _losses(config: Config) -> Problems:
    """Losses against their aggregation and their estimator."""
    actor, estimator = config.actor, config.algorithm.adv_estimator
    facts = policy_losses.facts(actor.loss_mode)
    if facts.aggregation and actor.loss_agg_mode not in facts.aggregation:
        yield (
            f"actor.loss_mode={actor.loss_mode} is a mean over responses, and actor.loss_agg_mode="
            f"{actor.loss_agg_mode} would weigh it otherwise; set loss_agg_mode={' or '.join(facts.aggregation)}"
        )
    if not facts.paired:
        return
    if not advantage_estimators.facts(estimator).makes_pairs:
        yield (
            f"actor.loss_mode={actor.loss_mode} needs pairs, and algorithm.adv_estimator={estimator!r} makes none; set"
            f" adv_estimator={_pair_estimators()}"
        )
    if actor.ppo_micro_batch_size_per_gpu == 1:
        yield (
            "actor.ppo_micro_batch_size_per_gpu=1 has no room for a pair, and"
            f" actor.loss_mode={actor.loss_mode} needs both of its responses in one micro-batch; set 2 or more, or leave it out"
        )
    pair = 2 * (config.data.max_prompt_length + config.data.max_response_length)
    if actor.ppo_max_token_len_per_gpu < pair:
        yield (
            f"actor.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu} is less than a pair of full sequences,"
            f" 2 x (data.max_prompt_length + data.max_response_length) = {pair}; set it to {pair} or more"
        )


def _pair_estimators() -> str:
    return " or ".join(advantage_estimators.names_with(makes_pairs=True, scores=""))


def _sources(config: Config) -> Problems:
    """Where responses come from, against what is done with them."""
    algorithm, loss_mode = config.algorithm, config.actor.loss_mode
    key = f"algorithm.source={algorithm.source}"
    if algorithm.source == "policy":
        return
    if not policy_losses.facts(loss_mode).is_likelihood:
        yield (
            f"{key}: the responses are not the policy's, and actor.loss_mode={loss_mode} is only for those; set"
            f" loss_mode={' or '.join(policy_losses.names_with(is_likelihood=True, scores=''))}, or source=policy"
        )
    if algorithm.source == "initial" and config.ref.path is not None:
        yield f"{key} draws from the model that the run starts from, and ref.path names another; leave ref.path out"
    if algorithm.replay.ratio:
        yield f"{key}: algorithm.replay.ratio={algorithm.replay.ratio:g} keeps samples of the policy; set it to 0"
    if algorithm.source == "file":
        yield from _file_source(config, key)


def _file_source(config: Config, key: str) -> Problems:
    algorithm, loss_mode = config.algorithm, config.actor.loss_mode
    estimator = advantage_estimators.facts(algorithm.adv_estimator)
    without_rewards = " or ".join(advantage_estimators.names_with(needs_rewards=False, scores=""))
    paired_losses = " or ".join(policy_losses.names_with(paired=True, scores=""))
    # an estimator that needs a greedy response has been reported by `_groups`
    if estimator.needs_rewards and not estimator.makes_pairs and not estimator.needs_greedy_reward:
        yield (
            f"{key} reads responses without rewards, and algorithm.adv_estimator={algorithm.adv_estimator!r} needs"
            f" rewards; set adv_estimator={without_rewards} (SFT), or {_pair_estimators()} with"
            f" actor.loss_mode={paired_losses}"
        )
    if config.rollout.temperature != 1.0:
        yield (
            f"{key}: rollout.temperature={config.rollout.temperature:g} would also divide the logits of the training, and"
            " nothing is drawn at it; leave it out (rollout.val_kwargs.temperature is that of validation)"
        )
    if estimator.makes_pairs and not policy_losses.facts(loss_mode).paired:
        yield (
            f"{key} with algorithm.adv_estimator={algorithm.adv_estimator} reads pairs, and actor.loss_mode={loss_mode}"
            f" takes none; set loss_mode={paired_losses}, or adv_estimator={without_rewards}"
        )
    for name, enabled in (("filter_groups.enable", algorithm.filter_groups.enable), ("dupo", algorithm.dupo)):
        if enabled:
            yield f"{key}: algorithm.{name}=true chooses among drawn groups, and none is drawn; set it to false"


def _sampling(config: Config) -> Problems:
    """Filters and buffers against each other and the batch."""
    algorithm, size = config.algorithm, config.data.train_batch_size
    filtered = algorithm.filter_groups.enable
    if filtered and algorithm.dupo:
        yield (
            "algorithm.filter_groups.enable=true and algorithm.dupo=true fill the same places, one with new prompts and"
            " one with copies; set one of them to false"
        )
    for name, enabled in (("filter_groups.enable", filtered), ("dupo", algorithm.dupo)):
        if enabled and config.rollout.n == 1:
            yield f"algorithm.{name}=true compares the samples of a prompt, and rollout.n=1; set rollout.n=2 or more"
    if config.data.gen_batch_size is not None and not filtered:
        yield (
            f"data.gen_batch_size={config.data.gen_batch_size} is the size of a round of dynamic sampling, which is"
            " off; set algorithm.filter_groups.enable=true, or leave it out"
        )
    staleness = algorithm.filter_groups.max_staleness
    if staleness != FilterGroups().max_staleness and not filtered:
        yield (
            f"algorithm.filter_groups.max_staleness={staleness} bounds the age of groups that dynamic sampling leaves over,"
            " and it is off; set algorithm.filter_groups.enable=true, or leave it out"
        )
    ratio = algorithm.replay.ratio
    if ratio and int(size * ratio) == 0:
        yield (
            f"algorithm.replay.ratio={ratio:g} of data.train_batch_size={size} prompts is less than one; set it to"
            f" {1 / size:g} or more, or to 0"
        )
    buffer, longest = config.reward.overlong_buffer.len, config.data.max_response_length
    if buffer is not None and buffer > longest:
        yield (
            f"reward.overlong_buffer.len={buffer} is more than data.max_response_length={longest}, so that every"
            f" response would be penalised; set it to {longest // 4 or 1}, say"
        )


def _penalties(config: Config) -> Problems:
    """A KL penalty in the reward must reach the advantages."""
    algorithm = config.algorithm
    if algorithm.use_kl_in_reward and advantage_estimators.facts(algorithm.adv_estimator).ignores_token_penalties:
        yield (
            f"algorithm.use_kl_in_reward=true has no effect with algorithm.adv_estimator={algorithm.adv_estimator!r};"
            " set it to false (actor.use_kl_loss=true puts the KL into the loss)"
        )


def _iterations(config: Config) -> Problems:
    """An outer iteration must renew something, and there must be more than one."""
    steps = config.algorithm.iteration_steps
    if steps is None:
        return
    if not needs_reference(config.algorithm, config.actor) and config.reward_model.path is None:
        yield (
            f"algorithm.iteration_steps={steps} renews the reference and the reward model, and this run has neither;"
            " set actor.use_kl_loss=true or reward_model.path, or leave it out"
        )
    if steps >= config.trainer.total_training_steps > 0:
        yield (
            f"algorithm.iteration_steps={steps} leaves one iteration in trainer.total_training_steps="
            f"{config.trainer.total_training_steps}; set it to {max(1, config.trainer.total_training_steps // 2)} or less"
        )


def _guards(config: Config) -> Problems:
    """Guards of numbers that the method does not compute."""
    guards = config.guards
    if guards.kl.is_on and not has_kl_loss(config.actor):
        cause, remedy = ("use_kl_loss=false", "use_kl_loss=true")
        if config.actor.use_kl_loss:
            cause, remedy = "kl_loss_coef=0", "kl_loss_coef > 0"
        yield f"guards.kl has a bound, and actor.{cause} computes no KL; leave guards.kl out, or set {remedy}"
    if guards.rollout_gap.is_on and not needs_old_logprobs(config.algorithm, config.actor):
        yield (
            "guards.rollout_gap has a bound, and the policy's log-probabilities of the samples are not computed with"
            f" actor.loss_mode={config.actor.loss_mode}; leave guards.rollout_gap out"
        )


# -- Learning-rate schedules against the number of optimizer steps that they run over ----------------------------------


def schedule_problems(config: Config) -> Problems:
    """The schedules of the policy, the critic, the reward model and the supervised warmup."""
    steps = config.trainer.total_training_steps
    if steps:
        batch = config.data.train_batch_size
        updates = config.actor.num_updates(config.policy_steps, batch)
        counted = f"trainer.total_training_steps={steps}"
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
        counted = f"{steps // length} outer iterations x reward_model.steps={model.steps}"
        yield from _schedule("reward_model.optim", model.optim, model.num_updates(steps, length), counted)
    if config.sft.steps:
        yield from _schedule("sft.optim", config.sft.optim, config.sft.steps, f"sft.steps={config.sft.steps}")


def _schedule(key: str, optim: OptimConfig, total: int, counted: str) -> Problems:
    """`total` optimizer steps; `counted` says in words where they come from."""
    if optim.min_lr > optim.lr:
        yield f"{key}.min_lr={optim.min_lr:g} is above {key}.lr={optim.lr:g}; set it to {optim.lr:g} or less"
    if optim.lr_warmup_steps >= total:
        yield (
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps} leaves no step at the full rate: {counted};"
            f" set it to {total - 1} or less"
        )
    decay = optim.lr_wsd_decay_steps
    if optim.lr_decay_style == "WSD":
        if decay is None:
            yield f"{key}.lr_decay_style=WSD needs {key}.lr_wsd_decay_steps; set it to {max(1, total // 10)}, say"
        elif decay > total:
            yield f"{key}.lr_wsd_decay_steps={decay} is more than {counted}; set it to {total} or less"
    elif decay is not None:
        yield (
            f"{key}.lr_wsd_decay_steps={decay} has no effect with {key}.lr_decay_style={optim.lr_decay_style}; set"
            " lr_decay_style=WSD, or leave it out"
        )


# -- From `trainer.total_epochs` to training steps, once the rows are read ---------------------------------------------
# steps = total_epochs x floor(rows / data.train_batch_size)            as in verl
#
# The sampler goes on from one epoch to the next without a gap (data/sampler.py), so the rows that a floor leaves over are
# the last ones of the run, not the last ones of every epoch.


def steps_of_epochs(config: Config, rows: int) -> int | None:
    """The steps of the run; None without `trainer.total_epochs`, or where the rows could not be read."""
    epochs = config.trainer.total_epochs
    return None if epochs is None or rows == 0 else epochs * (rows // config.data.train_batch_size)


def with_total_steps(config: Config, rows: int) -> Config:
    """The config with `trainer.total_training_steps` as `trainer.total_epochs` has it. `rows` are those of the training."""
    steps = steps_of_epochs(config, rows)
    if steps is None:
        return config
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_training_steps": steps})})


def epoch_problems(config: Config, rows: int) -> Problems:
    """`trainer.total_epochs` gives at least one step, and no other number than a given `trainer.total_training_steps`."""
    trainer, batch = config.trainer, config.data.train_batch_size
    steps = steps_of_epochs(config, rows)
    if steps is None:
        return
    counted = (
        f"trainer.total_epochs={trainer.total_epochs} x floor({rows} rows / data.train_batch_size={batch}) = {steps}"
    )
    if steps == 0:
        yield f"{counted} steps; set data.train_batch_size={rows} or less"
    elif "total_training_steps" in trainer.model_fields_set and trainer.total_training_steps != steps:
        yield (
            f"{counted} steps, and trainer.total_training_steps={trainer.total_training_steps}; leave one of them out"
        )


def profile_problems(profiled: range | None, steps: int) -> Problems:
    """A run of so many steps has those that --profile names."""
    if profiled is not None and profiled.stop > steps:
        yield (
            f"--profile: the run has {steps} steps, counted from 0, so there is no step {profiled[-1]}; name earlier steps, or"
            " raise trainer.total_training_steps"
        )


# -- Pass rates that weight the prompts, and the folder of rollout files -----------------------------------------------


def curation_problems(config: Config) -> Problems:
    yield from _pass_rates(config)
    yield from _rollout_files(config)


def _pass_rates(config: Config) -> Problems:
    sampling = config.data.sampling
    if sampling.pass_rates is None:
        default = SamplingConfig()
        for name in SamplingConfig.model_fields:
            if (value := getattr(sampling, name)) != getattr(default, name):
                yield f"data.sampling.{name}={value} needs pass rates; set data.sampling.pass_rates, or leave it out"
        return
    if config.algorithm.source == "file":
        yield (
            "data.sampling.pass_rates chooses among prompts, and algorithm.source=file reads prompts with responses;"
            " filter the file with `grpo-megatron curate`, or leave pass_rates out"
        )
    low, high = sampling.min_pass_rate, sampling.max_pass_rate
    if low > high:
        yield f"data.sampling.min_pass_rate={low:g} is above max_pass_rate={high:g}; swap them"
    if sampling.weight != "uniform" and not config.data.shuffle:
        yield (
            f"data.sampling.weight={sampling.weight} draws prompts at random, and data.shuffle=false takes them in the"
            " file's order; set shuffle=true, or weight=uniform"
        )
    if sampling.weight == "uniform" and sampling.uniform_share:
        yield (
            f"data.sampling.uniform_share={sampling.uniform_share:g} has no effect with data.sampling.weight=uniform;"
            " set weight=p(1-p), say, or leave it out"
        )


def _rollout_files(config: Config) -> Problems:
    folder, trainer = config.trainer.rollout_data_dir, config.trainer
    if folder is None:
        return
    key = f"trainer.rollout_data_dir={str(folder)!r}"
    if config.algorithm.source == "file":
        yield f"{key}: algorithm.source=file draws no responses, which could be written there; leave it out"
    if folder.resolve() == trainer.output_dir.resolve():
        yield f"{key} is trainer.output_dir; set a folder in it, such as {str(trainer.output_dir / 'rollouts')!r}"
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        yield f"{key}: {str(existing)!r} is a file, not a folder; choose another"
        return
    is_inside = folder.resolve().is_relative_to(trainer.output_dir.resolve())
    if trainer.resume_mode == "disable" and is_inside:
        return  # moved aside with the rest of the earlier run
    if trainer.resume_mode == "disable" and rollout_files(folder):
        yield f"{key} holds an earlier run's rollouts, which trainer.resume_mode=disable keeps; choose another folder"
    elif problem := owner_problem(folder, trainer.output_dir):
        yield f"{key}: {problem}"


# -- Which forward passes a step makes besides the update, and why: lines of the printed plan. Whether prompts can be sh


def pass_lines(config: Config) -> Iterator[tuple[str, str]]:
    """(name, text) of each line: old log-probabilities, reference, what is left out of the update."""
    actor, algorithm, batch = config.actor, config.algorithm, config.data.train_batch_size
    name = "old log-probs"
    if folds_old_logprobs(algorithm, actor, batch):
        yield name, "of the update's own forward pass"
    elif not needs_old_logprobs(algorithm, actor):
        yield name, f"not read by {actor.loss_mode}"
    for reason in reasons_for_old_pass(algorithm, actor, batch):
        yield name, f"a pass before the update: {reason}"
    yield "reference", "; ".join(_uses_of_reference(config))
    if forward_only_at_zero_advantage(algorithm, actor):
        yield "backward pass", "left out for rows of advantage 0, where the plan finds this cheaper"
    if actor.share_prompts:
        yield "prompts", "one copy for the responses in a micro-batch, where the heaviest rank gets lighter"


def sharing_problems(config: Config, arch: Architecture | None) -> Iterator[str]:
    """What cannot be trained with shared prompts."""
    actor = config.actor
    if not actor.share_prompts:
        return
    key, megatron = "actor.share_prompts=true", actor.megatron
    if megatron.context_parallel_size > 1:
        yield (
            f"{key} packs a prompt with all of its responses, and actor.megatron.context_parallel_size="
            f"{megatron.context_parallel_size} cuts every sequence by itself; set it to 1, or share_prompts=false"
        )
    elif config.trainer.device != "cpu" and megatron.transformer_impl != "local":
        yield (
            f"{key} needs the attention of Megatron-Core's layers, and actor.megatron.transformer_impl="
            f"{megatron.transformer_impl} may take Transformer Engine's; set transformer_impl=local, or share_prompts=false"
        )
    if arch is not None and arch.latent is not None:
        yield f"{key} is not made for the latent attention of {arch.family}; set share_prompts=false"
    if policy_losses.facts(actor.loss_mode).paired:
        yield f"{key} has no place for the pairs of actor.loss_mode={actor.loss_mode}; set share_prompts=false"
    if advantage_estimators.facts(config.algorithm.adv_estimator).needs_values:
        yield (
            f"{key} is not made for the critic of algorithm.adv_estimator={config.algorithm.adv_estimator!r}, which packs"
            " the same rows; set share_prompts=false"
        )


def _uses_of_reference(config: Config) -> Iterator[str]:
    """What the reference model is used for."""
    actor, algorithm = config.actor, config.algorithm
    if not needs_reference(algorithm, actor):
        yield "no reference model" + (", as actor.kl_loss_coef=0" if actor.use_kl_loss else "")
        return
    if has_kl_loss(actor):
        yield f"{actor.kl_loss_coef:g} x {actor.kl_loss_type} in the loss"
    if has_kl_in_reward(algorithm):
        yield f"{algorithm.kl_ctrl.kl_coef:g} x {algorithm.kl_penalty} in the reward"
    if algorithm.source == "initial":
        yield "draws the responses"
    if not (has_kl_loss(actor) or has_kl_in_reward(algorithm) or algorithm.source == "initial"):
        yield f"read by {actor.loss_mode}"
