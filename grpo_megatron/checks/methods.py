"""Which algorithms go together: one line for every combination of the config that could not mean what it says.

A method (README, table of algorithms) is a data source, an estimator, a loss and an aggregation. Each is chosen by its
own key; this file knows which of them need each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_megatron.algo.advantages import (
    GROUP_RELATIVE,
    IGNORES_TOKEN_PENALTIES,
    NEEDS_GREEDY_REWARD,
    NEEDS_STEP_REWARDS,
)
from grpo_megatron.algo.losses import LIKELIHOOD_LOSSES, PAIRED_LOSSES
from grpo_megatron.algo.needs import needs_reference
from grpo_megatron.algo.sequence_losses import REQUIRED_AGGREGATION
from grpo_megatron.config import Config, FilterGroups
from grpo_megatron.data.tasks import get_task
from grpo_megatron.rewards.reward import rewards

Problems = Iterator[str]

PAIRING = ("best_worst",)  # estimators that choose a better and a worse sample of each prompt
STEP_REWARDS = ("arithmetic_steps",)  # registered rewards that score single steps; any module:function may


def method_problems(config: Config) -> Problems:
    """Every combination that is wrong, by topic."""
    for topic in (_groups, _losses, _sources, _sampling, _penalties, _iterations):
        yield from topic(config)


def _groups(config: Config) -> Problems:
    """Estimators that compare samples, against what there is to compare."""
    n, estimator = config.rollout.n, config.algorithm.adv_estimator
    key = f"algorithm.adv_estimator={estimator!r}"
    if n == 1 and estimator in GROUP_RELATIVE and config.algorithm.source != "file":
        yield (
            f"rollout.n=1: {key} compares the samples of a prompt with each other, and one alone has advantage 0; set"
            " rollout.n=2 or more (8 is usual)"
        )
    if estimator in NEEDS_GREEDY_REWARD and config.algorithm.source == "file":
        yield f"{key} needs a greedy response to every prompt, and algorithm.source=file draws none; set source=policy"
    function = config.reward.function
    if estimator in NEEDS_STEP_REWARDS:
        name = function or _task_reward(config)
        if name in rewards.names() and name not in STEP_REWARDS:
            yield (
                f"{key} needs rewards of single steps, and the reward {name!r} gives one for the whole response; set"
                f" reward.function to {' or '.join(STEP_REWARDS)}, or to a module:function that returns"
                ' {"score": ..., "steps": [(end, value), ...]}'
            )


def _task_reward(config: Config) -> str | None:
    try:
        return get_task(config.data.task).reward
    except Exception:  # noqa: BLE001 - whatever is wrong with the task is said elsewhere
        return None


def _losses(config: Config) -> Problems:
    """Losses against their aggregation and their estimator."""
    actor, estimator = config.actor, config.algorithm.adv_estimator
    allowed = REQUIRED_AGGREGATION.get(actor.loss_mode)
    if allowed and actor.loss_agg_mode not in allowed:
        yield (
            f"actor.loss_mode={actor.loss_mode} is a mean over responses, and actor.loss_agg_mode="
            f"{actor.loss_agg_mode} would weigh it otherwise; set loss_agg_mode={' or '.join(allowed)}"
        )
    if actor.loss_mode in PAIRED_LOSSES and estimator not in PAIRING:
        yield (
            f"actor.loss_mode={actor.loss_mode} needs pairs, and algorithm.adv_estimator={estimator!r} makes none; set"
            f" adv_estimator={' or '.join(PAIRING)}"
        )
    if actor.loss_mode in PAIRED_LOSSES and actor.ppo_micro_batch_size_per_gpu == 1:
        yield (
            "actor.ppo_micro_batch_size_per_gpu=1 has no room for a pair, and"
            f" actor.loss_mode={actor.loss_mode} needs both of it at once; set 2 or more, or leave it out"
        )
    pair = 2 * (config.data.max_prompt_length + config.data.max_response_length)
    if actor.loss_mode in PAIRED_LOSSES and actor.ppo_max_token_len_per_gpu < pair:
        yield (
            f"actor.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu} is less than a pair of full sequences,"
            f" 2 x (data.max_prompt_length + data.max_response_length) = {pair}; set it to {pair} or more"
        )


def _sources(config: Config) -> Problems:
    """Where responses come from, against what is done with them."""
    algorithm, loss = config.algorithm, config.actor.loss_mode
    key = f"algorithm.source={algorithm.source}"
    if algorithm.source == "policy":
        return
    if loss not in LIKELIHOOD_LOSSES:
        yield (
            f"{key}: the responses are not the policy's, and actor.loss_mode={loss} needs the policy's; set loss_mode="
            f"{' or '.join(LIKELIHOOD_LOSSES)}, or source=policy"
        )
    if algorithm.source == "initial" and config.ref.path is not None:
        yield f"{key} draws from the model that the run starts from, and ref.path names another; leave ref.path out"
    if algorithm.replay.ratio:
        yield f"{key}: algorithm.replay.ratio={algorithm.replay.ratio:g} keeps samples of the policy; set it to 0"
    if algorithm.source == "file":
        if algorithm.adv_estimator not in ("constant", *PAIRING, *NEEDS_GREEDY_REWARD):
            yield (
                f"{key} reads responses without rewards, and algorithm.adv_estimator={algorithm.adv_estimator!r} needs"
                f" rewards; set adv_estimator=constant (SFT), or {PAIRING[0]} with actor.loss_mode=dpo"
            )
        if algorithm.adv_estimator in PAIRING and loss not in PAIRED_LOSSES:
            yield (
                f"{key} with algorithm.adv_estimator={algorithm.adv_estimator} reads pairs, and actor.loss_mode={loss}"
                f" takes none; set loss_mode={PAIRED_LOSSES[0]}, or adv_estimator=constant"
            )
        for name, on in (("filter_groups.enable", algorithm.filter_groups.enable), ("dupo", algorithm.dupo)):
            if on:
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
    for name, on in (("filter_groups.enable", filtered), ("dupo", algorithm.dupo)):
        if on and config.rollout.n == 1:
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
    if algorithm.use_kl_in_reward and algorithm.adv_estimator in IGNORES_TOKEN_PENALTIES:
        yield (
            f"algorithm.use_kl_in_reward=true has no effect with algorithm.adv_estimator={algorithm.adv_estimator!r};"
            " set it to false (actor.use_kl_loss=true puts the KL into the loss)"
        )


def _iterations(config: Config) -> Problems:
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
