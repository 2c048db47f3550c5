"""Which algorithms go together: one message for every combination in the config that cannot work as it is written.

A method (docs/algorithms.md) is a data source, an estimator, a loss and an aggregation. Each is chosen by its
own key. What an estimator or a loss needs is a fact that it declares where it is defined (importing.py). So a user's own
`package.module:function` is checked like the registered ones.
"""

from __future__ import annotations

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import has_kl_loss, needs_old_logprobs, needs_reference, policy_losses
from grpo_megatron.checks.model_folders import has_critic
from grpo_megatron.checks.names import reward_name
from grpo_megatron.config import Config, FilterGroups, OptimConfig, PartialConfig, SamplingConfig
from grpo_megatron.config.problems import Findings, check, keys_of, marked
from grpo_megatron.data.task import get_task
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.rewards.reward import rewards
from grpo_megatron.storage.run_files import owner_problem, rollout_files


@check
def partial_problems(config: Config) -> Findings:
    """What responses of several steps (`rollout.partial`) cannot be combined with."""
    k = keys_of(config)
    partial, algorithm, longest = config.rollout.partial, config.algorithm, config.data.max_response_length
    if not partial.is_on:
        if partial != PartialConfig():
            changed = min(partial.model_fields_set - {"over_sample"})
            yield (
                f"{k.rollout.partial:key}.{changed} has no effect with {k.rollout.partial.over_sample}, which"
                " waits for every response; set over_sample above 1 (1.25, say), or leave it out"
            )
        return
    key = f"{k.rollout.partial.over_sample}"
    if algorithm.source != "policy":
        yield (f"{key} goes on under newer weights, and {k.algorithm.source} has none; leave rollout.partial out")
    if config.rollout.multi_turn.environment is not None:
        yield (
            f"{key}: a trajectory of several turns cannot wait for a later step; leave out"
            f" {k.rollout.partial:key} or rollout.multi_turn"
        )
    if partial.chunk_tokens >= longest:
        yield (
            f"{k.rollout.partial.chunk_tokens} is not less than {k.data.max_response_length}, so that no response"
            f" would be cut; set it to {max(1, longest // 8)}, say"
        )
    name = config.reward.function
    if name is not None and rewards.facts(name).compares:
        yield (
            f"{key}: {k.reward.function} compares the samples of a draw, which finish in different steps; leave one out"
        )
    correction = algorithm.rollout_correction
    if correction.rollout_is is None and correction.rollout_rs is None:
        yield (
            f"{key} trains on tokens of up to {partial.max_staleness} earlier steps, and {k.algorithm.rollout_correction:key} has"
            " neither rollout_is nor rollout_rs, so that they would count as the policy's own; set rollout_is=token"
        )


@check
def method_problems(config: Config) -> Findings:
    """Every combination that is wrong, by topic. `names.py` reports names that cannot be found."""
    for topic in (_groups, _losses, _sources, _sampling, partial_problems, _penalties, _iterations, _guards):
        yield from topic(config)


@check
def _groups(config: Config) -> Findings:
    """Estimators that compare samples, against the samples and rewards that the config provides."""
    k = keys_of(config)
    n, estimator = config.rollout.n, config.algorithm.adv_estimator
    facts = advantage_estimators.facts(estimator)
    key = f"{k.algorithm.adv_estimator!r}"
    if n == 1 and facts.compares_group and config.algorithm.source != "file":
        yield (
            f"{k.rollout.n}: {key} compares the samples of a prompt with each other, and one alone has advantage"
            " 0; set rollout.n=2 or more (8 is usual)"
        )
    if facts.needs_greedy_reward and config.algorithm.source == "file":
        yield (f"{key} needs a greedy response to every prompt, and {k.algorithm.source} draws none; set source=policy")
    # an environment may give rewards for single turns, which only a run can tell
    # those of reward models are checked with the models
    if facts.needs_step_rewards and config.rollout.multi_turn.environment is None and not config.reward_paths:
        name = reward_name(config.reward) or _task_reward(config)
        # nothing is known about a module:function before it runs: the estimator raises if it returns no steps
        if name in rewards.names() and not rewards.facts(name).gives_steps:
            yield (
                f"{key} needs rewards of single steps, and the reward {name!r} gives one for the whole response;"
                f" set {k.reward.function:key} to {' or '.join(rewards.names_with(gives_steps=True))}, or to a"
                ' module:function that returns {"score": ..., "steps": [(end, value), ...]}'
            )


