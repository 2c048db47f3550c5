"""Which algorithms go together: one message for every combination in the config that cannot work as it is written.

A method (docs/algorithms.md) is a data source, an estimator, a loss and an aggregation. Each is chosen by its
own key. What an estimator or a loss needs is a fact that it declares where it is defined (registry.py). So a user's own
`package.module:function` is checked like the registered ones.
"""

from __future__ import annotations

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.algo.needs import has_kl_loss, needs_old_logprobs, needs_reference
from grpo_megatron.checks.components import reward_name
from grpo_megatron.checks.partial import partial_problems
from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import Config, FilterGroups
from grpo_megatron.data.tasks import get_task
from grpo_megatron.rewards.reward import rewards


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