def _task_reward(config: Config) -> str | None:
    try:
        return get_task(config.data.task).reward
    except Exception:  # noqa: BLE001 - whatever is wrong with the task is reported by another check
        return None


@check
def _losses(config: Config) -> Findings:
    """Losses against their aggregation and their estimator."""
    k = keys_of(config)
    actor, estimator = config.actor, config.algorithm.adv_estimator
    facts = policy_losses.facts(actor.loss_mode)
    if facts.aggregation and actor.loss_agg_mode not in facts.aggregation:
        yield (
            f"{k.actor.loss_mode} is a mean over responses, and {k.actor.loss_agg_mode} would weigh it otherwise;"
            f" set loss_agg_mode={' or '.join(facts.aggregation)}"
        )
    if not facts.paired:
        return
    if not advantage_estimators.facts(estimator).makes_pairs:
        yield (
            f"{k.actor.loss_mode} needs pairs, and {k.algorithm.adv_estimator!r} makes none; set"
            f" adv_estimator={_pair_estimators()}"
        )
    if actor.ppo_micro_batch_size_per_gpu == 1:
        yield (
            f"{k.actor.ppo_micro_batch_size_per_gpu} has no room for a pair, and {k.actor.loss_mode} needs both"
            " of its responses in one micro-batch; set 2 or more, or leave it out"
        )
    pair = 2 * (config.data.max_prompt_length + config.data.max_response_length)
    if actor.ppo_max_token_len_per_gpu < pair:
        yield (
            f"{k.actor.ppo_max_token_len_per_gpu} is less than a pair of full sequences, 2 x"
            f" ({k.data.max_prompt_length:key} + {k.data.max_response_length:key}) = {pair}; set it to {pair} or"
            " more"
        )


def _pair_estimators() -> str:
    return " or ".join(advantage_estimators.names_with(makes_pairs=True, scores=""))


@check
def _sources(config: Config) -> Findings:
    """Where responses come from, against what is done with them."""
    k = keys_of(config)
    algorithm, loss_mode = config.algorithm, config.actor.loss_mode
    key = f"{k.algorithm.source}"
    if algorithm.source == "policy":
        return
    if not policy_losses.facts(loss_mode).is_likelihood:
        yield (
            f"{key}: the responses are not the policy's, and {k.actor.loss_mode} is only for those; set"
            f" loss_mode={' or '.join(policy_losses.names_with(is_likelihood=True, scores=''))}, or source=policy"
        )
    if algorithm.source == "initial" and config.ref.path is not None:
        yield (
            f"{key} draws from the model that the run starts from, and {k.ref.path:key} names another; leave"
            " ref.path out"
        )
    if algorithm.replay.ratio:
        yield (f"{key}: {k.algorithm.replay.ratio} keeps samples of the policy; set it to 0")
    if algorithm.source == "file":
        yield from _file_source(config, key)


@check
def _file_source(config: Config, key: str) -> Findings:
    k = keys_of(config)
    algorithm, loss_mode = config.algorithm, config.actor.loss_mode
    estimator = advantage_estimators.facts(algorithm.adv_estimator)
    without_rewards = " or ".join(advantage_estimators.names_with(needs_rewards=False, scores=""))
    paired_losses = " or ".join(policy_losses.names_with(paired=True, scores=""))
    # an estimator that needs a greedy response has been reported by `_groups`
    if estimator.needs_rewards and not estimator.makes_pairs and not estimator.needs_greedy_reward:
        yield (
            f"{key} reads responses without rewards, and {k.algorithm.adv_estimator!r} needs rewards; set"
            f" adv_estimator={without_rewards} (SFT), or {_pair_estimators()} with actor.loss_mode={paired_losses}"
        )
    if config.rollout.temperature != 1.0:
        yield (
            f"{key}: {k.rollout.temperature} would also divide the logits of the training, and nothing is drawn"
            " at it; leave it out (rollout.val_kwargs.temperature is that of validation)"
        )
    if estimator.makes_pairs and not policy_losses.facts(loss_mode).paired:
        yield (
            f"{key} with {k.algorithm.adv_estimator} reads pairs, and {k.actor.loss_mode} takes none; set"
            f" loss_mode={paired_losses}, or adv_estimator={without_rewards}"
        )
    for name, enabled in (("filter_groups.enable", algorithm.filter_groups.enable), ("dupo", algorithm.dupo)):
        if enabled:
            yield f"{key}: {marked(f'algorithm.{name}')}=true chooses among drawn groups, and none is drawn; set it to false"


@check
def _sampling(config: Config) -> Findings:
    """Filters and buffers against each other and the batch."""
    k = keys_of(config)
    algorithm, size = config.algorithm, config.data.train_batch_size
    filtered = algorithm.filter_groups.enable
    if filtered and algorithm.dupo:
        yield (
            f"{k.algorithm.filter_groups.enable} and {k.algorithm.dupo} fill the same places, one with new"
            " prompts and one with copies; set one of them to false"
        )
    for name, enabled in (("filter_groups.enable", filtered), ("dupo", algorithm.dupo)):
        if enabled and config.rollout.n == 1:
            yield (
                f"algorithm.{name}=true compares the samples of a prompt, and {k.rollout.n}; set rollout.n=2 or more"
            )
    if config.data.gen_batch_size is not None and not filtered:
        yield (
            f"{k.data.gen_batch_size} is the size of a round of dynamic sampling, which is off; set"
            " algorithm.filter_groups.enable=true, or leave it out"
        )
    staleness = algorithm.filter_groups.max_staleness
    if staleness != FilterGroups().max_staleness and not filtered:
        yield (
            f"{k.algorithm.filter_groups.max_staleness} bounds the age of groups that dynamic sampling leaves"
            " over, and it is off; set algorithm.filter_groups.enable=true, or leave it out"
        )
    ratio = algorithm.replay.ratio
    if ratio and int(size * ratio) == 0:
        yield (
            f"{k.algorithm.replay.ratio} of {k.data.train_batch_size} prompts is less than one; set it to"
            f" {1 / size:g} or more, or to 0"
        )
    buffer, longest = config.reward.overlong_buffer.len, config.data.max_response_length
    if buffer is not None and buffer > longest:
        yield (
            f"{k.reward.overlong_buffer.len} is more than {k.data.max_response_length}, so that every response"
            f" would be penalised; set it to {longest // 4 or 1}, say"
        )


@check
def _penalties(config: Config) -> Findings:
    """A KL penalty in the reward must reach the advantages."""
    k = keys_of(config)
    algorithm = config.algorithm
    if algorithm.use_kl_in_reward and advantage_estimators.facts(algorithm.adv_estimator).ignores_token_penalties:
        yield (
            f"{k.algorithm.use_kl_in_reward} has no effect with {k.algorithm.adv_estimator!r}; set it to false"
            " (actor.use_kl_loss=true puts the KL into the loss)"
        )


@check
def _iterations(config: Config) -> Findings:
    """An outer iteration must renew something, and there must be more than one."""
    k = keys_of(config)
    steps = config.algorithm.iteration_steps
    if steps is None:
        return
    if not needs_reference(config.algorithm, config.actor) and config.reward_model.path is None:
        yield (
            f"{k.algorithm.iteration_steps} renews the reference and the reward model, and this run has neither;"
            " set actor.use_kl_loss=true or reward_model.path, or leave it out"
        )
    if steps >= config.trainer.total_training_steps > 0:
        yield (
            f"{k.algorithm.iteration_steps} leaves one iteration in {k.trainer.total_training_steps}; set it to"
            f" {max(1, config.trainer.total_training_steps // 2)} or less"
        )


@check
def _guards(config: Config) -> Findings:
    """Guards of numbers that the method does not compute."""
    k = keys_of(config)
    guards = config.guards
    if guards.kl.is_on and not has_kl_loss(config.actor):
        cause, remedy = ("use_kl_loss=false", "use_kl_loss=true")
        if config.actor.use_kl_loss:
            cause, remedy = "kl_loss_coef=0", "kl_loss_coef > 0"
        yield (f"{k.guards.kl:key} has a bound, and actor.{cause} computes no KL; leave guards.kl out, or set {remedy}")
    if guards.rollout_gap.is_on and not needs_old_logprobs(config.algorithm, config.actor):
        yield (
            f"{k.guards.rollout_gap:key} has a bound, and the policy's log-probabilities of the samples are not"
            f" computed with {k.actor.loss_mode}; leave guards.rollout_gap out"
        )


# -- Learning-rate schedules against the number of optimizer steps -----------------------------------------------------


@check
def schedule_problems(config: Config) -> Findings:
    """The schedules of the policy, the critic, the reward model and the supervised warmup."""
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


@check
def _schedule(key: str, optim: OptimConfig, total: int, counted: str) -> Findings:
    """`total` optimizer steps; `counted` says in words where they come from."""
    rate, warmup, style, decay = (
        marked(f"{key}.{name}") for name in ("min_lr", "lr_warmup_steps", "lr_decay_style", "lr_wsd_decay_steps")
    )
    steps = optim.lr_wsd_decay_steps
    if optim.min_lr > optim.lr:
        yield f"{rate}={optim.min_lr:g} is above {marked(f'{key}.lr')}={optim.lr:g}; set it to {optim.lr:g} or less"
    if optim.lr_warmup_steps >= total:
        yield (
            f"{warmup}={optim.lr_warmup_steps} leaves no step at the full rate: {counted};"
            f" set it to {total - 1} or less"
        )
    if optim.lr_decay_style != "WSD" and steps is not None:
        yield (
            f"{decay}={steps} has no effect with {style}={optim.lr_decay_style}; set lr_decay_style=WSD, or leave it out"
        )
    elif optim.lr_decay_style == "WSD" and steps is None:
        yield f"{style}=WSD needs {decay}; set it to {max(1, total // 10)}, say"
    elif optim.lr_decay_style == "WSD" and steps is not None and steps > total:
        yield f"{decay}={steps} is more than {counted}; set it to {total} or less"


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


@check
def epoch_problems(config: Config, rows: int) -> Findings:
    """`trainer.total_epochs` gives at least one step, and no other number than a given `trainer.total_training_steps`."""
    k = keys_of(config)
    trainer = config.trainer
    steps = steps_of_epochs(config, rows)
    if steps is None:
        return
    counted = f"{k.trainer.total_epochs} x floor({rows} rows / {k.data.train_batch_size}) = {steps}"
    if steps == 0:
        yield (f"{counted} steps; set {k.data.train_batch_size:key}={rows} or less")
    elif "total_training_steps" in trainer.model_fields_set and trainer.total_training_steps != steps:
        yield (f"{counted} steps, and {k.trainer.total_training_steps}; leave one of them out")


@check
def profile_problems(config: Config, profiled: range | None) -> Findings:
    """A run of so many steps has those that --profile names."""
    k, steps = keys_of(config), config.trainer.total_training_steps
    if profiled is not None and profiled.stop > steps:
        yield (
            f"--profile: the run has {steps} steps, counted from 0, so there is no step {profiled[-1]}; name"
            f" earlier steps, or raise {k.trainer.total_training_steps:key}"
        )


# -- Pass rates, and the folder of rollout files -----------------------------------------------------------------------


@check
def curation_problems(config: Config) -> Findings:
    """Pass rates that weight the prompts, and the folder of rollout files."""
    yield from _pass_rates(config)
    yield from _rollout_files(config)


@check
def _pass_rates(config: Config) -> Findings:
    k = keys_of(config)
    sampling = config.data.sampling
    if sampling.pass_rates is None:
        default = SamplingConfig()
        for name in SamplingConfig.model_fields:
            if (value := getattr(sampling, name)) != getattr(default, name):
                yield (
                    f"data.sampling.{name}={value} needs pass rates; set {k.data.sampling.pass_rates:key}, or"
                    " leave it out"
                )
        return
    if config.algorithm.source == "file":
        yield (
            f"{k.data.sampling.pass_rates:key} chooses among prompts, and {k.algorithm.source} reads prompts with"
            " responses; filter the file with `grpo-megatron curate`, or leave pass_rates out"
        )
    low, high = sampling.min_pass_rate, sampling.max_pass_rate
    if low > high:
        yield (f"{k.data.sampling.min_pass_rate} is above max_pass_rate={high:g}; swap them")
    if sampling.weight != "uniform" and not config.data.shuffle:
        yield (
            f"{k.data.sampling.weight} draws prompts at random, and {k.data.shuffle} takes them in the file's"
            " order; set shuffle=true, or weight=uniform"
        )
    if sampling.weight == "uniform" and sampling.uniform_share:
        yield (
            f"{k.data.sampling.uniform_share} has no effect with {k.data.sampling.weight}; set weight=p(1-p),"
            " say, or leave it out"
        )


@check
def _rollout_files(config: Config) -> Findings:
    k = keys_of(config)
    folder, trainer = config.trainer.rollout_data_dir, config.trainer
    if folder is None:
        return
    key = f"{k.trainer.rollout_data_dir}"
    if config.algorithm.source == "file":
        yield (f"{key}: {k.algorithm.source} draws no responses, which could be written there; leave it out")
    if folder.resolve() == trainer.output_dir.resolve():
        yield (
            f"{key} is {k.trainer.output_dir:key}; set a folder in it, such as {str(trainer.output_dir / 'rollouts')!r}"
        )
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        yield f"{key}: {str(existing)!r} is a file, not a folder; choose another"
        return
    is_inside = folder.resolve().is_relative_to(trainer.output_dir.resolve())
    if trainer.resume_mode == "disable" and is_inside:
        return  # moved aside with the rest of the earlier run
    if trainer.resume_mode == "disable" and rollout_files(folder):
        yield (f"{key} holds an earlier run's rollouts, which {k.trainer.resume_mode} keeps; choose another folder")
    elif problem := owner_problem(folder, trainer.output_dir):
        yield f"{key}: {problem}"


# -- Shared prompts ----------------------------------------------------------------------------------------------------


@check
def sharing_problems(config: Config, arch: Architecture | None) -> Findings:
    """What cannot be trained with shared prompts."""
    k = keys_of(config)
    actor = config.actor
    if not actor.share_prompts:
        return
    key, megatron = f"{k.actor.share_prompts}", actor.megatron
    if megatron.context_parallel_size > 1:
        yield (
            f"{key} packs a prompt with all of its responses, and {k.actor.megatron.context_parallel_size} cuts"
            " every sequence by itself; set it to 1, or share_prompts=false"
        )
    elif config.trainer.device != "cpu" and megatron.transformer_impl != "local":
        yield (
            f"{key} needs the attention of Megatron-Core's layers, and {k.actor.megatron.transformer_impl} may"
            " take Transformer Engine's; set transformer_impl=local, or share_prompts=false"
        )
    if arch is not None and arch.latent is not None:
        yield f"{key} is not made for the latent attention of {arch.family}; set share_prompts=false"
    if policy_losses.facts(actor.loss_mode).paired:
        yield (f"{key} has no place for the pairs of {k.actor.loss_mode}; set share_prompts=false")
    if advantage_estimators.facts(config.algorithm.adv_estimator).needs_values:
        yield (
            f"{key} is not made for the critic of {k.algorithm.adv_estimator!r}, which packs the same rows; set"
            " share_prompts=false"
        )
